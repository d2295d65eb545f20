"""Traffic of one iteration of each strategy from rank to rank, as a list of phases.

Ring allreduce: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Hierarchical allreduce: Cho et al., BlueConnect: decomposing all-reduce for deep learning, MLSys 2019.
Parameter server: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
Gossip: see slurmdl.gossip_graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from slurmdl import groups, mesh
from slurmdl.comm_layout import default_period
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.groups import Group, GroupBytes, parse_group_bytes, parse_groups, split_bytes
from slurmdl.placement.arrays import FloatArray, IntArray, sorted_unique
from slurmdl.placement.iteration_cost import Phase
from slurmdl.placement.mesh_traffic import MeshTraffic
from slurmdl.plan import COMM_PATTERNS, group_ranks
from slurmdl.text import pluralize

MAX_TIE = 0.005  # relative difference of times of a mesh or of groups that count as equal
MAX_LISTED_PAIRS = 2**12  # pairs of ranks of two groups that are listed, so that swaps of nodes can be evaluated


@dataclass(frozen=True, eq=False)
class Traffic:
    """Traffic of a job with any number of ranks.

    Attributes:
        strategy: one of plan.STRATEGIES.
        model_bytes: bytes of one replica of the parameters (and of its gradient).
        ps: number of parameter servers, which are the first ranks; 0 unless the strategy is `ps`.
        pattern: one of plan.COMM_PATTERNS[strategy], "" for the first one; with matrices their file.
        islands: what is an island, one of plan.ISLAND_LEVELS; "" without islands.
        matrices: the user's own phases instead of a pattern, each of shape (ranks, ranks): entry [i, j] is the number
            of bytes that rank i sends to rank j per iteration; the diagonal is ignored.
        mesh, groups: traffic of a mesh of ranks, or of groups of nodes, instead of a pattern; None without.
    """

    strategy: str
    model_bytes: float = 100e6
    ps: int = 0
    pattern: str = ""
    matrices: tuple[FloatArray, ...] = ()
    mesh: MeshTraffic | None = None
    groups: GroupTraffic | None = None
    islands: str = ""

    @classmethod
    def from_options(cls, dl: DlOptions, matrices: tuple[FloatArray, ...] = ()) -> Traffic:
        return cls(dl.strategy, dl.model_bytes, dl.ps, dl.comm_pattern, matrices, MeshTraffic.from_options(dl),
                   GroupTraffic.from_options(dl), dl.islands)

    @property
    def pattern_name(self) -> str:
        return self.pattern or COMM_PATTERNS[self.strategy][0]

    @property
    def is_zone_dependent(self) -> bool:
        """Whether the phases depend on the zones of the ranks."""
        return (self.islands == "zone" or self.pattern_name in ("hierarchical", "zone-aware")) and not (
            self.matrices or self.mesh or self.groups)

    @property
    def needs_search(self) -> bool:
        """Whether no rule gives the best rank order, so that it is searched."""
        return bool(self.matrices or self.mesh or self.groups) or (
            self.pattern_name in ("one-peer-exponential", "base-2") and self.islands != "zone")

    @property
    def tie(self) -> float:
        """Relative difference of times that count as equal, so that bytes between zones decide (see best_cost)."""
        return MAX_TIE if self.mesh or self.groups else 0.0

    def size_mismatch(self, nodes: int, ranks: int) -> str:
        """Why a mesh or groups do not fit a job of this size, and the sizes that would; "" if they fit."""
        if self.groups:
            return groups.node_count_mismatch(self.groups.groups, nodes)
        return mesh.size_mismatch(self.mesh.mesh, ranks) if self.mesh else ""

    def roles(self, ranks: int) -> tuple[str, ...]:
        """Role of each rank: the name of its group, or ps or worker."""
        if self.groups:
            return tuple(name for name, own in self.groups.ranks_by_group(ranks).items() for _ in own)
        return ("ps",) * self.ps + ("worker",) * (ranks - self.ps)

    def phases(self, ranks: int, zone_of_rank: IntArray | None = None) -> list[Phase]:
        """Phases of one iteration; `zone_of_rank`, shape (ranks,), holds leaf zones, None if they are all the same.

        Raises PlacementError for strategy `ps` without a server or worker, a pattern of another strategy, matrices,
        a mesh or groups for another number of ranks, or more than mesh.MAX_RANKS ranks.
        """
        if ranks > mesh.MAX_RANKS:  # 150 bytes of memory for each
            raise PlacementError(f"{pluralize(ranks, 'rank')}; expected at most {mesh.MAX_RANKS}")
        if self.groups:
            return self.groups.phases(ranks)
        if self.mesh:
            if mismatch := mesh.size_mismatch(self.mesh.mesh, ranks):
                raise PlacementError(mismatch)
            return self.mesh.phases()
        if self.strategy == "ps" and not 0 < self.ps < ranks:
            raise PlacementError(
                f"--dl-ps={self.ps}: {ranks} tasks can hold 1 to {ranks - 1} parameter servers"
                if ranks > 1 else "--dl-strategy=ps: expected at least 2 tasks, a parameter server and a worker")
        if self.matrices:
            return [self._matrix_phase(matrix, ranks) for matrix in self.matrices]
        valid = COMM_PATTERNS[self.strategy]
        pattern = self.pattern_name
        if pattern not in valid:
            raise PlacementError(f"--dl-comm-pattern={pattern}: not valid with {self.strategy}; "
                                 f"expected {', '.join(valid)}")
        if ranks < 2:
            return []
        zone_of_rank = np.zeros(ranks, np.int64) if zone_of_rank is None else zone_of_rank
        if self.islands == "zone":
            return list(_island_phases(self.strategy, pattern, zone_of_rank, self.model_bytes))
        if pattern == "shards":
            return list(_ps_phases(ranks, self.ps, self.model_bytes))
        if pattern == "ring":
            return list(ring(np.arange(ranks), self.model_bytes))
        if pattern == "hierarchical":
            return list(_hierarchical_phases(zone_of_rank, self.model_bytes))
        return list(_gossip_phases(pattern, zone_of_rank, self.model_bytes))

    def _matrix_phase(self, matrix: FloatArray, ranks: int) -> Phase:
        if matrix.shape != (ranks, ranks):
            shape = " x ".join(map(str, matrix.shape))
            raise PlacementError(f"--dl-comm-pattern={self.pattern}: a matrix of {shape} for "
                                 f"{pluralize(ranks, 'rank')}; expected {ranks} x {ranks}")
        source, target = np.nonzero(matrix)
        off_diagonal = source != target
        source, target = source[off_diagonal], target[off_diagonal]
        return Phase(source, target, matrix[source, target])


def count_shards(servers: IntArray | FloatArray, workers: IntArray | FloatArray, all_servers: int,
                 all_workers: int) -> IntArray | FloatArray:
    """Shards over a link, in its busier direction, with these servers and workers on one side."""
    return np.maximum(servers * (all_workers - workers), workers * (all_servers - servers))


def _ps_phases(ranks: int, ps: int, model_bytes: float) -> Iterator[Phase]:
    """Every worker pulls a shard of the model from each server, then pushes a shard of its gradient to each."""
    servers, workers = np.arange(ps), np.arange(ps, ranks)
    yield Phase(servers, workers, model_bytes / ps, all_pairs=True)
    yield Phase(workers, servers, model_bytes / ps, all_pairs=True)


def _hierarchical_phases(zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Reduce-scatter in each zone, ring allreduce of every shard between the zones, allgather in each zone.

    The zones form a ring in the order of their lowest ranks. Zones of different sizes have shards of different
    sizes: a rank exchanges with all ranks of the next zone whose shards overlap its own. Each uplink carries
    2 N (Z - 1) / Z bytes per direction in any case.
    """
    ranks_by_zone = group_ranks(range(len(zone_of_rank)), zone_of_rank.tolist())
    zones, within = len(ranks_by_zone), [*gather_phases(ranks_by_zone, model_bytes)]
    yield from within
    if zones > 1:
        yield shard_phase(ranks_by_zone, [*range(1, zones), 0], 2 * model_bytes * (zones - 1) / zones,
                           rounds=2 * (zones - 1))
    yield from within


