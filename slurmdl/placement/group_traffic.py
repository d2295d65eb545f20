"""Traffic of named groups of nodes: a mesh or a ring inside each group, and messages between groups.

Parameter servers are the case of two groups, the servers and the workers, without traffic inside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.groups import Group, GroupBytes, parse_group_bytes, parse_groups, split_bytes
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.mesh_traffic import MeshTraffic
from slurmdl.placement.phase import Phase
from slurmdl.text import pluralize

MAX_LISTED_PAIRS = 2**12  # pairs of ranks of two groups that are listed, so that swaps of nodes can be evaluated


@dataclass(frozen=True, eq=False)
class GroupTraffic:
    """Traffic of groups; `meshes` holds the traffic of each group with a mesh."""

    groups: tuple[Group, ...]
    bytes: GroupBytes
    meshes: dict[str, MeshTraffic]

    @classmethod
    def from_options(cls, dl: DlOptions) -> GroupTraffic | None:
        """The groups of --dl-groups, --dl-mesh and --dl-bytes; None without groups.

        Unless --dl-bytes names groups, each group without a mesh reduces one replica; else groups that it does not
        name send nothing. Raises UsageError if an option is invalid.
        """
        if not dl.groups:
            return None
        groups = parse_groups(dl.groups, "--dl-groups", dl.mesh)
        rings = {group.name: dl.model_bytes for group in groups if not group.mesh}
        between, inside = split_bytes(dl.bytes, groups)
        group_bytes = parse_group_bytes(between, groups, "--dl-bytes") if between else GroupBytes(rings, {})
        meshes = {group.name: MeshTraffic.of_mesh(group.mesh, dl.model, inside) for group in groups if group.mesh}
        return cls(groups, group_bytes, meshes)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def ranks_by_group(self, ranks: int) -> dict[str, IntArray]:
        """Ranks of each group. Raises PlacementError unless each node has the same number, that of the meshes."""
        per_node, rest = divmod(ranks, self.nodes)
        for group in self.groups:
            if group.mesh and (group.ranks_per_node != per_node or rest):
                raise PlacementError(f"--dl-mesh: {group.name}: {pluralize(group.ranks_per_node, 'rank')} on each "
                                     "node; the job "
                                     f"has {pluralize(ranks, 'rank')} on {pluralize(self.nodes, 'node')}")
        if rest:
            raise PlacementError(f"--dl-groups: {pluralize(ranks, 'rank')} on {pluralize(self.nodes, 'node')}; "
                                 "expected the same number on each node (--ntasks-per-node)")
        ends = np.cumsum([group.nodes * per_node for group in self.groups])
        return dict(zip((group.name for group in self.groups), np.split(np.arange(ranks), ends[:-1]), strict=True))

    def phases(self, ranks: int) -> list[Phase]:
        """Phases of one iteration: those of each group, then those between groups; exceptions as `ranks_by_group`."""
        by_group = self.ranks_by_group(ranks)
        phases = [phase for name in by_group for phase in self.phases_inside(name, by_group[name])]
        for (source, target), count in self.bytes.between.items():
            phases += messages_between(by_group[source], by_group[target], count)
        return phases

    def phases_inside(self, name: str, ranks: IntArray) -> list[Phase]:
        """Phases inside a group that has these ranks."""
        if name in self.meshes:
            return [replace(phase, source=ranks[phase.source], target=ranks[phase.target])
                    for phase in self.meshes[name].phases()]
        return list(ring(ranks, self.bytes.inside.get(name, 0.0)))


def ring(ranks: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Ring all-reduce: n - 1 rounds of reduce-scatter and of all-gather, with 1/n of the model to the next rank."""
    count = len(ranks)
    if count > 1 and model_bytes:
        yield Phase(ranks, np.roll(ranks, -1), 2 * model_bytes * (count - 1) / count, rounds=2 * (count - 1))


def messages_between(source: IntArray, target: IntArray, total_bytes: float) -> Iterator[Phase]:
    """Messages of equal size from each rank of one group to each rank of another one, `total_bytes` in all."""
    size = total_bytes / (len(source) * len(target))
    if len(source) * len(target) <= MAX_LISTED_PAIRS:
        yield Phase(np.repeat(source, len(target)), np.tile(target, len(source)), size)
    else:
        yield Phase(source, target, size, all_pairs=True)
