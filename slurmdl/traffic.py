"""Traffic of a job: what its ranks send in one iteration, as one value from the options to placement and simulation.

Ring allreduce: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Hierarchical allreduce: Cho et al., BlueConnect: decomposing all-reduce for deep learning, MLSys 2019.
Parameter server: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
Gossip: see slurmdl.gossip_graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import PlacementError
from slurmdl.plan import COMM_PATTERNS, group_ranks
from slurmdl.text import pluralize

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_RANKS = 2**20  # 150 bytes of memory for each


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

    def in_share(self, share: float) -> Phase:
        """The phase if it occurs in this share of the iterations."""
        return replace(self, bytes_per_pair=self.bytes_per_pair * share, rounds=self.rounds * share)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Traffic of a strategy, for any number of ranks; DlOptions.traffic makes it once from the options.

    Further kinds are mesh.MeshTraffic and groups.GroupTraffic.

    Attributes:
        strategy: one of plan.STRATEGIES.
        model_bytes: bytes of one replica of the parameters (and of its gradient).
        ps: number of parameter servers, which are the first ranks; 0 unless the strategy is `ps`.
        pattern: one of plan.COMM_PATTERNS[strategy], "" for the first one; with matrices their file.
        matrices: the user's own phases instead of a pattern, each of shape (ranks, ranks): entry [i, j] is the number
            of bytes that rank i sends to rank j per iteration; the diagonal is ignored.
        islands: what is an island, one of plan.ISLAND_LEVELS; "" without islands.
        tie: relative difference of times that count as equal, so that bytes between zones decide (see best_cost).
    """

    strategy: str = "allreduce"
    model_bytes: float = 100e6
    ps: int = 0
    pattern: str = ""
    matrices: tuple[FloatArray, ...] = ()
    islands: str = ""
    tie: ClassVar[float] = 0.0

    @property
    def kind(self) -> str:
        """Kind of traffic, which decides how nodes and rank orders are searched.

        "graph" or "matrices" if no rule gives the best rank order, "servers", "mesh", "groups"; "ring" for all
        others: rings, messages from each rank to each other, and patterns that follow the zones.
        """
        if self.matrices:
            return "matrices"
        if self.pattern_name in ("one-peer-exponential", "base-2") and self.islands != "zone":
            return "graph"
        return "servers" if self.ps else "ring"

    @property
    def pattern_name(self) -> str:
        return self.pattern or COMM_PATTERNS[self.strategy][0]

    @property
    def is_zone_dependent(self) -> bool:
        """Whether the phases depend on the zones of the ranks."""
        return not self.matrices and (self.islands == "zone" or self.pattern_name in ("hierarchical", "zone-aware"))

    def size_mismatch(self, nodes: int, ranks: int) -> str:
        """Why a mesh or groups do not fit a job of this size, and the sizes that would; "" if they fit."""
        return ""

    def launched_ranks_per_node(self, tasks: int, nodes: int) -> int:
        """Ranks that each task starts if it is a launcher: one task per node, and a mesh with more ranks; else 0."""
        return 0

    def group_sizes(self) -> list[int]:
        """Nodes of each group; [] without groups."""
        return []

    def roles(self, ranks: int) -> tuple[str, ...]:
        """Role of each rank: the name of its group, or ps or worker."""
        return ("ps",) * self.ps + ("worker",) * (ranks - self.ps)

    def min_node_bytes(self, ranks_per_node: int) -> float | None:
        """Least bytes that leave a node with this number of ranks; None if it follows from the phases."""
        return None

    def rounds(self, phases: Sequence[Phase], ranks_per_node: int) -> float:
        """Message rounds of one iteration; of a mesh only the rounds of groups that no node can hold."""
        return sum(phase.rounds for phase in phases)

    def phases(self, ranks: int, zone_of_rank: IntArray | None = None) -> list[Phase]:
        """Phases of one iteration; `zone_of_rank`, shape (ranks,), holds leaf zones, None if they are all the same.

        Raises PlacementError for strategy `ps` without a server or worker, a pattern of another strategy, matrices,
        a mesh or groups for another number of ranks, or more than MAX_RANKS ranks.
        """
        check_rank_count(ranks)
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