def gather_phases(groups: Sequence[Sequence[int]], model_bytes: float) -> Iterator[Phase]:
    """Reduce-scatter or allgather around a ring in each group, of a vector of `model_bytes`."""
    source = np.array([rank for ranks in groups for rank in ranks])
    target = np.array([rank for ranks in groups for rank in (*ranks[1:], ranks[0])])
    size = np.array([(1 - 1 / len(ranks)) * model_bytes for ranks in groups for _ in ranks])
    sends = source != target
    if sends.any():
        yield Phase(source[sends], target[sends], size[sends], rounds=max(map(len, groups)) - 1)


def shard_phase(groups: Sequence[Sequence[int]], target_groups: Sequence[int], sent_bytes: float,
                 rounds: float) -> Phase:
    """Each group sends `sent_bytes` to one group: each rank its shard to the ranks whose shards overlap it."""
    sources, targets, sizes = [], [], []
    for group, index in zip(groups, target_groups, strict=True):
        if group is not groups[index]:
            own, other, fraction = _common_shards(len(group), len(groups[index]))
            sources.append(np.array(group)[own])
            targets.append(np.array(groups[index])[other])
            sizes.append(sent_bytes * fraction)
    return Phase(np.concatenate(sources), np.concatenate(targets), np.concatenate(sizes), rounds=rounds)


