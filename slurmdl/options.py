"""Options: each is described once, as a field of a frozen dataclass.

Whatever shows, reads or checks an option is derived from its field: the command line, `#DL` lines, variables,
slurmdl.yaml, the table of the Slurm plugin, help, man page, completion and the table in docs/reference.md. ::

    @dataclass(frozen=True)
    class Settings:
        workers: int = option(1, count("N"), "number of workers")
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.slurm.getopt import is_flag_set


@dataclass(frozen=True)
class Kind:
    """How a value is read: a text, which the plugin reads in the same way (spank/core/options.c), or data of YAML.

    Attributes:
        name: "flag", "count", "choice", "names", "text" or "yaml".
        values: the value as shown in help, "" for a flag; for a choice the valid values separated by |.
        parse: text or data -> value; None if it is invalid.
        expected: text -> the valid values, for messages.
    """

    name: str
    values: str
    parse: Callable[[Any], Any]
    expected: Callable[[str], str]


def choice(*names: str) -> Kind:
    return Kind("choice", "|".join(names), lambda text: text if text in names else None,
                lambda text: ", ".join(sort_by_similarity(text, list(names))))


def count(values: str) -> Kind:
    return Kind("count", values, lambda text: int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None,
                lambda _: "a whole number, 0 or more")


def names(values: str) -> Kind:
    """Names separated by commas, as a tuple."""
    return Kind("names", values, lambda text: tuple(dict.fromkeys(filter(None, text.split(",")))) or None,
                lambda _: "names separated by commas")


def text(values: str) -> Kind:
    return Kind("text", values, lambda text: text or None, lambda _: values)


FLAG = Kind("flag", "", is_flag_set, lambda _: "")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: without prefix, e.g. "node-binding".
        default: value if it is not given; `shown_default` explains it.
        group: options of one group belong together; "" for none.
    """

    name: str
    kind: Kind
    help: str
    default: Any
    shown_default: str
    group: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return self.kind is FLAG

    def parse(self, value: str, source: str) -> Any:
        """Convert to the value of the field; UsageError names `source` and the expected values."""
        parsed = self.kind.parse(value)
        if parsed is None:
            raise UsageError(f"{source}: invalid value {value!r}; expected {self.kind.expected(value)}")
        return parsed


def option(default: Any, kind: Kind, help_text: str, shown_default: str = "", group: str = "") -> Any:
    """A field of a dataclass that is an option; see Option. `shown_default` is the default itself if not given."""
    shown = shown_default or ("off" if kind is FLAG else str(default))
    return dataclasses.field(default=default, metadata={"option": (kind, help_text, default, shown, group)})


def options_of(cls: type) -> tuple[Option, ...]:
    """The options that the fields of a dataclass describe, in their order."""
    return tuple(Option(field.name.replace("_", "-"), *field.metadata["option"]) for field in dataclasses.fields(cls)
                 if "option" in field.metadata)
