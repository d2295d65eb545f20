"""Link scores as Prometheus text, for node_exporter's textfile collector or over HTTP.

Text exposition format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/); metric names follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any

from slurmdl.errors import SlurmdlError, warn
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.tcp_server import ConnectionSlots, RateLimitedLog, create_listener, parse_peer_address

MAX_CLIENTS, CLIENT_TIMEOUT_S = 64, 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


def exposition_text(scores: LinkScores) -> str:
    """All scores as text, one time series per metric and link; values that were not measured are left out."""
    kinds = (("node", scores.nodes), ("zone", scores.zones), ("inter_leaf", scores.inter_leaf))
    lines = []
    for metric, (help_text, value_of) in _METRICS.items():
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge"]
        for kind, links in kinds:
            for name, score in sorted(links.items()):
                value = value_of(score, scores.time)
                if value is not None:
                    lines.append(f'{metric}{{kind="{kind}",link="{_escape_label(name)}"}} {value!r}')
    metric = "slurmdl_scores_timestamp_seconds"
    lines += [f"# HELP {metric} Time at which the scores were made, since the epoch.", f"# TYPE {metric} gauge",
              f"{metric} {scores.time!r}"]
    return "\n".join(lines) + "\n"


def _escape_label(label: str) -> str:
    return re.sub(r'[\\"\n]', lambda match: {"\n": r"\n"}.get(match[0], "\\" + match[0]), label)


def metrics_server(address: tuple[str, int], get_scores: Callable[[], LinkScores]) -> ThreadingHTTPServer:
    """Create an HTTP server for /metrics; it answers 503 if the scores cannot be read.

    Raises
    ------
    OSError : the address cannot be bound.
    """
    return _MetricsServer(create_listener(*address), partial(_MetricsHandler, get_scores))


class _MetricsServer(ThreadingHTTPServer):
    """One thread per client; the number of clients and the time of each are bounded."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: Callable[..., BaseRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()[:2]
        self._slots, self._log = ConnectionSlots(MAX_CLIENTS), RateLimitedLog(warn)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        def on_evict() -> None:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        if not self._slots.acquire(parse_peer_address(client_address[0]), on_evict):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release(on_evict)

    def service_actions(self) -> None:
        self._slots.evict_older_than(CLIENT_TIMEOUT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # disconnected clients are not logged
            self._log("error", f"internal error: {type(error).__name__}: {error}")


class _MetricsHandler(BaseHTTPRequestHandler):
    """Handler of one request."""

    timeout = 5

    def __init__(self, get_scores: Callable[[], LinkScores], *args: object) -> None:
        self._get_scores = get_scores
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        try:
            status, body = 200, exposition_text(self._get_scores())
        except SlurmdlError as error:
            status, body = 503, f"{error}\n"
        data = body.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""
