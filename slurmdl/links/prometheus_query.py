"""Link figures from a Prometheus server, by its HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/).

The shipped queries ask for what node_exporter says (https://github.com/prometheus/node_exporter) of a node's own
link: the speed of its fastest interface that is up, less than which no interface gives, and the share of TCP
segments that were sent again. Nothing there measures a delay; a site with a blackbox exporter or a ping mesh gives a
query of its own.
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

#: figure -> PromQL, in base units
DEFAULT_QUERIES: Mapping[str, str] = {
    "throughput": 'max without (device) (node_network_speed_bytes{device!~"lo|veth.*|docker.*|br.*"} > 0 and on '
                  '(instance, device) node_network_up == 1)',
    "loss": "rate(node_netstat_Tcp_RetransSegs[5m]) / (rate(node_netstat_Tcp_OutSegs[5m]) > 100)",
}
#: bytes of an answer; one of 100,000 nodes has 12 MB
MAX_ANSWER_BYTES = 32 * 2**20
_CHUNK_BYTES = 65536


def query_samples(url: str, queries: Mapping[str, str], node_label: str, deadline: float) -> list[LinkSample]:
    """What the server says of the nodes now, a sample for each node and figure.

    Parameters
    ----------
    queries : figure -> PromQL; those of QUERIES that are not given here are asked as well.
    label : of the answers, that names the node; a port or a domain behind the name is cut off.
    deadline : of the monotonic clock, when the last answer must be there.

    Raises
    ------
    UnavailableError : no answer in time, or none of success.
    InputError : the answer is not what the API gives.
    """
    # the shipped throughput is what an interface calls its speed, which only bounds it
    return [sample for figure, query in {**DEFAULT_QUERIES, **queries}.items()
            for sample in parse_instant_vector(_run_query(url, query, deadline), figure, node_label,
                                "counters" if query == DEFAULT_QUERIES.get(figure) else "prometheus")]


def parse_instant_vector(text: bytes, metric: str, node_label: str, source: str = "prometheus") -> list[LinkSample]:
    """The samples in an answer to an instant query; values that no link has are passed over.

    Raises
    ------
    InputError : it is not the JSON that the API gives.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"prometheus: the answer is not JSON (it begins with {text[:40]!r})") from error
    try:
        if answer["status"] != "success" or answer["data"]["resultType"] != "vector":
            why = str(answer.get("error") or answer["data"]["resultType"])[:200]
            raise InputError(f"prometheus: {why!r}; valid: an instant vector")
        found = [_parse_vector_element(each, metric, node_label, source) for each in answer["data"]["result"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{type(error).__name__}: {str(error)[:80]}"
        raise InputError(f"prometheus: the answer is malformed ({what})") from error
    return [sample for sample in found if sample is not None]


def _parse_vector_element(element: Any, metric: str, node_label: str, source: str) -> LinkSample | None:
    time, value = element["value"]
    name = _node_name(str(element["metric"].get(node_label, "")))
    try:
        return LinkSample.from_json({"kind": "node", "name": name, "time": float(time), "source": source,
                                     metric: float(value)})
    except InputError:
        return None


def _node_name(target: str) -> str:
    """The node behind node17:9100 or node17.cluster.example:9100; an address stays as it is."""
    name = re.sub(r"^\[(.*)\](:\d+)?$|^([^:]*):\d+$", r"\1\3", target)
    return name if re.fullmatch(r"[\d.]+|.*:.*", name) else name.partition(".")[0]


def _run_query(url: str, query: str, deadline: float) -> bytes:
    """The body of the answer, whose last byte must come before the deadline: one that drips is cut off."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"prometheus: {url}: {error}") from error
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    left = deadline - monotonic()
    if left <= 0:
        raise UnavailableError(f"prometheus: {where}: no answer in time")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/query?query={quote(query)}", timeout=left) as answer:
            body = bytearray()
            while chunk := answer.read1(_CHUNK_BYTES):
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise InputError(f"prometheus: {where}: the answer has more than {MAX_ANSWER_BYTES} bytes")
                if monotonic() > deadline:
                    raise UnavailableError(f"prometheus: {where}: no whole answer in time")
            return bytes(body)
    except (OSError, HTTPException, ValueError) as error:
        raise UnavailableError(f"prometheus: {where}: {_error_reason(error)}") from error


def _error_reason(error: Exception) -> str:
    status = getattr(error, "code", None)
    if status:
        return f"HTTP status {status}"
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no answer in time"
    reason = getattr(error, "reason", "") or error
    return getattr(reason, "strerror", "") or str(reason) or type(error).__name__
