"""Gossip on ranks of unequal speed: throughput and convergence, in shared memory, by messages, and both.

The paper on training with gossip on heterogeneous hardware, Large-Scale Scientific Computing (LSSC) 2019. None of its
figures is quoted here: they belong to its machines. What can be set beside each other anywhere is measured: the share
that is left of what the same ranks do at once with communication off, and the accuracy at equal speed.

This is the part `gossip` of `slurmdl bench unequal`, whose part `speed` has more mixtures of speeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurmdl.bench import unequal_gossip
from slurmdl.bench.results import Row


def rows(seed: int) -> Iterator[Row]:
    """Samples per second and accuracy of the combinations of memory, balance and waiting."""
    yield from unequal_gossip.rows(seed)