def _island_phases(strategy: str, pattern: str, zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Allreduce of gradients in each zone; and in a fraction of the iterations an exchange of shards between zones.

    The fraction is that of the default period of the strategy (comm_layout.default_period), without compression.
    After an exchange the ranks of a zone gather the shards.
    """
    islands = group_ranks(range(len(zone_of_rank)), zone_of_rank.tolist())
    gather, count = [*gather_phases(islands, model_bytes)], len(islands)
    yield from gather * 2
    if count == 1:
        return
    exchanged = 1 / default_period(strategy)
    if strategy == "local-sgd":
        yield shard_phase(islands, [*range(1, count), 0], exchanged * 2 * model_bytes * (count - 1) / count,
                           rounds=exchanged * 2 * (count - 1))
    else:
        graph = GRAPHS[pattern](tuple(str(zone_of_rank[island[0]]) for island in islands))
        # random partners are all equally likely: a ring stands for them
        for target, fraction in [(graph_round.target.tolist(), fraction) for graph_round, fraction in
                                 graph.weighted_rounds()] or [([*range(1, count), 0], 1.0)]:
            yield shard_phase(islands, target, exchanged * fraction * model_bytes, rounds=exchanged * fraction)
    for phase in gather:
        yield replace(phase, bytes_per_pair=phase.bytes_per_pair * exchanged, rounds=phase.rounds * exchanged)


@lru_cache(maxsize=256)
def _common_shards(left: int, right: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Overlaps of `left` with `right` equal shards: index of both, and the common fraction of the model."""
    borders = sorted_unique(np.append(np.arange(left) * right, np.arange(right) * left))
    return borders // right, borders // left, np.diff(borders, append=left * right) / (left * right)


def _gossip_phases(pattern: str, zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Each round of the graph is a phase that occurs in a fraction of the iterations.

    With random partners all other ranks are equally likely, and one of an odd number rests.
    """
    ranks = len(zone_of_rank)
    all_ranks = np.arange(ranks)
    rounds = GRAPHS[pattern](tuple(map(str, zone_of_rank.tolist()))).weighted_rounds()
    for graph_round, fraction in rounds:
        sends = graph_round.target != all_ranks
        yield Phase(all_ranks[sends], graph_round.target[sends], model_bytes * fraction, rounds=fraction)
    if not rounds:
        yield Phase(all_ranks, all_ranks, model_bytes / (ranks - 1 + ranks % 2), all_pairs=True)


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
