"""Cost and result of probing one pair of nodes. Standard library only: every node of a probe imports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmdl.errors import InputError
from slurmdl.links.samples import MAX_BANDWIDTH

#: enough to measure a loss of 3 % to 0.1 points over three peers
MAX_LOSS_PROBES = 10_000


@dataclass(frozen=True)
class ProbeConfig:
    """Cost of probing one pair of nodes.

    Attributes
    ----------
    rtt_probes : sequential RTT measurements, within `rtt_seconds`.
    loss_probes : small datagrams, sent at `loss_probe_rate` per second and echoed.
    stream_bytes, stream_seconds : limits of one stream; there is one per direction.
    rate_limit : bytes/s of a stream, 0 for no limit.
    timeout_s : of the whole probe.
    """

    rtt_probes: int = 100
    rtt_seconds: float = 0.25
    loss_probes: int = 2000
    loss_probe_rate: float = 5000.0
    stream_bytes: int = 16_000_000
    stream_seconds: float = 0.3
    rate_limit: float = 0.0
    timeout_s: float = 5.0

    def scaled_to(self, seconds: float) -> ProbeConfig:
        """Scale all costs down to about `seconds` per pair, or fill them up with more loss probes."""
        scale = seconds / self.expected_s
        if scale >= 1:
            more = (seconds - self.expected_s) * self.loss_probe_rate
            return replace(self, loss_probes=min(MAX_LOSS_PROBES, self.loss_probes + int(more)),
                           timeout_s=self.timeout_s + seconds)
        return replace(self, rtt_probes=max(5, int(self.rtt_probes * scale)), rtt_seconds=self.rtt_seconds * scale,
                       loss_probes=max(50, int(self.loss_probes * scale)),
                       stream_bytes=max(10**6, int(self.stream_bytes * scale)),
                       stream_seconds=self.stream_seconds * scale, timeout_s=min(self.timeout_s, 3 * seconds + 0.5))

    @property
    def expected_s(self) -> float:
        """Seconds per pair on healthy links."""
        return self.rtt_seconds + self.loss_probes / self.loss_probe_rate + 2 * self.stream_seconds


@dataclass(frozen=True)
class PairMeasurement:
    """Measurement of the path between two nodes; None for values that are unknown.

    Attributes
    ----------
    forward, backward : bytes/s from the first node to the second, and back.
    rtt, rtt_p99 : round-trip time in s, median and 99th percentile.
    loss : fraction of datagrams lost one way, mean of both directions.
    """

    first: str
    second: str
    forward: float | None = None
    backward: float | None = None
    rtt: float | None = None
    rtt_p99: float | None = None
    loss: float | None = None

    @property
    def throughput(self) -> float | None:
        """Bytes/s of the slower direction."""
        return min((value for value in (self.forward, self.backward) if value is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Any) -> PairMeasurement:
        """Inverse of `to_json`; InputError if the data is not valid."""
        try:
            pair = cls(**data)
        except TypeError as error:
            raise InputError(f"pair: malformed ({error})") from error
        values = [v for k, v in asdict(pair).items() if k not in ("first", "second") and v is not None]
        if not all(type(v) in (int, float) and 0 <= v < MAX_BANDWIDTH for v in values):
            raise InputError(f"pair: malformed; expected numbers from 0 to {MAX_BANDWIDTH:g}")
        return pair
