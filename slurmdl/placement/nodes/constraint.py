"""The value of --constraint: which features a node needs (sbatch(1), -C)."""

from __future__ import annotations

import re
from collections.abc import Collection

from slurmdl.errors import PlacementError

_FEATURE = r"[\w.:/+=-]+"
#: a feature, or a group: groups do not nest
_TERM = rf"(?:{_FEATURE}|\({_FEATURE}(?:[&|]{_FEATURE})*\))"
_EXPRESSION = re.compile(rf"{_TERM}(?:[&|]{_TERM})*")
#: one of these for all nodes of the job
_MATCHING_OR = re.compile(rf"\[{_TERM}(?:\|{_TERM})*\]")
_OPERATOR_AND_TERM = re.compile(rf"([&|]?)({_TERM})")


def constraint_alternatives(text: str) -> tuple[str, ...]:
    """Expressions of features of which all nodes of the job must fulfil the same one.

    `[a|b]` has two, an expression without brackets one: itself. A comma is the same as `&`.

    Raises
    ------
    PlacementError : counts, other brackets, or what is no expression. Slurm 22.05 does not hold a node list against
        them either: with -w it starts `[a*1&b*1]` on two nodes that have only a.
    """
    text = text.strip().replace(",", "&")
    if _EXPRESSION.fullmatch(text):
        return (text,)
    if _MATCHING_OR.fullmatch(text):
        return tuple(re.findall(_TERM, text))
    raise PlacementError(f"constraint too rich: {text} (features, &, |, parentheses and [a|b] can be placed)")


def satisfies_features(features: Collection[str], expression: str) -> bool:
    """Whether a node with these features fulfils one of the `alternatives`.

    From the left to the right, `&` before `|` or not, as slurmctld reads it.
    """
    value = True
    for join, term in _OPERATOR_AND_TERM.findall(expression):
        here = satisfies_features(features, term[1:-1]) if term.startswith("(") else term in features
        value = value or here if join == "|" else value and here
    return value
