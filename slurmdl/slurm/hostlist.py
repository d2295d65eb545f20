"""Slurm's hostlists: `n[01-03,7],login` <-> the names, in Slurm's order.

The grammar is that of src/common/hostlist.c: `scontrol show hostnames` is its oracle. ClusterShell's node sets do
not serve: they are sorted, drop repeats, read `!`, `&`, `^` as operators, write n[1-2]-ib, which Slurm 22.05 refuses,
and take minutes to fold 100,000 names with two numbers each.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from slurmdl.errors import InputError
from slurmdl.text import truncate

#: longest single range, as in Slurm (MAX_RANGE)
MAX_RANGE = 65_536
#: most names that one expression, or all of one topology, may stand for
MAX_NAMES = 4 * MAX_RANGE

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
#: what stands between commas; an empty part counts, too
_PART = re.compile(r"(?:^|(?<=,))[^,]*")
#: what stands between commas and blanks outside of brackets
_WORD = re.compile(r"(?:[^, \t\r\n\[{]+|\[[^\]]*\]?|\{[^}]*\}?)+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_SPECIAL = frozenset("[]{}")
_MAX_GROUPS = 64


def expand_hostlist(text: str, max_names: int = MAX_NAMES) -> list[str]:
    """The names behind a hostlist, in the order and with the repeats that Slurm gives them.

    With two bracket groups the first is the outermost; with more, the last group runs fastest, then the
    first, the second, and so on (hostlist.c expands the prefix group by group, from the right).

    Raises
    ------
    InputError : a bracket that does not close, an empty or falling range, a step, more names than `limit`,
        or a function such as `switch{s1}`, which only the controller can resolve.
    """
    names: list[str] = []
    for match in _WORD.finditer(text):
        word = match[0]
        if _SPECIAL.isdisjoint(word):
            names.append(word)
        else:
            names += _expand_word(word, max_names - len(names))
        if len(names) > max_names:
            raise _hostlist_error(word, f"more than {MAX_NAMES} names in all")
    return names


def _expand_word(word: str, max_names: int) -> Iterator[str]:
    """The names behind one word with brackets."""
    if re.match(r"\w+\{", word):
        raise _hostlist_error(word, "functions such as switch{..} and block{..} are resolved by the controller only; "
                           "give the node names")
    pieces = _GROUP.split(word, maxsplit=_MAX_GROUPS + 1)
    literal, inside = pieces[::2], pieces[1::2]
    if len(inside) > _MAX_GROUPS:
        raise _hostlist_error(word, f"more than {_MAX_GROUPS} brackets")
    if not all(_SPECIAL.isdisjoint(part) for part in literal):
        raise _hostlist_error(word, "brackets must close and may not nest, e.g. n[01-03,7]")
    groups = [_expand_group(group, word, max_names) for group in inside]
    if math.prod(map(len, groups)) > max_names:
        raise _hostlist_error(word, f"more than {MAX_NAMES} names in all")
    if len(groups) == 1:
        before, after = literal
        return (f"{before}{number}{after}" for number in groups[0])
    # outermost first: the prefix groups from right to left, then the last group
    *prefix, last = range(len(groups))
    order = [*reversed(prefix), last]
    place = [order.index(i) for i in range(len(groups))]
    return (literal[0] + "".join(values[at] + after for at, after in zip(place, literal[1:], strict=True))
            for values in itertools.product(*(groups[i] for i in order)))


def ranged_string(names: Iterable[str]) -> str:
    """A hostlist that expands to these names in this order: n3,n1,n2,login -> n[3,1-2],login.

    As Slurm's hostlist_ranged_string; only the digits at the end of a name are folded.
    """
    words: list[str] = []
    for (prefix, bare), numbers in itertools.groupby(
        map(_split_trailing_digits, names), key=lambda pair: (pair[0], not pair[1])):
        ranges: list[tuple[str, str]] = []
        for _, number in numbers:
            low, high = ranges[-1] if ranges else ("", "")
            # the width of the low bound is that of all; a range of another width begins anew
            if high and number == str(int(high) + 1).zfill(len(low)) and int(number) - int(low) < MAX_RANGE:
                ranges[-1] = (low, number)
            else:
                ranges.append((number, number))
        parts = [low if low == high else f"{low}-{high}" for low, high in ranges]
        if bare:
            words += [prefix] * len(parts)
        else:
            words.append(prefix + parts[0] if len(parts) == 1 and "-" not in parts[0]
                         else f"{prefix}[{','.join(parts)}]")
    return ",".join(words)


def _split_trailing_digits(name: str) -> tuple[str, str]:
    """A name without the digits at its end, and these, at most 18."""
    digits = len(name) - max(len(name.rstrip("0123456789")), len(name) - 18)
    return (name[:-digits], name[-digits:]) if digits else (name, "")


def fold_hostlist(names: Iterable[str]) -> str:
    """The hostlist of these names, sorted and without repeats: n10,n2,n1,n3 -> n[1-3,10]."""
    return ranged_string(name for *_, name in sorted((prefix, len(number), number, prefix + number)
                                              for prefix, number in map(_split_trailing_digits, set(names))))


def _expand_group(text: str, word: str, max_names: int) -> list[str]:
    """The numbers of one bracket, with their zeros in front; the first ones where they are more than `limit`."""
    numbers: list[str] = []
    for match in _PART.finditer(text):
        part = _RANGE.fullmatch(match[0])
        if not part:
            raise _hostlist_error(
    word, f"{truncate(match[0], 60)!r} is no range; valid are N and LOW-HIGH, e.g. [01-03,7]")
        low = part[1]
        high = part[2] or low
        # bounds with many digits are refused before they are made numbers
        if len(low) > 18 or len(high) > 18 or not 0 <= int(high) - int(low) < MAX_RANGE:
            raise _hostlist_error(word, f"{truncate(match[0], 60)!r}: the low bound comes first, and a range has at most "
                               f"{MAX_RANGE} names")
        width = len(low)
        numbers += [str(number).zfill(width) for number in range(int(low), int(high) + 1)]
        if len(numbers) > max_names:
            break
    return numbers


def _hostlist_error(word: str, message: str) -> InputError:
    return InputError(f"hostlist {truncate(word, 60)!r}: {message}")
