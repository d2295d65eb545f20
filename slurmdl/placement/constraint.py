"""The value of --constraint: which features a node needs (sbatch(1), -C)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_FEATURE = r"[\w.:/+=-]+"
#: a feature, or a group: groups do not nest
_TERM = rf"(?:{_FEATURE}|\({_FEATURE}(?:[&|]{_FEATURE})*\))"
_EXACT = re.compile(rf"{_TERM}(?:[&|]{_TERM})*")
_JOINED = re.compile(rf"([&|]?)({_TERM})")


@dataclass(frozen=True)
class Constraint:
    """What --constraint asks of nodes.

    Attributes
    ----------
    text : the value; of old a comma is the same as `&`.
    """

    text: str

    @property
    def exact(self) -> bool:
        """Whether `fits` is the whole truth: counts and brackets speak of all nodes of a job together."""
        return _EXACT.fullmatch(self._text) is not None

    def fits(self, features: Collection[str]) -> bool:
        """Whether a node with these features may serve; where that is not exact, whether it has one that is named."""
        if self.exact:
            return _holds(self._text, features)
        return not set(re.findall(_FEATURE, self.text)).isdisjoint(features)

    @property
    def _text(self) -> str:
        return self.text.strip().replace(",", "&")


def _holds(text: str, features: Collection[str]) -> bool:
    """From the left to the right, `&` before `|` or not, as slurmctld reads it."""
    value = True
    for join, term in _JOINED.findall(text):
        here = _holds(term[1:-1], features) if term.startswith("(") else term in features
        value = value or here if join == "|" else value and here
    return value
