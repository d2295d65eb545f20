"""Link samples from a Prometheus server, by its HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/).

The default queries use metrics of node_exporter (https://github.com/prometheus/node_exporter): the speed of a node's
fastest interface, which is an upper bound of its throughput, and the fraction of retransmitted TCP segments. It has
no RTT; a site with a blackbox exporter or a ping mesh configures its own query.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.samples import LinkSample

#: metric -> PromQL, in base units
DEFAULT_QUERIES: Mapping[str, str] = {
    "throughput": 'max without (device) (node_network_speed_bytes{device!~"lo|veth.*|docker.*|br.*"} > 0 and on '
                  '(instance, device) node_network_up == 1)',
    "loss": "rate(node_netstat_Tcp_RetransSegs[5m]) / (rate(node_netstat_Tcp_OutSegs[5m]) > 100)",
}
#: size limit of a response; 100,000 nodes take 12 MB
MAX_ANSWER_BYTES = 32 * 2**20
_CHUNK_BYTES = 65536


def query_samples(url: str, queries: Mapping[str, str], node_label: str, deadline: float) -> list[LinkSample]:
    """Current samples of the nodes, one per node and metric.

    Parameters
    ----------
    queries : metric -> PromQL; they override or extend DEFAULT_QUERIES.
    node_label : label with the node name; its port and domain are dropped.
    deadline : on the monotonic clock, for all responses.

    Raises
    ------
    UnavailableError : no response in time, or an HTTP error.
    InputError : the response is not valid.
    """
    # the default throughput query returns nominal speeds, which are only an upper bound
    return [sample for metric, query in {**DEFAULT_QUERIES, **queries}.items()
            for sample in parse_instant_vector(_run_query(url, query, deadline), metric, node_label,
                                               "counters" if query == DEFAULT_QUERIES.get(metric) else "prometheus")]


def parse_instant_vector(text: bytes, metric: str, node_label: str, source: str = "prometheus") -> list[LinkSample]:
    """Samples in the response to an instant query; implausible values are skipped.

    Raises
    ------
    InputError : the response is not valid.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"prometheus: response is not JSON (starts with {text[:40]!r})") from error
    try:
        if answer["status"] != "success" or answer["data"]["resultType"] != "vector":
            reason = str(answer.get("error") or answer["data"]["resultType"])[:200]
            raise InputError(f"prometheus: {reason!r}; expected an instant vector")
        samples = [_parse_vector_element(each, metric, node_label, source) for each in answer["data"]["result"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise InputError(f"prometheus: response is malformed ({reason})") from error
    return [sample for sample in samples if sample is not None]


def _parse_vector_element(element: Any, metric: str, node_label: str, source: str) -> LinkSample | None:
    time, value = element["value"]
    name = _node_name(str(element["metric"].get(node_label, "")))
    try:
        return LinkSample.from_json({"kind": "node", "name": name, "time": float(time), "source": source,
                                     metric: float(value)})
    except InputError:
        return None


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
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/query?query={quote(query)}",
                                    timeout=remaining_s) as response:
            body = bytearray()
            while chunk := response.read1(_CHUNK_BYTES):
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise InputError(f"{server}: response has more than {MAX_ANSWER_BYTES} bytes")
                if monotonic() > deadline:
                    raise UnavailableError(f"{server}: response not complete in time")
            return bytes(body)
    except (OSError, HTTPException, ValueError) as error:
        raise UnavailableError(f"{server}: {_error_reason(error)}") from error


def _error_reason(error: Exception) -> str:
    status = getattr(error, "code", None)
    if status:
        return f"HTTP status {status}"
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no response in time"
    reason = getattr(error, "reason", "") or error
    return getattr(reason, "strerror", "") or str(reason) or type(error).__name__
