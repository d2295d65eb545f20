"""A phase of an iteration: messages that are in flight at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from slurmdl.placement.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Phase:
    """Messages that are in flight at the same time.

    Attributes:
        source, target: ranks; source[i] sends to target[i]. With `all_pairs` every source sends to every other
            target, so dense traffic needs no n x n matrix.
        bytes_per_pair: number, or without `all_pairs` also an array of shape (pairs,).
        rounds: sequential message rounds; a fraction if the phase occurs in that fraction of the iterations.
    """

    source: IntArray
    target: IntArray
    bytes_per_pair: float | FloatArray
    rounds: float = 1
    all_pairs: bool = False

    @property
    def has_two_roles(self) -> bool:
        """Whether all ranks of one role send to all ranks of another one."""
        return self.all_pairs and bool(self.source[0] != self.target[0])
