"""Samples of links: what was measured once, as the collector stores it and as everything that measures writes it.

Samples travel as JSON lines, one object each; a key that is not known of a link is absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmdl.errors import InputError

#: a node's link to its leaf; a zone's uplink; the way between two leaf zones
LINK_KINDS = ("node", "zone", "trunk")
#: bytes/s that no link has, and seconds since the epoch that nobody lives to see
MAX_BANDWIDTH, MAX_TIMESTAMP = 1e15, 1e12
#: characters of a link's name; Slurm has at most 255 for a node
MAX_NAME_CHARS = 600
#: standard error, as a fraction, beyond which a figure says nothing
MAX_RSE = 100.0
SOURCES = ("probe", "serve", "job", "counters", "prometheus", "file")


class _LinkSampleFields(NamedTuple):
    kind: str
    name: str
    time: float
    source: str
    throughput: float | None = None
    rtt: float | None = None
    rtt_p99: float | None = None
    loss: float | None = None
    rdma: bool = False
    throughput_rse: float | None = None


# no dataclass: that would take a node longer to import than its counters to read
class LinkSample(_LinkSampleFields):
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

    def _validate(self) -> None:
        """The one place where a sample's fields are checked: what passes can be stored, sorted and printed."""
        kind, name = self.kind, self.name
        if kind not in LINK_KINDS:
            raise InputError(f"sample: kind {short_repr(kind)} is not valid; valid: {', '.join(LINK_KINDS)}")
        if not is_link_name(name, kind):
            raise InputError(f"sample: name {short_repr(name)} is not valid; valid: a {kind}'s name"
                             + (", as A|B in sorted order" if kind == "trunk" else ""))
        if self.source not in SOURCES:
            raise InputError(f"sample of {name}: source {short_repr(self.source)} is not valid; "
                             f"valid: {', '.join(SOURCES)}")
        if not isinstance(self.rdma, bool):
            raise InputError(f"sample of {name}: rdma {short_repr(self.rdma)} is not valid; valid: true, false")
        _check_number("time", self.time, name, 0, MAX_TIMESTAMP)
        for key, low, high in (("throughput", 0, MAX_BANDWIDTH), ("delay", 0, 60), ("delay_tail", 0, 60), ("loss", 0, 1),
                               ("noise", 0, MAX_RSE)):
            value = getattr(self, key)
            if value is not None:
                _check_number(key, value, name, low, high)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None and value is not False}

    @classmethod
    def from_json(cls, data: Any) -> LinkSample:
        """The inverse of `to_json`; InputError names what does not fit."""
        if not isinstance(data, dict):
            raise InputError(f"sample: {short_repr(data)} is not valid; valid: a JSON object")
        for key in data:
            if key not in cls._fields:
                raise InputError(f"sample: unknown key {short_repr(key)}; valid: {', '.join(cls._fields)}")
        for key in cls._fields[:_REQUIRED_COUNT]:
            if key not in data:
                raise InputError(f"sample: {key} is missing")
        return cls(**data)


#: how many of the fields, the first ones, have no default
_REQUIRED_COUNT = len(LinkSample._fields) - len(LinkSample._field_defaults)


def _check_number(key: str, value: Any, name: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(f"sample of {name}: {key} {short_repr(value)} is not valid; "
                         f"valid: a number from {low:g} to {high:g}")


def short_repr(value: Any) -> str:
    """A value of a JSON text in a few characters. What it contains, if anything, is not looked at."""
    if isinstance(value, (list, dict)):
        return "[...]" if isinstance(value, list) else "{...}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]}...{text[-20:]}"


def is_link_name(name: Any, kind: str) -> bool:
    """Whether it can be the name of a link of that kind."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS \
        and (kind != "trunk" or is_inter_leaf_name(name))


def is_inter_leaf_name(name: str) -> bool:
    """Whether it names a way between two leaf zones."""
    parts = name.split("|")
    return len(parts) == 2 and all(parts) and parts == sorted(parts)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for json.loads; InputError where a key stands in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError(f"{short_repr(twice)} stands there twice")
    return found


def format_sample_lines(samples: Iterable[LinkSample]) -> str:
    return "".join(json.dumps(sample.to_json(), separators=(",", ":")) + "\n" for sample in samples)


def parse_sample_lines(lines: Iterable[str]) -> Iterator[LinkSample | InputError]:
    """Each line's sample; an InputError, not raised, for a line that holds none, so that the rest is kept."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield LinkSample.from_json(json.loads(line, object_pairs_hook=reject_duplicate_keys))
        except (ValueError, RecursionError) as error:
            yield InputError(f"is not JSON ({type(error).__name__})", line=number, text=line[:80])
        except InputError as error:
            yield InputError(str(error), line=number)
