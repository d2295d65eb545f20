"""Slurm's hostlists: `n[01-03,7],login` <-> the names, in Slurm's order.

The grammar is that of src/common/hostlist.c: `scontrol show hostnames` is its oracle. ClusterShell folds;
it cannot expand here, since its node sets are sorted, drop repeats and read `!`, `&`, `^` as operators.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from slurmdl.errors import InputError

#: longest single range, as in Slurm (MAX_RANGE)
MAX_RANGE = 65_536
#: most names that one expression may stand for
MAX_NAMES = 16 * MAX_RANGE

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]+")


def expand(text: str) -> list[str]:
    """The names behind a hostlist, in the order and with the repeats that Slurm gives them.

    With two bracket groups the first is the outermost; with more, the last group runs fastest, then the
    first, the second, and so on (hostlist.c expands the prefix group by group, from the right).

    Raises
    ------
    InputError : a bracket that does not close, an empty or falling range, a step, more names than MAX_NAMES,
        or a function such as `switch{s1}`, which only the controller can resolve.
    """
    names: list[str] = []
    for word in _words(text):
        if "[" not in word and "]" not in word and "{" not in word:
            names.append(word)
            continue
        if re.match(r"\w+\{", word):
            raise _error(word, "functions such as switch{..} and block{..} are resolved by the controller only; "
                               "give the node names")
        pieces = re.split(r"\[([^\[\]]*)\]", word)
        literal, groups = pieces[::2], [list(_group(group, word)) for group in pieces[1::2]]
        if any(c in part for part in literal for c in "[]{}"):
            raise _error(word, "brackets must close and may not nest, e.g. n[01-03,7]")
        if len(names) + math.prod(map(len, groups)) > MAX_NAMES:
            raise _error(word, f"more than {MAX_NAMES} names")
        # outermost first: the prefix groups from right to left, then the last group
        *prefix, last = range(len(groups))
        order = [*reversed(prefix), last]
        for values in itertools.product(*(groups[i] for i in order)):
            chosen = dict(zip(order, values, strict=True))
            names.append(literal[0] + "".join(chosen[i] + literal[i + 1] for i in range(len(groups))))
    return names


def fold(names: Iterable[str]) -> str:
    """The shortest hostlist that ClusterShell finds for these names, sorted: `n1,n2,n3` -> `n[1-3]`.

    Names with characters that ClusterShell takes for operators stand as they are.
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    plain: list[str] = []
    odd: list[str] = []
    for name in names:
        (plain if _PLAIN.fullmatch(name) else odd).append(name)
    folded = [str(NodeSet.fromlist(plain, resolver=RESOLVER_NOGROUP))] if plain else []
    return ",".join(folded + odd)


def _words(text: str) -> Iterator[str]:
    """Parts between commas and blanks, where these stand outside of brackets."""
    word: list[str] = []
    depth = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if depth <= 0 and c in ", \t\n\r":
            if word:
                yield "".join(word)
            word = []
        else:
            word.append(c)
    if word:
        yield "".join(word)


def _group(text: str, word: str) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _error(word, f"{part!r} is no range; valid are N and LOW-HIGH, e.g. [01-03,7]")
        low = match[1]
        high = match[2] or low
        # bounds with many digits are refused before they are made numbers
        if len(low) > 18 or len(high) > 18 or not 0 <= int(high) - int(low) < MAX_RANGE:
            raise _error(word, f"{part!r}: the low bound comes first, and a range has at most {MAX_RANGE} names")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def _error(word: str, message: str) -> InputError:
    shown = word if len(word) <= 60 else word[:57] + "..."
    return InputError(f"hostlist {shown!r}: {message}")
