"""How sacct prints jobs: times, time limits, and the JSON of `sacct --json`, read one job at a time.

Times are ISO 8601 with T or a blank, with or without zone, or epoch seconds. The JSON has the schema of Slurm's
data_parser plugins, v0.0.38 of 22.05 to v0.0.45 of 26.05. Since 23.02, numbers are objects `{"set": ..., "infinite":
..., "number": ...}`; since 23.11, the state is a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TextIO

from slurmdl.errors import InputError, UsageError

#: texts of a time that is not known
_UNKNOWN = frozenset({"", "Unknown", "None", "N/A", "NONE", "unknown"})
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d) ?(?:(Z)|([+-]\d\d)(?::?(\d\d))?)?")
_EPOCH = re.compile(r"[0-9]{1,11}")
#: seconds of the last digit of the minute and the seconds, e.g. `7:59`
_SECONDS = {f"{minute}:{second:02}": 60 * minute + second for minute in range(10) for second in range(60)}
#: texts without a time limit
_NO_LIMIT = frozenset({"", "UNLIMITED", "Partition_Limit", "INVALID", "None", "Unknown"})
_LIMIT = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):(\d\d):(\d\d)")
_UNITS_S = {"minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_RELATIVE = re.compile(r"now(?:-([0-9]{1,6})(minute|hour|day|week)s?)?")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(:[0-9]{2})?)?")
EXPECTED = "expected the output of `sacct --json`"
_CHUNK_CHARS = 2**20
#: size of one job with all its steps, and of each of the other values
_MAX_VALUE_CHARS = 2**26
_SPACE = " \t\r\n"
#: Slurm's numbers without a value: NO_VAL and INFINITE
_NO_NUMBER = (2**32 - 2, 2**32 - 1, 2**64 - 2, 2**64 - 1)
_ONE_FIELD = str.maketrans("\x1f\r\n", "???")


class TimestampParser:
    """Parser with a cache: one entry for each ten minutes.

    A local time that occurs twice, when clocks go back, is read as the first one; `second_occurrence` returns the
    second. A local time that never occurs is read as if clocks had not gone forward.

    Attributes:
        has_local_times: whether a time without zone was read.
    """

    def __init__(self) -> None:
        self.has_local_times = False
        self._base: dict[str, int] = {}
        self._shift: dict[str, int] = {}

    def parse(self, text: str) -> int:
        """Epoch seconds, -1 for an unknown time. Raises ValueError for any other format."""
        base = self._base.get(text[:15] + text[19:])
        if base is not None:
            seconds = _SECONDS.get(text[15:19])
            if seconds is not None:
                return base + seconds
        return self._parse_new(text)

    def second_occurrence(self, text: str, seconds: int) -> int:
        """The second time that the clock showed `text`, or `seconds`, its only one."""
        return seconds + self._shift.get(text[:15] + text[19:], 0)

    def _parse_new(self, text: str) -> int:
        if text in _UNKNOWN:
            return -1
        if _EPOCH.fullmatch(text):
            return int(text) or -1
        match = _ISO.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is not a time")
        day, time, is_utc, hours, minutes = match.groups()
        zone = "+00:00" if is_utc else f"{hours}:{minutes or '00'}" if hours else ""
        moment = datetime.fromisoformat(f"{day}T{time[:4]}0:00{zone}")
        try:
            base = int(moment.timestamp())
        except (OverflowError, OSError) as error:
            raise ValueError(f"{text!r} is out of range") from error
        if not zone:
            self.has_local_times = True
            shift = int(moment.replace(fold=1).timestamp()) - base
            if shift > 0:
                self._shift[text[:15]] = shift
        seconds = _SECONDS.get(text[15:19])
        if seconds is None or base <= 0:
            raise ValueError(f"{text!r} is not a time")
        self._base[text[:15] + text[19:]] = base
        return base + seconds


def parse_time_limit(text: str) -> int:
    """Seconds of sacct's Timelimit, `[days-]hours:minutes:seconds`; -1 for none, or one that is not known.

    Raises ValueError for any other format.
    """
    if text in _NO_LIMIT:
        return -1
    match = _LIMIT.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a time limit")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_moment(text: str, option: str, now_s: float) -> int:
    """Epoch seconds of `2024-05-01`, `2024-05-01T12:30`, `now-7days` or epoch seconds; UsageError otherwise."""
    relative = _RELATIVE.fullmatch(text)
    if relative:
        return int(now_s) - int(relative[1] or 0) * _UNITS_S.get(relative[2], 0)
    padded = text
    if match := _MOMENT.fullmatch(text):
        padded += "" if match[2] else ":00" if match[1] else "T00:00:00"
    try:
        seconds = TimestampParser().parse(padded)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"{option} {text}: expected a time such as 2024-05-01, 2024-05-01T12:30 or now-7days")
    return seconds


def job_fields(file: TextIO, start: str, source: str, names: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which each job begins, and its values as `sacct -P` prints them, in the order of `names`.

    One job at a time is in memory. `start` is what was read of the text. Times are epoch seconds, "0" if unknown.
    Steps are left out. Outputs may follow one another. Raises InputError if the text is not the JSON of sacct, or
    ends early.
    """
    reader = _JsonReader(file, start, source)
    while reader.peek():
        yield from _read_output(reader, names)


