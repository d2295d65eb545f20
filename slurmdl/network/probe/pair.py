"""What one pair may cost, and what it measured. Standard library only: every node of a probe imports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmdl.errors import InputError
from slurmdl.network.samples import FASTEST

#: enough to know a loss of 3 % to a tenth of a point, over three peers
MOST_DATAGRAMS = 10_000


@dataclass(frozen=True)
class Effort:
    """How much one pair of nodes may cost.

    Attributes
    ----------
    echoes : round trips, one at a time, within `echo_seconds`.
    datagrams : small ones, sent for the loss at `datagram_rate` a second, and echoed.
    size, seconds : bytes and seconds of one stream, whichever is first; one each way.
    rate_limit : bytes/s that a stream does not exceed, 0 for none.
    deadline : seconds for all of it.
    """

    echoes: int = 100
    echo_seconds: float = 0.25
    datagrams: int = 2000
    datagram_rate: float = 5000.0
    size: int = 16_000_000
    seconds: float = 0.3
    rate_limit: float = 0.0
    deadline: float = 5.0

    def within(self, seconds: float) -> Effort:
        """So that a pair takes about so many seconds: less of all where they are few, else more datagrams."""
        share = seconds / self.expected
        if share >= 1:
            more = (seconds - self.expected) * self.datagram_rate
            return replace(self, datagrams=min(MOST_DATAGRAMS, self.datagrams + int(more)),
                           deadline=self.deadline + seconds)
        return Effort(max(5, int(self.echoes * share)), self.echo_seconds * share,
                      max(50, int(self.datagrams * share)), self.datagram_rate, max(10**6, int(self.size * share)),
                      self.seconds * share, self.rate_limit, min(self.deadline, 3 * seconds + 0.5))

    @property
    def expected(self) -> float:
        """Seconds that a pair takes on links that are as they should be."""
        return self.echo_seconds + self.datagrams / self.datagram_rate + 2 * self.seconds


@dataclass(frozen=True)
class Pair:
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
    delay: float | None = None
    delay_tail: float | None = None
    loss: float | None = None

    @property
    def throughput(self) -> float | None:
        """Bytes/s of the worse direction."""
        known = [value for value in (self.forward, self.backward) if value is not None]
        return min(known, default=None)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Any) -> Pair:
        """The inverse of `to_json`; InputError where it does not fit."""
        try:
            pair = cls(**data)
            figures = [v for k, v in asdict(pair).items() if k not in ("first", "second") and v is not None]
            if not all(type(v) in (int, float) and 0 <= v < FASTEST for v in figures):
                raise TypeError(f"figures from 0 to {FASTEST:g} expected")
        except TypeError as error:
            raise InputError(f"pair: malformed ({error})") from error
        return pair
