"""What one pair may cost, and what it measured. Standard library only: every node of a probe imports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmdl.errors import InputError
from slurmdl.links.samples import MAX_BANDWIDTH

#: enough to know a loss of 3 % to a tenth of a point, over three peers
MAX_LOSS_PROBES = 10_000


@dataclass(frozen=True)
class ProbeConfig:
    """How much one pair of nodes may cost.

    Attributes
    ----------
    echoes : round trips, one at a time, within `echo_seconds`.
    datagrams : small ones, sent for the loss at `datagram_rate` a second, and echoed.
    size, seconds : bytes and seconds of one stream, whichever is first; one each way.
    rate_limit : bytes/s that a stream does not exceed, 0 for none.
    deadline : seconds for all of it.
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
        """So that a pair takes about so many seconds: less of all where they are few, else more datagrams."""
        share = seconds / self.expected_s
        if share >= 1:
            more = (seconds - self.expected_s) * self.loss_probe_rate
            return replace(self, loss_probes=min(MAX_LOSS_PROBES, self.loss_probes + int(more)),
                           timeout_s=self.timeout_s + seconds)
        return ProbeConfig(max(5, int(self.rtt_probes * share)), self.rtt_seconds * share,
                      max(50, int(self.loss_probes * share)), self.loss_probe_rate, max(10**
                          6, int(self.stream_bytes * share)),
                      self.stream_seconds * share, self.rate_limit, min(self.timeout_s, 3 * seconds + 0.5))

    @property
    def expected_s(self) -> float:
        """Seconds that a pair takes on links that are as they should be."""
        return self.rtt_seconds + self.loss_probes / self.loss_probe_rate + 2 * self.stream_seconds


@dataclass(frozen=True)
class PairMeasurement:
    """What two nodes measured of the way between them; None for what they did not.

    Attributes
    ----------
    forward, backward : bytes/s from the first to the second, and back.
    delay, delay_tail : round trip in s, median and 99th percentile.
    loss : fraction of datagrams lost, one way, the mean of both.
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
        """Bytes/s of the worse direction."""
        known = [value for value in (self.forward, self.backward) if value is not None]
        return min(known, default=None)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Any) -> PairMeasurement:
        """The inverse of `to_json`; InputError where it does not fit."""
        try:
            pair = cls(**data)
            figures = [v for k, v in asdict(pair).items() if k not in ("first", "second") and v is not None]
            if not all(type(v) in (int, float) and 0 <= v < MAX_BANDWIDTH for v in figures):
                raise TypeError(f"figures from 0 to {MAX_BANDWIDTH:g} expected")
        except TypeError as error:
            raise InputError(f"pair: malformed ({error})") from error
        return pair
