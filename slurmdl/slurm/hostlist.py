"""Slurm's hostlists: `n[01-03,7],login` <-> names in Slurm's order.

The grammar is that of src/common/hostlist.c; tests compare with `scontrol show hostnames`. ClusterShell's node sets
are no substitute: they are sorted, drop repeats, read `!`, `&`, `^` as operators, write n[1-2]-ib, which Slurm 22.05
rejects, and take minutes to fold 100,000 names with two numbers each.
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
#: maximum number of names of one expression, or of all expressions of one topology
MAX_NAMES = 4 * MAX_RANGE
#: longest name that brackets expand to; Slurm allows 255 for a node. With MAX_NAMES it bounds the memory to 67 MB of
#: text: a prefix of one MB before a range would need 65 GB
MAX_NAME_CHARS = 255

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
#: text between commas, possibly empty
_PART = re.compile(r"(?:^|(?<=,))[^,]*")
#: text between commas and blanks outside of brackets
_WORD = re.compile(r"(?:[^, \t\r\n\[{]+|\[[^\]]*\]?|\{[^}]*\}?)+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_SPECIAL = frozenset("[]{}")
_MAX_GROUPS = 64


def expand_hostlist(text: str, max_names: int = MAX_NAMES) -> list[str]:
    """Expand a hostlist in Slurm's order, with repeats.

    With two bracket groups the first is the outermost. With more, the last group runs fastest, then the first, the
    second and so on (hostlist.c expands the prefix group by group, from the right). Raises InputError for an open
    bracket, an empty or falling range, a step, more than `max_names` names, a name of more than MAX_NAME_CHARS from
    brackets, or a function such as `switch{s1}`, which only the controller can resolve.
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
    """Expand one word with brackets."""
    if re.match(r"\w+\{", word):
        raise _hostlist_error(word, "functions such as switch{..} and block{..} are resolved by the controller only; "
                              "expected node names")
    pieces = _GROUP.split(word, maxsplit=_MAX_GROUPS + 1)
    literals, group_texts = pieces[::2], pieces[1::2]
    if len(group_texts) > _MAX_GROUPS:
        raise _hostlist_error(word, f"more than {_MAX_GROUPS} brackets")
    if not all(_SPECIAL.isdisjoint(part) for part in literals):
        raise _hostlist_error(word, "brackets must close and may not nest; expected for example n[01-03,7]")
    groups: list[list[str]] = []
    for group in group_texts:
        # each bracket has at least one number, so that all together hold little more than max_names
        groups.append(_expand_group(group, word, max_names))
        if math.prod(map(len, groups)) > max_names:
            raise _hostlist_error(word, f"more than {MAX_NAMES} names in all")
    longest = sum(map(len, literals)) + sum(len(max(group, key=len)) for group in groups)
    if longest > MAX_NAME_CHARS:
        raise _hostlist_error(word, f"names of {longest} characters; expected at most {MAX_NAME_CHARS}")
    if len(groups) == 1:
        before, after = literals
        return (f"{before}{number}{after}" for number in groups[0])
    # outermost first: the prefix groups from right to left, then the last group
    *prefix, last = range(len(groups))
    order = [*reversed(prefix), last]
    position = [order.index(i) for i in range(len(groups))]
    return (literals[0] + "".join(values[i] + after for i, after in zip(position, literals[1:], strict=True))
            for values in itertools.product(*(groups[i] for i in order)))


def ranged_string(names: Iterable[str]) -> str:
    """Fold names in their order, as Slurm's hostlist_ranged_string: n3,n1,n2,login -> n[3,1-2],login.

    Only the digits at the end of a name are folded.
    """
    words: list[str] = []
    for (prefix, has_no_digits), numbers in itertools.groupby(
            map(_split_trailing_digits, names), key=lambda pair: (pair[0], not pair[1])):
        ranges: list[tuple[str, str]] = []
        for _, number in numbers:
            low, high = ranges[-1] if ranges else ("", "")
            # a range has the width of its low bound; a number of another width begins a new range
            if high and number == str(int(high) + 1).zfill(len(low)) and int(number) - int(low) < MAX_RANGE:
                ranges[-1] = (low, number)
            else:
                ranges.append((number, number))
        parts = [low if low == high else f"{low}-{high}" for low, high in ranges]
        if has_no_digits:
            words += [prefix] * len(parts)
        else:
            words.append(prefix + parts[0] if len(parts) == 1 and "-" not in parts[0]
                         else f"{prefix}[{','.join(parts)}]")
    return ",".join(words)


def _split_trailing_digits(name: str) -> tuple[str, str]:
    """Split off the digits at the end of a name, at most 18."""
    digits = len(name) - max(len(name.rstrip("0123456789")), len(name) - 18)
    return (name[:-digits], name[-digits:]) if digits else (name, "")


def fold_hostlist(names: Iterable[str]) -> str:
    """Fold names into a sorted hostlist without repeats: n10,n2,n1,n3 -> n[1-3,10]."""
    keys = sorted((prefix, len(number), number) for prefix, number in map(_split_trailing_digits, set(names)))
    return ranged_string(prefix + number for prefix, _, number in keys)


def _expand_group(text: str, word: str, max_names: int) -> list[str]:
    """The numbers of one bracket with leading zeros; not all of them if there are more than `max_names`."""
    numbers: list[str] = []
    for match in _PART.finditer(text):
        part = _RANGE.fullmatch(match[0])
        if not part:
            raise _hostlist_error(word, f"{truncate(match[0], 60)!r} is not a range; expected N or LOW-HIGH, "
                                        "for example [01-03,7]")
        low = part[1]
        high = part[2] or low
        # checked before the conversion to numbers
        if len(low) > 18 or len(high) > 18 or not 0 <= int(high) - int(low) < MAX_RANGE:
            raise _hostlist_error(word, f"{truncate(match[0], 60)!r}: the low bound comes first, and a range has at "
                                        f"most {MAX_RANGE} names")
        width = len(low)
        numbers += [str(number).zfill(width) for number in range(int(low), int(high) + 1)]
        if len(numbers) > max_names:
            break
    return numbers


def _hostlist_error(word: str, message: str) -> InputError:
    return InputError(f"hostlist {truncate(word, 60)!r}: {message}")
