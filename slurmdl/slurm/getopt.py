"""Parse the command lines of sbatch and srun as getopt_long(3) does, without rejecting any.

Unknown arguments stay in place, for sbatch and srun to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HasArg = Literal["no", "required", "optional"]


@dataclass(frozen=True)
class Option:
    """One given option.

    Attributes:
        name: the full long name; as written (without dashes) if unknown.
        value: None if the option has none, or a required value is missing.
        args: the option spelled alone, e.g. ("-n", "4"); an option in a cluster `-lun4` gives ("-n4",).
        index: index in argv of the argument in which it begins.
        is_known: False for an option in no table and for an ambiguous abbreviation, which are read as if they took no
            value from the next argument.
        is_complete: False if a required value is missing at the end of argv.
    """

    name: str
    value: str | None
    args: tuple[str, ...]
    index: int
    is_known: bool = True
    is_complete: bool = True


@dataclass(frozen=True)
class CommandLine:
    """Options in their order, and the operands: the program or script with its arguments."""

    options: tuple[Option, ...]
    operands: tuple[str, ...]

    def last_value(self, name: str) -> str | None:
        """Value of the last `--name`; None if it is not given or has no value (see `has_option`)."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def has_option(self, name: str) -> bool:
        return any(option.name == name for option in self.options)

    def args_except(self, names: Iterable[str]) -> tuple[str, ...]:
        """Arguments of all options but `names`, in their order, without operands and `--`."""
        excluded = frozenset(names)
        return tuple(arg for option in self.options if option.name not in excluded for arg in option.args)


def parse_command_line(argv: Sequence[str], short_options: Mapping[str, str], long_options: Mapping[str, HasArg],
                       plugin_options: Callable[[], Mapping[str, HasArg]] = dict) -> CommandLine:
    """Split `argv` (without the program's name) into options and operands.

    Follows getopt_long with a leading `+`, as sbatch and srun call it: clusters (`-lun4`), `-n4`, `-n 4`,
    `--name=value`, `--name value`, unique abbreviations of long names, optional values only if attached. `--` and the
    first argument that is no option (including `-`) end the options.

    Args:
        short_options: letter -> long name.
        long_options: long name -> whether it takes a value.
        plugin_options: as `long_options`, of the plugins of Slurm; called only if an option is in no table.
    """
    line = _parse(argv, short_options, long_options)
    if all(option.is_known for option in line.options):
        return line
    more_options = plugin_options()
    return _parse(argv, short_options, {**more_options, **long_options}) if more_options else line


def _parse(argv: Sequence[str], short_options: Mapping[str, str], long_options: Mapping[str, HasArg]) -> CommandLine:
    options: list[Option] = []
    index = 0
    while index < len(argv):
        arg = argv[index]
        if arg == "--":
            index += 1
            break
        if not arg.startswith("-") or arg == "-":
            break
        next_arg = argv[index + 1] if index + 1 < len(argv) else None
        parsed = [_long_option(arg, next_arg, index, long_options)] if arg.startswith("--") else \
            list(_short_options(arg, next_arg, index, short_options, long_options))
        options += parsed
        index += 1 + (len(parsed[-1].args) == 2)
    return CommandLine(tuple(options), tuple(argv[index:]))


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
                   long_options: Mapping[str, HasArg]) -> Iterator[Option]:
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