def check_rank_count(ranks: int) -> None:
    """Raise PlacementError for too many ranks."""
    if ranks > MAX_RANKS:
        raise PlacementError(f"{pluralize(ranks, 'rank')}; expected at most {MAX_RANKS}")


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
    within = [*gather_phases(ranks_by_zone, model_bytes)]
    yield from within
    if len(ranks_by_zone) > 1:
        yield ring_of_groups(ranks_by_zone, model_bytes)
    yield from within


def gather_phases(groups: Sequence[Sequence[int]], model_bytes: float) -> Iterator[Phase]:
    """Reduce-scatter or allgather around a ring in each group, of a vector of `model_bytes`."""
    source = np.array([rank for ranks in groups for rank in ranks])
    target = np.array([rank for ranks in groups for rank in (*ranks[1:], ranks[0])])
    size = np.array([(1 - 1 / len(ranks)) * model_bytes for ranks in groups for _ in ranks])
    sends = source != target
    if sends.any():
        yield Phase(source[sends], target[sends], size[sends], rounds=max(map(len, groups)) - 1)


def ring_of_groups(groups: Sequence[Sequence[int]], model_bytes: float) -> Phase:
    """Ring allreduce of every shard between groups, in the order of their lowest ranks."""
    count = len(groups)
    return shard_phase(groups, _next_groups(count), 2 * model_bytes * (count - 1) / count, rounds=2 * (count - 1))


def _next_groups(count: int) -> list[int]:
    return [*range(1, count), 0]


def shard_phase(groups: Sequence[Sequence[int]], target_groups: Sequence[int], sent_bytes: float,
                rounds: float = 1) -> Phase:
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
    from slurmdl.comm_layout import default_period

    islands = group_ranks(range(len(zone_of_rank)), zone_of_rank.tolist())
    gather = [*gather_phases(islands, model_bytes)]
    yield from gather * 2
    if len(islands) == 1:
        return
    exchanged = 1 / default_period(strategy)
    if strategy == "local-sgd":
        yield ring_of_groups(islands, model_bytes).in_share(exchanged)
    else:
        rounds = _weighted_rounds(pattern, zone_of_rank[[island[0] for island in islands]])
        # random partners are all equally likely: a ring stands for them
        for target, share in [(target.tolist(), share) for target, share in rounds] or \
                [(_next_groups(len(islands)), 1.0)]:
            yield shard_phase(islands, target, exchanged * share * model_bytes, rounds=exchanged * share)
    yield from (phase.in_share(exchanged) for phase in gather)


@lru_cache(maxsize=256)
def _common_shards(left: int, right: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Overlaps of `left` with `right` equal shards: index of both, and the common fraction of the model."""
    borders = np.array(sorted({*range(0, left * right, right), *range(0, left * right, left)}))
    return borders // right, borders // left, np.diff(borders, append=left * right) / (left * right)


def _gossip_phases(pattern: str, zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Each round of the graph is a phase that occurs in a share of the iterations.

    With random partners all other ranks are equally likely, and one of an odd number rests.
    """
    ranks = len(zone_of_rank)
    all_ranks = np.arange(ranks)
    rounds = _weighted_rounds(pattern, zone_of_rank)
    for target, share in rounds:
        sends = target != all_ranks
        yield Phase(all_ranks[sends], target[sends], model_bytes * share, rounds=share)
    if not rounds:
        yield Phase(all_ranks, all_ranks, model_bytes / (ranks - 1 + ranks % 2), all_pairs=True)


def _weighted_rounds(pattern: str, zones: IntArray) -> list[tuple[IntArray, float]]:
    """Target of each worker in every different round of a gossip graph, and its share of the steps; [] if random."""
    from slurmdl.gossip_graphs import GRAPHS

    graph = GRAPHS[pattern](tuple(map(str, zones.tolist())))
    return [(entry.target, share) for entry, share in graph.weighted_rounds()]


def ring(ranks: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Ring all-reduce: n - 1 rounds of reduce-scatter and of all-gather, with 1/n of the model to the next rank."""
    count = len(ranks)
    if count > 1 and model_bytes:
        yield Phase(ranks, np.roll(ranks, -1), 2 * model_bytes * (count - 1) / count, rounds=2 * (count - 1))
