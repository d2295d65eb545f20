"""Records: frozen dataclasses as JSON, written and read by their fields and annotations.

An annotation is str, bool, int, float, another record, a tuple, sequence or mapping of these, a union of a record,
one other type and None, or `Annotated` with a `Valid`. Whole numbers are valid for float; numbers are finite.
"""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar

from slurmdl.errors import InputError
from slurmdl.text import short_json_repr

Record = TypeVar("Record")


@dataclass(frozen=True)
class Valid:
    """Values that are valid for a field, as annotation `Annotated[TYPE, Valid(...)]`; `expected` is for messages."""

    is_valid: Callable[[Any], bool]
    expected: str


Line = Annotated[str, Valid(lambda text: "\n" not in text, "a string of one line")]
_SCALARS: dict[type, Valid] = {
    str: Valid(lambda value: isinstance(value, str), "a string"),
    bool: Valid(lambda value: isinstance(value, bool), "true or false"),
    int: Valid(lambda value: type(value) is int, "an integer"),
    float: Valid(lambda value: type(value) in (int, float) and abs(value) <= 1e300, "a number")}


class _InvalidError(Exception):
    """An invalid value; `path`: its keys and list indices, the innermost first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str | int] = []


def to_json(record: Any, version: int | None = None) -> dict[str, Any]:
    """Return the fields of a record, and `version` if it is given."""
    return asdict(record) if version is None else {"version": version, **asdict(record)}


def from_json(record_type: type[Record], data: Any, culprit: str = "", version: int | None = None) -> Record:
    """Return the inverse of `to_json`; fields with a default are optional.

    Raises InputError, which names `culprit` (for example a file) and the key, if a key is missing or unknown, a value
    is not valid, or the version is another.
    """
    try:
        if version is not None and isinstance(data, dict):
            if data.get("version") != version:
                raise _InvalidError(f": version {short_json_repr(data.get('version'))}; expected {version}")
            data = {key: value for key, value in data.items() if key != "version"}
        record: Record = _read_record(record_type, data)
        return record
    except _InvalidError as error:
        path = "".join(f"[{part}]" if isinstance(part, int) else f": {part}" for part in reversed(error.path))
        raise InputError(f"{culprit}{path}{error}".lstrip(": ")) from error


@functools.cache
def _reader(annotation: Any) -> Callable[[Any], Any]:
    """Return the function that checks and converts a value of JSON."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_dataclass(annotation):
        return functools.partial(_read_record, annotation)
    if annotation in _SCALARS:
        return functools.partial(_read_scalar, annotation, _SCALARS[annotation])
    if origin is Annotated:
        return functools.partial(_read_scalar, *arguments)
    if origin in (typing.Union, types.UnionType):
        readers = {is_dataclass(each): _reader(each) for each in arguments if each is not types.NoneType}
        return functools.partial(_read_union, readers, types.NoneType in arguments)
    if origin in (tuple, collections.abc.Sequence):
        length = None if origin is not tuple or arguments[-1] is ... else len(arguments)
        return functools.partial(_read_list, _reader(arguments[0]), length)
    return functools.partial(_read_mapping, _reader(arguments[1]))


def _read_scalar(scalar: type, valid: Valid, value: Any) -> Any:
    if not _SCALARS[scalar].is_valid(value) or not valid.is_valid(value):
        raise _InvalidError(f" {short_json_repr(value)}: expected {valid.expected}")
    return scalar(value)


def _read_union(readers: dict[bool, Callable[[Any], Any]], is_optional: bool, value: Any) -> Any:
    if value is None and is_optional:
        return None
    return readers.get(isinstance(value, dict), next(iter(readers.values())))(value)


def _read_list(read: Callable[[Any], Any], length: int | None, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
        raise _InvalidError(f" {short_json_repr(value)}: expected a list{f' of {length}' if length else ''}")
    return tuple([_read_at(index, read, entry) for index, entry in enumerate(value)])


def _read_mapping(read: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidError(": expected an object")
    return {key: _read_at(key, read, entry) for key, entry in value.items()}


def _read_record(record_type: Any, value: Any) -> Any:
    if isinstance(value, record_type):
        return value
    if not isinstance(value, dict):
        raise _InvalidError(": expected an object")
    readers = _field_readers(record_type)
    for key in value:
        if key not in readers:
            raise _InvalidError(f": unknown key {short_json_repr(key)}; expected {', '.join(readers)}")
    for key, (_, is_required) in readers.items():
        if is_required and key not in value:
            raise _InvalidError(f": {key} is missing")
    return record_type(**{key: _read_at(key, readers[key][0], entry) for key, entry in value.items()})


def _read_at(part: str | int, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except _InvalidError as error:
        error.path.append(part)
        raise


@functools.cache
def _field_readers(record_type: Any) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Return reader of each field by name, and whether the field has no default."""
    annotations = typing.get_type_hints(record_type, include_extras=True)
    return {field.name: (_reader(annotations[field.name]), field.default is field.default_factory is MISSING)
            for field in fields(record_type)}
