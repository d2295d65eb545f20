"""Link samples: single measurements of one link, as JSON lines in files and in a spool directory.

Each line is one object; unknown values are left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmdl import files
from slurmdl.errors import InputError, UnavailableError
from slurmdl.text import short_json_repr

#: key of the scores of one kind of link in files -> the kind: link of a node to its leaf zone, uplink of a zone, path
#: between two leaf zones
KIND_OF_KEY = {"nodes": "node", "zones": "zone", "inter_leaf": "inter_leaf"}
LINK_KINDS = tuple(KIND_OF_KEY.values())
#: upper bounds of valid values: bytes/s, seconds since the epoch, seconds
MAX_BANDWIDTH, MAX_TIMESTAMP, MAX_RTT_S = 1e15, 1e12, 60.0
MAX_NAME_CHARS = 600  # characters of a link's name; Slurm allows 255 for a node
MAX_RSE = 100.0  # relative standard error above which a throughput is meaningless
#: age at which samples are removed from a user's file
SAMPLE_RETENTION_S = 3600.0
#: size up to which a user's file is read: some 200,000 samples
_MAX_MERGED_BYTES = 32 * 2**20
#: suffix of complete spool files, and number of files of one host in a spool; older ones are deleted
SPOOL_SUFFIX, MAX_SPOOL_FILES = ".jsonl", 100
SOURCES = ("probe", "job", "counters", "prometheus", "file")


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

    Attributes:
        kind: one of LINK_KINDS.
        name: of the node or zone; for "inter_leaf" the sorted names of both leaf zones, joined with "|".
        time: seconds since the epoch.
        source: one of SOURCES.
        throughput: bytes/s.
        rtt, rtt_p99: round-trip time in s, median and 99th percentile.
        loss: fraction of packets lost, 0 to 1.
        rdma: whether the link belongs to an RDMA fabric, whose losses TCP does not repair.
        throughput_rse: relative standard error of the throughput.
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
        check_link_name(name, kind, "sample: name ")
        if self.source not in SOURCES:
            raise InputError(f"sample of {name}: source {short_json_repr(self.source)}: "
                             f"expected one of {', '.join(SOURCES)}")
        if not isinstance(self.rdma, bool):
            raise InputError(f"sample of {name}: rdma {short_json_repr(self.rdma)}: expected true or false")
        for key, high in (("time", MAX_TIMESTAMP), ("throughput", MAX_BANDWIDTH), ("rtt", MAX_RTT_S),
                          ("rtt_p99", MAX_RTT_S), ("loss", 1), ("throughput_rse", MAX_RSE)):
            value = getattr(self, key)
            if not is_number_up_to(value, high) and (value is not None or key == "time"):
                raise InputError(f"sample of {name}: {key} {short_json_repr(value)}: "
                                 f"expected a number from 0 to {high:g}")

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
        for key in cls._fields:
            if key not in data and key not in cls._field_defaults:
                raise InputError(f"sample: {key} is missing")
        return cls(**data)


def is_number_up_to(value: Any, high: float) -> bool:
    """Whether a JSON value is a number from 0 to `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= high


def check_link_name(name: Any, kind: str, culprit: str) -> None:
    """Raise InputError, with `culprit` before the name, unless it is a valid name of a link of that kind."""
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS
    if kind == "inter_leaf":
        expected, ends = "two leaf zone names A|B in sorted order", name.split("|") if is_name else []
        is_name = len(ends) == 2 and all(ends) and ends == sorted(ends)
    else:
        expected = f"a {kind} name"
    if not is_name:
        raise InputError(f"{culprit}{short_json_repr(name)}: expected {expected}")


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


def merge_into_sample_file(path: str, samples: Sequence[LinkSample]) -> None:
    """Atomically write the samples and those in the file that are younger than SAMPLE_RETENTION_S, under a lock.

    Of a file beyond _MAX_MERGED_BYTES the end is read, with the newest samples. Raises OSError if the file cannot be
    written, InputError if it cannot be read.
    """
    kept: list[LinkSample] = []
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with files.locked(path):
        if os.path.exists(path):
            kept = [sample for sample in parse_sample_lines(files.read_newest_lines(path, _MAX_MERGED_BYTES))
                    if not isinstance(sample, Exception) and sample.time > time.time() - SAMPLE_RETENTION_S]
        files.write_atomic(path, format_sample_lines([*kept, *samples]))


def spool_samples(spool_dir: str, samples: Sequence[LinkSample]) -> None:
    """Write samples to a new file, which appears complete, in a spool; UnavailableError if that fails."""
    if not samples:
        return
    host = os.uname().nodename
    path = os.path.join(spool_dir, f"{samples[-1].time:.6f}-{host}-{os.getpid()}{SPOOL_SUFFIX}")
    try:
        os.makedirs(spool_dir, mode=0o755, exist_ok=True)
        files.write_atomic(path, format_sample_lines(samples))
        own_files = sorted(name for name in os.listdir(spool_dir) if name.endswith(SPOOL_SUFFIX)
                           and name.partition("-")[2].rpartition("-")[0] == host)
        for name in own_files[:-MAX_SPOOL_FILES]:
            with suppress(FileNotFoundError):  # read by the collector
                os.unlink(os.path.join(spool_dir, name))
    except OSError as error:
        raise UnavailableError(f"{spool_dir}: samples cannot be written ({error.strerror})") from error
