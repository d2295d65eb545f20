"""Samples of links: what was measured once, as the collector stores it and as everything that measures writes it.

Samples travel as JSON lines, one object each; a key that is not known of a link is absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmdl.errors import InputError

#: a node's link to its leaf; a zone's uplink; the way between two leaf zones
KINDS = ("node", "zone", "trunk")
#: bytes/s that no link has, and seconds since the epoch that nobody lives to see
FASTEST, LATEST = 1e15, 1e12
#: standard error, as a fraction, beyond which a figure says nothing
NOISIEST = 100.0
SOURCES = ("probe", "serve", "job", "counters", "prometheus", "file")


class _Measured(NamedTuple):
    kind: str
    name: str
    time: float
    source: str
    throughput: float | None = None
    delay: float | None = None
    delay_tail: float | None = None
    loss: float | None = None
    rdma: bool = False
    noise: float | None = None


# no dataclass: that would take a node longer to import than its counters to read
class LinkSample(_Measured):
    """One measurement of one link.

    Attributes
    ----------
    kind : one of KINDS.
    name : of the node or zone; of a trunk the names of its two leaf zones, sorted, joined with "|".
    time : seconds since the epoch.
    source : one of SOURCES.
    throughput : bytes/s that the link carries; None where it was not measured.
    delay, delay_tail : round trip in s, median and 99th percentile.
    loss : fraction of packets lost, 0 to 1.
    rdma : whether it is of an RDMA fabric, where no TCP stands behind the figures.
    noise : standard error of the throughput as a fraction of it, where the measurement can tell.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # where the fields tell what there is to give
        def __new__(cls, *values: Any, **named: Any) -> LinkSample:
            made = super().__new__(cls, *values, **named)
            made._check()
            return made

    def _check(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"sample: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.source not in SOURCES:
            raise InputError(f"sample of {self.name}: source {self.source!r} is not one of {', '.join(SOURCES)}")
        if not isinstance(self.name, str) or not self.name.isprintable() or not self.name or \
                (self.kind == "trunk" and not is_trunk(self.name)):
            raise InputError(f"sample: name {self.name!r} is not valid; valid: a {self.kind}'s name"
                             + (", as A|B in sorted order" if self.kind == "trunk" else ""))
        _check("time", self.time, self.name, 0, LATEST)
        for key, low, high in (("throughput", 0, FASTEST), ("delay", 0, 60), ("delay_tail", 0, 60), ("loss", 0, 1),
                               ("noise", 0, NOISIEST)):
            value = getattr(self, key)
            if value is not None:
                _check(key, value, self.name, low, high)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None and value is not False}

    @classmethod
    def from_json(cls, data: Any) -> LinkSample:
        """The inverse of `to_json`; InputError names what does not fit."""
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"sample: malformed ({error})") from error


def _check(key: str, value: Any, name: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(f"sample of {name}: {key} {value!r} is not valid; valid: a number from {low:g} to {high:g}")


def is_trunk(name: str) -> bool:
    """Whether it names a way between two leaf zones."""
    parts = name.split("|")
    return len(parts) == 2 and all(parts) and parts == sorted(parts)


def to_lines(samples: Iterable[LinkSample]) -> str:
    return "".join(json.dumps(sample.to_json(), separators=(",", ":")) + "\n" for sample in samples)


def from_lines(lines: Iterable[str]) -> Iterator[LinkSample | InputError]:
    """Each line's sample; an InputError, not raised, for a line that holds none, so that the rest is kept."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield LinkSample.from_json(json.loads(line))
        except (ValueError, RecursionError) as error:
            yield InputError(f"is not JSON ({type(error).__name__})", line=number, text=line[:80])
        except InputError as error:
            yield InputError(str(error), line=number)
