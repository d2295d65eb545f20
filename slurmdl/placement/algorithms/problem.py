"""Input and output of the search algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from slurmdl.placement.arrays import IntArray
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.mesh_boxes import min_bytes_leaving
from slurmdl.placement.mesh_traffic import MeshTraffic
from slurmdl.placement.phase import Phase
from slurmdl.placement.traffic import count_shards


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Job whose nodes are searched.

    Attributes:
        phases: traffic of one iteration of ranks in a single zone.
        is_zone_dependent: ranks in several zones send less over the uplinks, and in fewer rounds.
        mesh: the traffic of a mesh, which sends nothing over a link around whole groups; None without one.
        group_sizes: nodes of each named group; () without groups.
    """

    job: JobSize
    phases: Sequence[Phase]
    is_zone_dependent: bool
    mesh: MeshTraffic | None = None
    group_sizes: tuple[int, ...] = ()

    @cached_property
    def rounds(self) -> float:
        """Message rounds of one iteration; of a mesh only those of groups that no node can hold."""
        if self.mesh:
            return sum(dimension.rounds for dimension in self.mesh.dimensions
                       if dimension.size > self.job.max_tasks_per_node)
        return sum(phase.rounds for phase in self.phases)

    @cached_property
    def depends_on_counts(self) -> bool:
        """Whether the time depends on the number of ranks below each link, not only on the links in use."""
        return bool(self.phases) and not self.group_sizes and all(phase.all_pairs for phase in self.phases)

    @cached_property
    def has_two_roles(self) -> bool:
        """Whether the phases go between two roles, such as parameter servers and workers."""
        return self.depends_on_counts and self.phases[0].has_two_roles

    @cached_property
    def min_node_bytes(self) -> float:
        """Lower bound on the bytes over the busier direction of each used node link, summed over the phases."""
        if self.group_sizes:
            return 0.0  # some groups may send nothing
        if self.mesh:
            return min_bytes_leaving(self.mesh, self.job.max_tasks_per_node) if self.job.nodes > 1 else 0.0
        return sum(min_node_bytes(phase, self.job) for phase in self.phases)


def min_node_bytes(phase: Phase, job: JobSize) -> float:
    """Lower bound on the bytes of one phase over the busier direction of each used node link."""
    if job.nodes == 1:
        return 0.0
    tasks = np.array([job.tasks // job.nodes, job.max_tasks_per_node])
    if not phase.all_pairs:
        return float(np.mean(phase.bytes_per_pair)) if len(phase.source) else 0.0
    if not phase.has_two_roles:
        return float(np.min(phase.bytes_per_pair * tasks * (job.tasks - tasks)))
    all_servers, all_workers = len(phase.source), len(phase.target)
    servers = np.arange(min(all_servers, job.max_tasks_per_node) + 1)
    workers = np.clip(tasks[:, None] - servers, 0, all_workers)
    return float(np.min(phase.bytes_per_pair * count_shards(servers, workers, all_servers, all_workers)))


@dataclass(frozen=True, eq=False)
class NodeChoice:
    """Pool indices of nodes, and the smallest zone that holds them all.

    `unused_nodes` counts the other candidates below the zone; if `is_smallest_zone`, no zone below it has enough.
    """

    zone: int
    nodes: IntArray
    unused_nodes: int
    is_smallest_zone: bool = True


class Proposal(NamedTuple):
    """Choice proposed by an algorithm; `estimated_seconds` is its estimate of the time, 0 if it has none.

    `min_seconds` is a lower bound on the time of any choice in the zone that the algorithm searched.
    """

    choice: NodeChoice
    min_seconds: float
    estimated_seconds: float = 0.0


def make_choice(pool: CandidateNodes, zone: int, nodes: IntArray) -> NodeChoice:
    """Choice of nodes, all of which are below `zone`."""
    is_smallest = not (pool.node_count[pool.parent == zone] >= len(nodes)).any()
    return NodeChoice(zone, nodes, int(pool.node_count[zone]) - len(nodes), is_smallest)
