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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmdl.errors import UsageError, sort_by_similarity

if TYPE_CHECKING:
    from argparse import ArgumentParser


@dataclass(frozen=True)
class Kind:
    """How a value is read: a text, which the plugin reads in the same way (spank/core/options.c), or data of YAML.

    Attributes:
        name: "flag", "count", "number", "choice", "names", "text" or "yaml".
        values: the value as shown in help, "" for a flag; for a choice the valid values separated by |.
        parse: text or data -> value; None if it is invalid.
        expected: text -> the valid values, for messages.
    """

    name: str
    values: str
    parse: Callable[[Any], Any]
    expected: Callable[[str], str]


def choice(*names: str, settings: bool = False) -> Kind:
    """One of some names, with `settings` also NAME:SETTINGS."""
    return Kind("choice", "|".join(names) + "[:...]" * settings,
                lambda text: text if (text.partition(":")[0] if settings else text) in names else None,
                lambda text: ", ".join(sort_by_similarity(text, list(names))))


def count(values: str, minimum: int = 0, max_digits: int = 9) -> Kind:
    def parse(text: str) -> int | None:
        is_count = re.fullmatch("[0-9]+", text) and len(text) <= max_digits
        return int(text) if is_count and int(text) >= minimum else None
    return Kind("count", values, parse, lambda _: f"a whole number, {minimum} or more")


def number(values: str, low: float, high: float, percent: bool = False) -> Kind:
    """A number in [low, high); with `percent`, 1% is read as 0.01."""
    def parse(text: str) -> float | None:
        digits, scale = (text[:-1], 100.0) if percent and text.endswith("%") else (text, 1.0)
        with suppress(ValueError):
            if low <= (value := float(digits) / scale) < high:
                return value
        return None
    return Kind("number", values, parse, lambda _: f"a number from {low:g} to below {high:g}")


def names(values: str) -> Kind:
    """Names separated by commas, as a tuple."""
    return Kind("names", values, lambda text: tuple(dict.fromkeys(filter(None, text.split(",")))) or None,
                lambda _: "names separated by commas")


def text(values: str, parse: Callable[[str], Any] = lambda text: text or None, expected: str = "") -> Kind:
    return Kind("text", values, parse, lambda _: expected or values)


#: a flag, set or unset by a word where it has a value
SWITCH = Kind("flag", "", lambda text: True if text.lower() in ("1", "yes", "true", "on") else
              False if text.lower() in ("0", "no", "false", "off") else None, lambda _: "yes, no")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        field: of the dataclass.
        name: without prefix, e.g. "node-binding".
        default: value if it is not given; `shown_default` explains it.
        group: options of one group belong together; "" for none.
        valid_with: values of the option that this one belongs to, e.g. strategies; () for all.
    """

    field: str
    name: str
    kind: Kind
    help: str
    default: Any
    shown_default: str
    group: str
    valid_with: tuple[str, ...]

    @property
    def is_flag(self) -> bool:
        return self.kind.name == "flag"

    @property
    def description(self) -> str:
        """The help, after what it is valid with."""
        return f"{', '.join(self.valid_with)}: {self.help}" if self.valid_with else self.help

    def parse(self, value: str, source: str) -> Any:
        """Convert to the value of the field; UsageError names `source` and the expected values."""
        parsed = self.kind.parse(value)
        if parsed is None:
            raise UsageError(f"{source}: {self.invalid_text(value)}")
        return parsed

    def invalid_text(self, value: str) -> str:
        return f"invalid value {value!r}; expected {self.kind.expected(value)}"


def option(default: Any, kind: Kind, help_text: str, shown_default: str = "", group: str = "", name: str = "",
           valid_with: tuple[str, ...] = ()) -> Any:
    """A field of a dataclass that is an option; see Option.

    If not given, `name` is that of the field, and `shown_default` the default itself.
    """
    shown = shown_default or ("off" if kind.name == "flag" else "" if default in (None, ()) else str(default))
    return dataclasses.field(default=default, metadata={
        "name": name, "option": (kind, help_text, default, shown, group, valid_with)})


def options_of(cls: type) -> tuple[Option, ...]:
    """The options that the fields of a dataclass describe, in their order."""
    return tuple(Option(field.name, field.metadata["name"] or field.name.replace("_", "-"), *field.metadata["option"])
                 for field in dataclasses.fields(cls) if "option" in field.metadata)


def settings_from_environ(options: Iterable[Option], prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Field -> text of the variables PREFIX_NAME. UsageError for an unknown variable or an invalid value."""
    variables = {f"{prefix}{entry.name.replace('-', '_').upper()}": entry for entry in options}
    settings = {}
    for name, value in environ.items():
        if name.startswith(prefix):
            entry = variables.get(name)
            if entry is None:
                similar = ", ".join(sort_by_similarity(name, list(variables)))
                raise UsageError(f"unknown variable {name}; expected {similar}")
            entry.parse(value, name)
            settings[entry.field] = value
    return settings


def add_arguments(parser: ArgumentParser, options: Iterable[Option], source: str) -> None:
    """Add options to a parser, whose result has the values of those that are given; `source` prefixes errors."""
    from argparse import SUPPRESS

    for entry in options:
        name, shown = f"--{entry.name}", f" (default: {entry.shown_default})" if entry.shown_default else ""
        if entry.is_flag:
            parser.add_argument(name, dest=entry.field, action="store_true", default=SUPPRESS,
                                help=entry.description.replace("%", "%%"))
        else:
            parser.add_argument(name, dest=entry.field, default=SUPPRESS, metavar=entry.kind.values,
                                type=partial(entry.parse, source=f"{source}{name}"),
                                help=f"{entry.description}{shown}".replace("%", "%%"))
