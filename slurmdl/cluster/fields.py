"""Records of a JSON file, checked field by field against the dataclass that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from slurmdl.errors import InputError

Record = TypeVar("Record")

#: numbers stay far below what 64 bits hold, so that sums of them do, too
_MAX_NUMBER = 2 ** 40


def parse_records(record_type: type[Record], data: dict[str, Any], key: str) -> list[Record]:
    """The list under a key, each entry as `make(**entry)`; an absent key is an empty list.

    Raises
    ------
    InputError : names the entry and the field that is unknown, missing or of another type, and what is valid.
    """
    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise InputError(f"cluster JSON: {key}: a list is expected")
    return [_parse_record(record_type, entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _parse_record(record_type: type[Record], entry: Any, location: str) -> Record:
    if not isinstance(entry, dict):
        raise InputError(f"cluster JSON: {location}: an object is expected")
    known = {field.name: field for field in fields(record_type)}  # type: ignore[arg-type]
    values = {}
    for name, value in entry.items():
        if name not in known:
            raise InputError(f"cluster JSON: {location}: unknown field {name!r}; valid: {', '.join(known)}")
        holds, kind = _FIELD_TYPES[str(known[name].type)]
        if not holds(value):
            raise InputError(f"cluster JSON: {location}: {name}={value!r} is not valid; valid: {kind}")
        values[name] = tuple(value) if isinstance(value, list) else value
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"cluster JSON: {location}: {name} is missing")
    return record_type(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\n" not in value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


#: type of a field as it is written in its dataclass -> whether a value of JSON holds it, and its name for people
_FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "a text of one line"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_count, "a whole number, 0 or more"),
    "int | None": (lambda value: value is None or _is_count(value), "a whole number, 0 or more, or null"),
    "tuple[str, ...]": (_is_text_list, "a list of texts"),
    "Mapping[str, int]": (_is_count_mapping, "an object of whole numbers, 0 or more"),
}
