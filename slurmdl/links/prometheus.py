"""Prometheus: link samples from a server's answers, and link scores as text for node_exporter's textfile collector.

Samples come from the HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/). The default queries use
metrics of node_exporter (https://github.com/prometheus/node_exporter): the speed of a node's fastest interface, which
is an upper bound of its throughput, and the fraction of retransmitted TCP segments. It has no RTT; a site with a
blackbox exporter or a ping mesh configures its own query.

Scores are written in the text exposition format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/); metric names follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from time import monotonic
from urllib.parse import quote, urlsplit

from slurmdl.config import PrometheusConfig
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample
from slurmdl.slurm import process

#: metric -> PromQL, in base units
DEFAULT_QUERIES: Mapping[str, str] = {
    "throughput": 'max without (device) (node_network_speed_bytes{device!~"lo|veth.*|docker.*|br.*"} > 0 and on '
                  '(instance, device) node_network_up == 1)',
    "loss": "rate(node_netstat_Tcp_RetransSegs[5m]) / (rate(node_netstat_Tcp_OutSegs[5m]) > 100)",
}
MAX_ANSWER_BYTES = 32 * 2**20  # size limit of a response; 100,000 nodes take 12 MB

#: metric -> (help, value of a score made at a time, or None if it was not measured)
_METRICS: Mapping[str, tuple[str, Callable[[LinkScore, float], float | None]]] = {
    "slurmdl_link_throughput_bytes_per_second": (
        "Throughput of the link, median of the recent samples.", lambda score, _: score.throughput),
    "slurmdl_link_rtt_seconds": (
        "Round-trip time over the link, median of the recent samples.", lambda score, _: score.rtt or None),
    "slurmdl_link_rtt_p99_seconds": (
        "Round-trip time over the link, 99th percentile.", lambda score, _: score.rtt_p99 or None),
    "slurmdl_link_loss_ratio": ("Fraction of packets lost on the link.", lambda score, _: score.loss),
    "slurmdl_link_samples": ("Samples of the score.", lambda score, _: score.samples),
    "slurmdl_link_sampled_timestamp_seconds": (
        "Time of the newest sample since the epoch.", lambda score, time: time - score.age),
}


def query_samples(server: PrometheusConfig, deadline: float) -> list[LinkSample]:
    """Current samples of the nodes, one per node and metric; `deadline` (monotonic clock) holds for all responses.

    The queries of the site override or extend DEFAULT_QUERIES. Port and domain are dropped from the node's name.
    Raises UnavailableError if there is no response in time, or an HTTP error; InputError if a response is not valid.
    """
    queries = {**DEFAULT_QUERIES, **{metric: query for metric, query in vars(server.queries).items() if query}}
    # the default throughput query returns nominal speeds, which are only an upper bound
    return [sample for metric, query in queries.items()
            for sample in parse_instant_vector(_run_query(server.url, query, deadline), metric, server.node_label,
                                               "counters" if query == DEFAULT_QUERIES.get(metric) else "prometheus")]


def parse_instant_vector(text: bytes, metric: str, node_label: str, source: str = "prometheus") -> list[LinkSample]:
    """Samples in the response to an instant query; implausible values are skipped. InputError if it is not valid."""
    samples = []
    for node, time, value in _parse_elements(text, node_label):
        with suppress(InputError):
            samples.append(LinkSample.from_json({"kind": "node", "name": node, "time": time, "source": source,
                                                 metric: value}))
    return samples


def query_nodes(server: PrometheusConfig, query: str, deadline: float) -> list[str]:
    """Names of the nodes in the response to a query, whatever their values. Errors as of `query_samples`."""
    answer = _run_query(server.url, query, deadline)
    return [node for node, _, _ in _parse_elements(answer, server.node_label) if node]


def _parse_elements(text: bytes, node_label: str) -> list[tuple[str, float, float]]:
    """Node, time and value of each element of an instant vector. InputError if the response is not valid."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"prometheus: response is not JSON (starts with {text[:40]!r})") from error
    try:
        if answer["status"] != "success" or answer["data"]["resultType"] != "vector":
            reason = str(answer.get("error") or answer["data"]["resultType"])[:200]
            raise InputError(f"prometheus: {reason!r}; expected an instant vector")
        return [(_node_name(str(element["metric"].get(node_label, ""))), float(element["value"][0]),
                 float(element["value"][1])) for element in answer["data"]["result"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise InputError(f"prometheus: response is malformed ({reason})") from error


def _node_name(target: str) -> str:
    """Node name in node17:9100 or node17.cluster.example:9100; IP addresses are kept."""
    name = re.sub(r"^\[(.*)\](:\d+)?$|^([^:]*):\d+$", r"\1\3", target)
    return name if re.fullmatch(r"[\d.]+|.*:.*", name) else name.partition(".")[0]


def _run_query(url: str, query: str, deadline: float) -> bytes:
    """Body of the response, which must be complete by the deadline even if the server sends slowly."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"prometheus: {url}: {error}") from error
    server = f"prometheus: {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    remaining_s = deadline - monotonic()
    if remaining_s <= 0:
        raise UnavailableError(f"{server}: no response in time")

    def read_response() -> bytes:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/query?query={quote(query)}",
                                    timeout=remaining_s) as response:
            return bytes(response.read(MAX_ANSWER_BYTES + 1))

    # the timeout of urlopen holds for each read, and not for the resolution of names
    response = process.start_thread(read_response)
    try:
        body = response(remaining_s)
    except (OSError, HTTPException, ValueError) as error:
        raise UnavailableError(f"{server}: {_error_reason(error)}") from error
    if len(body) > MAX_ANSWER_BYTES:
        raise InputError(f"{server}: response has more than {MAX_ANSWER_BYTES} bytes")
    return body


def _error_reason(error: Exception) -> str:
    if status := getattr(error, "code", None):
        return f"HTTP status {status}"
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no response in time"
    reason = getattr(error, "reason", "") or error
    return getattr(reason, "strerror", "") or str(reason) or type(error).__name__


def exposition_text(scores: LinkScores) -> str:
    """All scores as text, one time series per metric and link; values that were not measured are left out."""
    lines = []
    for metric, (help_text, value_of) in _METRICS.items():
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge"]
        for kind, links in scores.by_kind.items():
            for name, score in sorted(links.items()):
                if (value := value_of(score, scores.time)) is not None:
                    label = name.replace("\\", r"\\").replace('"', r'\"').replace("\n", r"\n")
                    lines.append(f'{metric}{{kind="{kind}",link="{label}"}} {value!r}')
    metric = "slurmdl_scores_timestamp_seconds"
    lines += [f"# HELP {metric} Time at which the scores were made, since the epoch.", f"# TYPE {metric} gauge",
              f"{metric} {scores.time!r}"]
    return "\n".join(lines) + "\n"
