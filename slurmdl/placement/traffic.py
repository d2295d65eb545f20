"""What one iteration of each strategy sends from rank to rank, as a list of phases.

Ring allreduce: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Hierarchical allreduce: Cho et al., BlueConnect: decomposing all-reduce for deep learning, MLSys 2019.
Parameter server: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
Gossip: see slurmdl.gossip_graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.gossip_graphs import GRAPHS, GossipGroup
from slurmdl.plan import COMM_PATTERNS

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Phase:
    """Messages that are under way at the same time.

    Attributes
    ----------
    source, target : ranks. Where `crossed` is false, source[i] sends to target[i]; where it is true, every
        source sends to every target other than itself: no n x n matrix is needed for dense traffic.
    size : bytes that each pair sends; where not crossed it may have shape (pairs,).
    rounds : how many times in the phase a message waits for the one before it; a fraction where the phase
        belongs to only a share of the iterations.
    """

    source: IntArray
    target: IntArray
    bytes_per_pair: float | FloatArray
    rounds: float = 1
    all_pairs: bool = False


@dataclass(frozen=True, eq=False)
class Traffic:
    """What the ranks of one job send, whatever their number.

    Attributes
    ----------
    strategy : one of plan.STRATEGIES.
    model_bytes : bytes of one replica of the parameters (and of its gradient).
    ps : with strategy `ps` the ranks below it are the parameter servers, else 0.
    pattern : one of plan.PATTERNS[strategy], "" for the first of them; with matrices their file.
    matrices : the user's own phases instead of a pattern, each of shape (ranks, ranks): entry [i, j] is the
        bytes that rank i sends to rank j per iteration. What a rank sends to itself does not count.
    """

    strategy: str
    model_bytes: float = 100e6
    ps: int = 0
    pattern: str = ""
    matrices: tuple[FloatArray, ...] = ()

    @classmethod
    def from_options(cls, dl: DlOptions, matrices: tuple[FloatArray, ...] = ()) -> Traffic:
        """The traffic that the --dl-* options ask for."""
        return cls(dl.strategy, dl.model_bytes, dl.ps, dl.comm_pattern, matrices)

    @property
    def pattern_name(self) -> str:
        """Of the pattern."""
        name = self.pattern or COMM_PATTERNS[self.strategy][0]
        return "ring" if name == "mpi-allreduce" else name

    @property
    def is_zone_dependent(self) -> bool:
        """Whether the phases depend on the zones of the ranks."""
        return self.pattern_name in ("hierarchical", "zone-aware") and not self.matrices

    @property
    def needs_search(self) -> bool:
        """Whether no rule gives the best order of the ranks, so that one is searched."""
        return bool(self.matrices) or self.pattern_name in ("one-peer-exponential", "base-2")

    @property
    def is_count_based(self) -> bool:
        """Whether the time depends only on how many ranks, or servers and workers, are below each link."""
        return not self.needs_search and not self.is_zone_dependent

    def phases(self, ranks: int, zone_of_rank: IntArray | None = None) -> list[Phase]:
        """The traffic of one iteration of so many ranks.

        Parameters
        ----------
        zone : shape (ranks,), the leaf zone of each rank; None where all are in one.

        Raises
        ------
        PlacementError : strategy `ps` without a server or without a worker, a pattern that the strategy does not
            have or that is not made for this number of ranks, or matrices of another number of ranks.
        """
        if self.strategy == "ps" and not 0 < self.ps < ranks:
            raise PlacementError(
                f"--dl-ps={self.ps}: {ranks} tasks can hold 1 to {ranks - 1} parameter servers"
                if ranks > 1 else "a parameter server needs a worker beside it: 2 tasks at least")
        if self.matrices:
            return [self._matrix_phase(matrix, ranks) for matrix in self.matrices]
        valid = COMM_PATTERNS[self.strategy]
        pattern = self.pattern_name
        if pattern not in valid:
            raise PlacementError(f"--dl-comm-pattern={pattern}: not valid with {self.strategy}; valid: {', '.join(valid)}")
        if ranks < 2:
            return []
        zone_of_rank = np.zeros(ranks, np.int64) if zone_of_rank is None else zone_of_rank
        if pattern == "shards":
            return list(_ps_phases(ranks, self.ps, self.model_bytes))
        if pattern == "ring":
            return list(_ring_phases(ranks, self.model_bytes))
        if pattern == "hierarchical":
            return list(_hierarchical_phases(zone_of_rank, self.model_bytes))
        return list(_gossip_phases(pattern, zone_of_rank, self.model_bytes))

    def _matrix_phase(self, matrix: FloatArray, ranks: int) -> Phase:
        if matrix.shape != (ranks, ranks):
            raise PlacementError(f"--dl-comm-pattern={self.pattern}: a matrix of {' x '.join(map(str, matrix.shape))}, "
                                 f"but there are {ranks} ranks; valid: {ranks} x {ranks}")
        source, target = np.nonzero(matrix)
        other = source != target
        source, target = source[other], target[other]
        return Phase(source, target, matrix[source, target])


def _ps_phases(ranks: int, ps: int, model_bytes: float) -> Iterator[Phase]:
    """Every worker pulls a share of the model from each server, then pushes a share of its gradient to each."""
    servers, workers = np.arange(ps), np.arange(ps, ranks)
    yield Phase(servers, workers, model_bytes / ps, all_pairs=True)
    yield Phase(workers, servers, model_bytes / ps, all_pairs=True)


def _ring_phases(ranks: int, model_bytes: float) -> Iterator[Phase]:
    """Reduce-scatter and allgather: n - 1 rounds each of 1/n of the model, to the next rank in the ring."""
    everyone = np.arange(ranks)
    yield Phase(everyone, np.roll(everyone, -1), 2 * model_bytes * (ranks - 1) / ranks, rounds=2 * (ranks - 1))


def _hierarchical_phases(zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Reduce-scatter in each zone, ring allreduce of every shard between the zones, allgather in each zone.

    The zones stand in the ring in the order of their lowest ranks. Where the next zone has another number of
    ranks, its shards are of another size, and a rank exchanges with all whose shards overlap its own: over
    each uplink and direction go 2 N (Z - 1) / Z bytes in any case.
    """
    _, first, zone_of, size = np.unique(zone_of_rank, return_index=True, return_inverse=True, return_counts=True)
    # number the zones by their lowest rank
    turn = np.argsort(first, kind="stable")
    number = np.empty_like(turn)
    number[turn] = np.arange(len(turn))
    zone_of, size = number[zone_of], size[turn]
    by_zone = np.argsort(zone_of, kind="stable")
    begin = np.cumsum(size) - size
    inside = np.arange(len(zone_of_rank)) - begin[zone_of[by_zone]]
    follower = by_zone[begin[zone_of[by_zone]] + (inside + 1) % size[zone_of[by_zone]]]
    shared = (1 - 1 / size)[zone_of[by_zone]] * model_bytes
    alone = by_zone == follower
    within = Phase(by_zone[~alone], follower[~alone], shared[~alone], rounds=int(size.max()) - 1)
    if len(within.source):
        yield within
    zones = len(size)
    if zones > 1:
        source, target, share = _shard_overlaps(size)
        yield Phase(by_zone[source], by_zone[target], 2 * model_bytes * (zones - 1) / zones * share,
                    rounds=2 * (zones - 1))
    if len(within.source):
        yield within


