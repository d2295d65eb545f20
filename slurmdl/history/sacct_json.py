"""Job records of `sacct --json`, read one job at a time, so that memory does not grow with the file.

The schema is that of Slurm's data_parser plugins, v0.0.38 of 22.05 to v0.0.45 of 26.05. Since 23.02, numbers are
objects `{"set": ..., "infinite": ..., "number": ...}`; since 23.11, the state is a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from slurmdl.errors import InputError

EXPECTED = "expected the output of `sacct --json`"
_CHUNK_CHARS = 2**20
#: size of one job with all its steps, and of each of the other values
_MAX_VALUE_CHARS = 2**26
_SPACE = " \t\r\n"
#: Slurm's numbers without a value: NO_VAL and INFINITE
_NO_NUMBER = (2**32 - 2, 2**32 - 1, 2**64 - 2, 2**64 - 1)
_ONE_FIELD = str.maketrans("\x1f\r\n", "???")


def job_fields(file: TextIO, source: str, names: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which each job begins, and its values as `sacct -P` prints them, in the order of `names`.

    Times are epoch seconds, "0" if unknown. Steps are left out. Outputs may follow one another. Raises InputError if
    the text is not the JSON of sacct, or ends early.
    """
    reader = _JsonReader(file, source)
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

    def __init__(self, file: TextIO, source: str) -> None:
        self.source, self.line = source, 1
        self._file, self._decoder = file, json.JSONDecoder()
        self._text, self._position, self._is_end = "", 0, False

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
