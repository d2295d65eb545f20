"""Command lines read as getopt_long(3) reads them for sbatch and srun, without ever refusing one.

The words that this parser does not know stay where they are: sbatch and srun judge them by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Takes = Literal["no", "yes", "optional"]


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
    words: tuple[str, ...]
    index: int
    known: bool = True
    complete: bool = True


@dataclass(frozen=True)
class CommandLine:
    """Options in the order given, and the operands: the program or script with its arguments."""

    options: tuple[Option, ...]
    operands: tuple[str, ...]

    def last(self, name: str) -> str | None:
        """Value of the last `--name`, None where it was not given or has no value (use `has`)."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def has(self, name: str) -> bool:
        return any(option.name == name for option in self.options)

    def without(self, names: Iterable[str]) -> tuple[str, ...]:
        """The words of all options but these, in the order given (no operands, no `--`)."""
        dropped = frozenset(names)
        return tuple(word for option in self.options if option.name not in dropped for word in option.words)


def parse(argv: Sequence[str], short: Mapping[str, str], long: Mapping[str, Takes]) -> CommandLine:
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
        read = [_long(word, following, at, long)] if word.startswith("--") else \
            list(_cluster(word, following, at, short, long))
        options += read
        at += 1 + (len(read[-1].words) == 2)
    return CommandLine(tuple(options), tuple(argv[at:]))


def _long(word: str, following: str | None, index: int, long: Mapping[str, Takes]) -> Option:
    written, equals, attached = word[2:].partition("=")
    name = _full_name(written, long)
    value = attached if equals else None
    if name is None:
        return Option(written, value, (word,), index, known=False)
    if long[name] != "yes" or equals:
        return Option(name, value, (word,), index)
    if following is None:
        return Option(name, None, (word,), index, complete=False)
    return Option(name, following, (word, following), index)


def _full_name(written: str, long: Mapping[str, Takes]) -> str | None:
    if written in long:
        return written
    candidates = [name for name in long if name.startswith(written)]
    return candidates[0] if len(candidates) == 1 and written else None


def _cluster(word: str, following: str | None, index: int, short: Mapping[str, str],
             long: Mapping[str, Takes]) -> Iterable[Option]:
    for i, letter in enumerate(word[1:], start=1):
        name, attached = short.get(letter), word[i + 1:]
        if name is None:
            yield Option(letter, None, (f"-{letter}",), index, known=False)
        elif long[name] == "no":
            yield Option(name, None, (f"-{letter}",), index)
        elif attached or long[name] == "optional":
            yield Option(name, attached or None, (f"-{letter}{attached}",), index)
            return
        elif following is None:
            yield Option(name, None, (f"-{letter}",), index, complete=False)
        else:
            yield Option(name, following, (f"-{letter}", following), index)