def _shard_overlaps(shard_counts: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Which shards of each zone overlap which of the next one, and how much of the model each pair shares.

    Parameters
    ----------
    size : shape (zones,), shards of each zone, which lie one after the other in the model.

    Returns
    -------
    indices of the shards, zone by zone, and the shared parts of the model; each of shape (pairs,).
    """
    zones = np.arange(len(shard_counts))
    after = np.roll(zones, -1)
    begin = np.cumsum(shard_counts) - shard_counts
    # shard borders of both zones on one scale: the model is size * size-of-the-next units long
    own, other = np.repeat(zones, shard_counts), np.repeat(zones, shard_counts[after])
    borders = np.concatenate([(np.arange(len(own)) - begin[own]) * shard_counts[after][own],
                              (np.arange(len(other)) -
    np.repeat(np.cumsum(shard_counts[after]) -
     shard_counts[after], shard_counts[after]))
                              * shard_counts[other]])
    group = np.concatenate([own, other])
    order = np.lexsort((borders, group))
    group, borders = group[order], borders[order]
    new = np.ones(len(group), bool)
    new[1:] = (group[1:] != group[:-1]) | (borders[1:] != borders[:-1])
    group, borders = group[new], borders[new]
    total = (shard_counts * shard_counts[after])[group]
    end = np.append(borders[1:], 0)
    end[np.append(group[1:] != group[:-1], True)] = total[np.append(group[1:] != group[:-1], True)]
    return (begin[group] + borders // shard_counts[after][group], begin[after][group] + borders // shard_counts[group],
            (end - borders) / total)


def _gossip_phases(pattern: str, zone_of_rank: IntArray, model_bytes: float) -> Iterator[Phase]:
    """Each round of the graph is a phase, for its share of the iterations.

    Where partners are drawn, all others are equally likely, and one of an odd number rests. How much drawn partners
    keep to quick links (`link-aware`) is known only while training: this is what they send at worst.
    """
    ranks = len(zone_of_rank)
    graph = GRAPHS[pattern]
    everyone = np.arange(ranks)
    turns = graph(GossipGroup(tuple(map(str, zone_of_rank.tolist())))).weighted_rounds()
    for turn, share in turns:
        awake = turn.target != everyone
        yield Phase(everyone[awake], turn.target[awake], model_bytes * share, rounds=share)
    if not turns:
        yield Phase(everyone, everyone, model_bytes / (ranks - 1 + ranks % 2), all_pairs=True)
