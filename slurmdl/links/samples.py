"""Link samples: single measurements of one link, in the form in which they are sent, spooled and stored.

Samples travel as JSON lines, one object each; unknown values are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmdl.errors import InputError

#: link of a node to its leaf zone, uplink of a zone, path between two leaf zones
LINK_KINDS = ("node", "zone", "inter_leaf")
#: key of the scores of one kind of link in files -> the kind
KIND_OF_KEY = {"nodes": "node", "zones": "zone", "inter_leaf": "inter_leaf"}
#: upper bounds of valid values: bytes/s, seconds since the epoch
MAX_BANDWIDTH, MAX_TIMESTAMP = 1e15, 1e12
#: characters of a link's name; Slurm allows 255 for a node
MAX_NAME_CHARS = 600
#: relative standard error above which a throughput is meaningless
MAX_RSE = 100.0
SOURCES = ("probe", "agent", "job", "counters", "prometheus", "file")


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


# a named tuple: importing dataclasses takes longer than `links counters` takes to read the counters
class LinkSample(_LinkSampleFields):
    """One measurement of one link; InputError if a field is not valid.

    Attributes
    ----------
    kind : one of LINK_KINDS.
    name : of the node or zone; for "inter_leaf" the sorted names of both leaf zones, joined with "|".
    time : seconds since the epoch.
    source : one of SOURCES.
    throughput : bytes/s.
    rtt, rtt_p99 : round-trip time in s, median and 99th percentile.
    loss : fraction of packets lost, 0 to 1.
    rdma : whether the link belongs to an RDMA fabric, whose losses TCP does not repair.
    throughput_rse : relative standard error of the throughput.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # the type checker takes the signature from the fields
        def __new__(cls, *values: Any, **named: Any) -> LinkSample:
            sample = super().__new__(cls, *values, **named)
            sample._validate()
            return sample

    def _validate(self) -> None:
        kind, name = self.kind, self.name
        if kind not in LINK_KINDS:
            raise InputError(f"sample: kind {short_json_repr(kind)}: expected one of {', '.join(LINK_KINDS)}")
        if not is_link_name(name, kind):
            raise InputError(f"sample: name {short_json_repr(name)}: expected {link_name_form(kind)}")
        if self.source not in SOURCES:
            raise InputError(f"sample of {name}: source {short_json_repr(self.source)}: "
                             f"expected one of {', '.join(SOURCES)}")
        if not isinstance(self.rdma, bool):
            raise InputError(f"sample of {name}: rdma {short_json_repr(self.rdma)}: expected true or false")
        _check_number("time", self.time, name, 0, MAX_TIMESTAMP)
        for key, low, high in (("throughput", 0, MAX_BANDWIDTH), ("rtt", 0, 60), ("rtt_p99", 0, 60), ("loss", 0, 1),
                               ("throughput_rse", 0, MAX_RSE)):
            value = getattr(self, key)
            if value is not None:
                _check_number(key, value, name, low, high)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None and value is not False}

    @classmethod
    def from_json(cls, data: Any) -> LinkSample:
        """Inverse of `to_json`; InputError if the data is not valid."""
        if not isinstance(data, dict):
            raise InputError(f"sample: {short_json_repr(data)}: expected a JSON object")
        for key in data:
            if key not in cls._fields:
                raise InputError(f"sample: unknown key {short_json_repr(key)}; expected {', '.join(cls._fields)}")
        for key in cls._fields[:_REQUIRED_COUNT]:
            if key not in data:
                raise InputError(f"sample: {key} is missing")
        return cls(**data)


#: number of leading fields without a default
_REQUIRED_COUNT = len(LinkSample._fields) - len(LinkSample._field_defaults)


def _check_number(key: str, value: Any, name: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(f"sample of {name}: {key} {short_json_repr(value)}: "
                         f"expected a number from {low:g} to {high:g}")


def short_json_repr(value: Any) -> str:
    """Shortened repr of a JSON value; lists and objects are not expanded."""
    if isinstance(value, (list, dict)):
        return "[...]" if isinstance(value, list) else "{...}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]}...{text[-20:]}"


def is_link_name(name: Any, kind: str) -> bool:
    """Whether `name` is a valid name of a link of that kind."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS \
        and (kind != "inter_leaf" or is_inter_leaf_name(name))


def link_name_form(kind: str) -> str:
    """Description of a valid link name, for error messages."""
    return "two leaf zone names A|B in sorted order" if kind == "inter_leaf" else f"a {kind} name"


def is_inter_leaf_name(name: str) -> bool:
    """Whether `name` is the name of a path between two leaf zones."""
    parts = name.split("|")
    return len(parts) == 2 and all(parts) and parts == sorted(parts)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of json.loads that raises InputError if a key is repeated."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise InputError(f"{short_json_repr(duplicate)}: duplicate key")
    return result


def format_sample_lines(samples: Iterable[LinkSample]) -> str:
    return "".join(json.dumps(sample.to_json(), separators=(",", ":")) + "\n" for sample in samples)


def parse_sample_lines(lines: Iterable[str]) -> Iterator[LinkSample | InputError]:
    """Yield the sample of each line; for an invalid line yield, not raise, an InputError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield LinkSample.from_json(json.loads(line, object_pairs_hook=reject_duplicate_keys))
        except (ValueError, RecursionError) as error:
            yield InputError(f"is not JSON ({type(error).__name__})", line=number, text=line[:80])
        except InputError as error:
            yield InputError(str(error), line=number)