def _read_output(reader: _JsonReader, names: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    reader.expect("{")
    keys: list[str] = []
    while reader.peek() != "}":
        if keys:
            reader.expect(",")
        keys.append(str(reader.value()))
        reader.expect(":")
        if keys[-1] != "jobs" or reader.peek() != "[":
            reader.value()
            continue
        reader.expect("[")
        while reader.peek() != "]":
            line, job = reader.line, reader.value()
            if not isinstance(job, dict) or not isinstance(job.get("time"), dict) or "nodes" not in job:
                raise InputError(f"a job without time and nodes; {EXPECTED}", reader.source, line)
            yield line, [_TEXTS[name](job).translate(_ONE_FIELD) for name in names]
            if reader.peek() != "]":
                reader.expect(",")
        reader.expect("]")
    reader.expect("}")
    if "jobs" not in keys:
        raise InputError(f"JSON without jobs; {EXPECTED}", reader.source, reader.line)


class _JsonReader:
    """Values of a JSON text, of which only the current one is in memory.

    Attributes:
        line: number of the line that is read, from 1.
    """

    def __init__(self, file: TextIO, start: str, source: str) -> None:
        self.source, self.line = source, 1
        self._file, self._decoder = file, json.JSONDecoder()
        self._text, self._position, self._is_end = start, 0, False

    def peek(self) -> str:
        """The next character after white space, "" at the end of the text."""
        while True:
            start = self._position
            while self._position < len(self._text) and self._text[self._position] in _SPACE:
                self._position += 1
            self.line += self._text.count("\n", start, self._position)
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def expect(self, character: str) -> None:
        found = self.peek()
        if found != character:
            raise self._error(f"{found!r} instead of {character!r}" if found else "ends early")
        self._position += 1

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                # what is cut at the end of the text, or a string that goes on, may become valid
                is_cut = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated string")
                if not is_cut or not self._read_more():
                    raise self._error("ends early" if is_cut else error.msg) from error
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            else:
                if end < len(self._text) or not self._read_more():  # a number may go on
                    self.line += self._text.count("\n", self._position, end)
                    self._position = end
                    return value

    def _read_more(self) -> bool:
        rest = len(self._text) - self._position
        if rest > _MAX_VALUE_CHARS:
            raise self._error(f"a value of more than {_MAX_VALUE_CHARS:,} characters")
        # twice the text, so that the time is linear in it
        more = "" if self._is_end else self._file.read(max(_CHUNK_CHARS, rest))
        self._is_end = not more
        if more:
            self._text, self._position = self._text[self._position:] + more, 0
        return bool(more)

    def _error(self, problem: str) -> InputError:
        return InputError(f"not readable as JSON ({problem}); {EXPECTED}", self.source, self.line)


def _number(value: Any) -> int | None:
    """An integer, or one in an object; None for null, infinite or one that is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value in _NO_NUMBER:
        return None
    return int(value) if abs(value) < 2**63 else None


def _text(value: Any) -> str:
    """A string, with "?" for halves of surrogate pairs, which cannot be written; "" for any other value."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _part(job: dict[str, Any], name: str) -> dict[str, Any]:
    value = job.get(name)
    return value if isinstance(value, dict) else {}


def _job_id(job: dict[str, Any]) -> str:
    array, het = _part(job, "array"), _part(job, "het")
    array_id, task, waiting = _number(array.get("job_id")), _number(array.get("task_id")), _text(array.get("task"))
    het_id, offset = _number(het.get("job_id")), _number(het.get("job_offset"))
    text = str(_number(job.get("job_id")) or "")
    if array_id and (waiting or task is not None):
        text = f"{array_id}_[{waiting}]" if waiting else f"{array_id}_{task}"
    elif het_id:
        text = str(het_id)
    return f"{text}+{offset}" if het_id and offset is not None else text


def _limit(job: dict[str, Any]) -> str:
    minutes = _number(job["time"].get("limit"))  # in minutes
    return "" if minutes is None else f"{minutes // 60}:{minutes % 60:02}:00"


def _state(job: dict[str, Any]) -> str:
    state = _part(job, "state").get("current")
    # PENDING, REQUEUED is a run that was requeued; sacct -P prints the second only
    return _text(state[-1] if isinstance(state, list) and state else state)


def _resource(job: dict[str, Any], kind: str) -> int:
    """Allocated number, or the requested one of a job that has none; 0 if unknown."""
    for resources in (_part(job, "tres").get("allocated"), _part(job, "tres").get("requested")):
        for resource in resources if isinstance(resources, list) else ():
            if isinstance(resource, dict) and resource.get("type") == kind:
                return _number(resource.get("count")) or 0
    return 0


#: column of `sacct -P` -> its text
_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "JobID": _job_id,
    "User": lambda job: _text(job.get("user")) or _text(_part(job, "association").get("user")),
    "Partition": lambda job: _text(job.get("partition")),
    "State": _state,
    "Submit": lambda job: str(_number(job["time"].get("submission")) or 0),
    "Start": lambda job: str(_number(job["time"].get("start")) or 0),
    "End": lambda job: str(_number(job["time"].get("end")) or 0),
    "Timelimit": _limit,
    "NNodes": lambda job: str(_number(job.get("allocation_nodes")) or _resource(job, "node")),
    "NCPUS": lambda job: str(_resource(job, "cpu")),
    "NodeList": lambda job: _text(job.get("nodes")),
}
