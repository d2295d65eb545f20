"""Nodes for a job that no zone can serve with an even share of its tasks on every node."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.choice.choose import Choice
from slurmdl.placement.nodes.pool import Pool
from slurmdl.placement.shape import Shape

#: most zones that are looked at
MAX_ZONES = 4


def uneven(pool: Pool, job: Shape) -> Iterator[Choice]:
    """The roomiest nodes of each of the lowest and smallest zones where these hold all tasks.

    Slurm takes any nodes with room for the tasks together where `-n` is given without --ntasks-per-node.
    """
    found = 0
    for zone in np.lexsort((pool.size, pool.level)):
        if pool.size[zone] >= job.nodes and found < MAX_ZONES:
            nodes = np.arange(int(pool.begin[zone]), int(pool.end[zone]))
            roomiest = nodes[np.argsort(-pool.room[nodes], kind="stable")][:job.nodes]
            if pool.room[roomiest].sum() >= job.tasks:
                found += 1
                yield Choice(int(zone), roomiest, len(nodes) - job.nodes)
