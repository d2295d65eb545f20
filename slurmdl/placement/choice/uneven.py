"""Nodes for a job that no zone can serve with an even share of its tasks on every node."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.choice.choose import NodeChoice
from slurmdl.placement.nodes.pool import CandidateNodes
from slurmdl.placement.shape import JobSize

#: most zones that are looked at
MAX_UNEVEN_ZONES = 4


def uneven_choices(pool: CandidateNodes, job: JobSize) -> Iterator[NodeChoice]:
    """The roomiest nodes of each of the lowest and smallest zones where these hold all tasks.

    Slurm takes any nodes with room for the tasks together where `-n` is given without --ntasks-per-node.
    """
    found = 0
    for zone in np.lexsort((pool.node_count, pool.level)):
        if pool.node_count[zone] >= job.nodes and found < MAX_UNEVEN_ZONES:
            nodes = np.arange(int(pool.node_begin[zone]), int(pool.node_end[zone]))
            roomiest = nodes[np.argsort(-pool.max_tasks[nodes], kind="stable")][:job.nodes]
            if pool.max_tasks[roomiest].sum() >= job.tasks:
                found += 1
                yield NodeChoice(int(zone), roomiest, len(nodes) - job.nodes)
