"""Command lines read as getopt_long(3) reads them for sbatch and srun, without ever refusing one.

The words that this parser does not know stay where they are: sbatch and srun judge them by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HasArg = Literal["no", "required", "optional"]


@dataclass(frozen=True)
class Option:
    """One option as it was given.

    Attributes
    ----------
    name : the long name in full, whatever the spelling; as written (without dashes) where it is not known.
    value : None where it has none, or where the value that it needs is missing.
    words : the option spelled alone, e.g. ("-n", "4"); an option out of a cluster `-lun4` gives ("-n4",).
    index : index in argv of the word that it begins in.
    known : False for an option that is in no table, or an ambiguous abbreviation: whether it takes the
        next word is not known, and it is read as if it did not.
    complete : False where a value is needed and argv ends.
    """

    name: str
    value: str | None
    args: tuple[str, ...]
    index: int
    is_known: bool = True
    is_complete: bool = True


@dataclass(frozen=True)
class CommandLine:
    """Options in the order given, and the operands: the program or script with its arguments."""

    options: tuple[Option, ...]
    operands: tuple[str, ...]

    def last_value(self, name: str) -> str | None:
        """Value of the last `--name`, None where it was not given or has no value (use `has`)."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def has_option(self, name: str) -> bool:
        return any(option.name == name for option in self.options)

    def args_except(self, names: Iterable[str]) -> tuple[str, ...]:
        """The words of all options but these, in the order given (no operands, no `--`)."""
        dropped = frozenset(names)
        return tuple(word for option in self.options if option.name not in dropped for word in option.args)


def parse_command_line(argv: Sequence[str], short_options: Mapping[str, str],
                       long_options: Mapping[str, HasArg]) -> CommandLine:
    """Split `argv` (without the program's own name) into options and operands.

    Follows getopt_long with a leading `+`, as sbatch and srun call it: clusters (`-lun4`), `-n4`, `-n 4`,
    `--name=value`, `--name value`, unique abbreviations of long names, optional values only when attached,
    `--` ends the options, and so does the first word that is no option (`-` alone is none).

    Parameters
    ----------
    short : letter -> long name.
    long : long name -> whether it takes a value. An option with an optional value takes only an attached one.
    """
    options: list[Option] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            at += 1
            break
        if not word.startswith("-") or word == "-":
            break
        following = argv[at + 1] if at + 1 < len(argv) else None
        read = [_long_option(word, following, at, long_options)] if word.startswith("--") else \
            list(_short_options(word, following, at, short_options, long_options))
        options += read
        at += 1 + (len(read[-1].args) == 2)
    return CommandLine(tuple(options), tuple(argv[at:]))


def _long_option(arg: str, next_arg: str | None, index: int, long_options: Mapping[str, HasArg]) -> Option:
    written, equals, attached = arg[2:].partition("=")
    name = _full_name(written, long_options)
    value = attached if equals else None
    if name is None:
        return Option(written, value, (arg,), index, is_known=False)
    if long_options[name] != "required" or equals:
        return Option(name, value, (arg,), index)
    if next_arg is None:
        return Option(name, None, (arg,), index, is_complete=False)
    return Option(name, next_arg, (arg, next_arg), index)


def _full_name(written: str, long_options: Mapping[str, HasArg]) -> str | None:
    if written in long_options:
        return written
    candidates = [name for name in long_options if name.startswith(written)]
    return candidates[0] if len(candidates) == 1 and written else None


def _short_options(arg: str, next_arg: str | None, index: int, short_options: Mapping[str, str],
             long_options: Mapping[str, HasArg]) -> Iterable[Option]:
    for i, letter in enumerate(arg[1:], start=1):
        name, attached = short_options.get(letter), arg[i + 1:]
        if name is None:
            yield Option(letter, None, (f"-{letter}",), index, is_known=False)
        elif long_options[name] == "no":
            yield Option(name, None, (f"-{letter}",), index)
        elif attached or long_options[name] == "optional":
            yield Option(name, attached or None, (f"-{letter}{attached}",), index)
            return
        elif next_arg is None:
            yield Option(name, None, (f"-{letter}",), index, is_complete=False)
        else:
            yield Option(name, next_arg, (f"-{letter}", next_arg), index)
