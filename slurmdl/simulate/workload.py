"""Training workload of a simulation, and the messages of its ranks, as the strategies of slurmdl.train send them.

Follows train.collectives and train.strategies.allreduce, gossip, islands and parameter_server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slurmdl import comm_layout
from slurmdl.comm_layout import COMPRESSION_NAMES, FORWARD_SHARE
from slurmdl.errors import UsageError
from slurmdl.gossip_graphs import GRAPHS, Graph, MixingRound
from slurmdl.plan import COMM_PATTERNS, ISLAND_STRATEGIES, default_pattern, group_ranks
from slurmdl.traffic import Traffic

STRATEGIES = ("allreduce", "gossip", "adaptive-gossip", "ps")  # strategies that can be simulated without islands
SAMPLED_EXCHANGES = 8  # exchanges that are simulated if partners are random

ExchangeAction = tuple[list[tuple[int, int]], list[int]]  # concurrent sends (rank, bytes) and receives (rank)
Action = float | ExchangeAction  # seconds from the start of the step until which the rank computes, or an exchange
Ring = tuple[Sequence[int], float]  # ranks of a ring, and bytes of the vector that they reduce


@dataclass(frozen=True)
class TrainingWorkload:
    """One training run.

    Attributes:
        traffic: its strategy, one of STRATEGIES, or with islands of plan.ISLAND_STRATEGIES; 4 bytes per parameter.
        compute_seconds: computation of a step on each worker.
        overlap: whether allreduce of gradients overlaps the backward pass.
        period: steps per exchange of gossip, or between islands.
        compression: one of comm_layout.COMPRESSION_NAMES; of messages between islands.
        seed: of random partners.
    """

    traffic: Traffic
    compute_seconds: float = 0.0
    overlap: bool = True
    period: int = 1
    compression: str = "none"
    seed: int = 0

    @property
    def parameters(self) -> int:
        return round(self.traffic.model_bytes / 4)

    @property
    def pattern(self) -> str:
        """The communication pattern of the trainer; inside one zone hierarchical is a ring."""
        return self.traffic.pattern or default_pattern(self.traffic.strategy, multiple_zones=True)

    @property
    def is_gossip(self) -> bool:
        return self.traffic.strategy in ("gossip", "adaptive-gossip")

    @property
    def is_periodic(self) -> bool:
        """Whether exchanges are made once in a period."""
        return self.is_gossip or self.traffic.islands != ""

    @property
    def sent_traffic(self) -> Traffic:
        """The traffic with compressed messages; islands reduce whole gradients."""
        return self.traffic if self.traffic.islands else replace(
            self.traffic, model_bytes=self.wire_bytes(self.parameters))

    def islands(self, zones: Sequence[str]) -> list[list[int]]:
        """Ranks of each island: of each zone, or without islands one rank each."""
        return group_ranks(range(len(zones)), zones if self.traffic.islands else [*map(str, range(len(zones)))])

    def check_supported(self, ranks: int) -> None:
        """Raise UsageError, which names the option and the valid values, if `ranks` ranks cannot be simulated."""
        strategy, pattern, islands = self.traffic.strategy, self.pattern, self.traffic.islands
        strategies = ISLAND_STRATEGIES if islands else STRATEGIES
        if islands not in ("", "zone"):
            raise UsageError(f"--islands {islands}: not supported; expected zone")
        if strategy not in strategies:
            condition = " with --islands" if islands else ""
            raise UsageError(f"--strategy {strategy}: not supported{condition}; expected {', '.join(strategies)}")
        patterns = COMM_PATTERNS[strategy]
        if pattern not in patterns:
            raise UsageError(f"--comm-pattern {pattern}: not supported with {strategy}; "
                             f"expected {', '.join(patterns)}")
        if strategy == "ps" and not 0 < self.traffic.ps < ranks:
            raise UsageError(f"--ps {self.traffic.ps}: expected 1 to {ranks - 1} parameter servers for {ranks} ranks"
                             if ranks > 1 else "--strategy ps: expected at least 2 ranks, a server and a worker")
        if strategy != "ps" and self.traffic.ps:
            raise UsageError(f"--ps {self.traffic.ps}: {strategy} has no parameter servers; use --strategy ps")
        if not self.is_periodic and self.period != 1:
            raise UsageError(f"--period {self.period}: {strategy} exchanges in every step; use gossip or "
                             "adaptive-gossip")
        supported: Sequence[str] = COMPRESSION_NAMES[:1] if strategy == "ps" else COMPRESSION_NAMES[:2]
        if self.is_periodic and pattern not in ("random-matching", "hierarchical"):
            supported = COMPRESSION_NAMES
        if self.compression not in supported:
            raise UsageError(f"--compression {self.compression}: not supported for {strategy} with {pattern}; "
                             f"expected {', '.join(supported)}")

    def wire_bytes(self, elements: int) -> int:
        """Bytes of a message of `elements`."""
        return comm_layout.packed_bytes(self.compression, elements)

    def gradient_buckets(self) -> list[tuple[int, int, float]]:
        """Buckets of allreduce in their order: first element, number of elements, ready time in s after step start.

        The backward pass takes equal time for all parameters and starts with the last ones.
        """
        size, buckets = self.parameters, []
        for start, end in reversed([*pairwise([*comm_layout.bucket_starts(size), size])]):
            ready = FORWARD_SHARE + (1 - FORWARD_SHARE) * (size - start) / size if self.overlap else 1.0
            buckets.append((start, end - start, ready * self.compute_seconds))
        return buckets

    def shard_bytes(self) -> list[int]:
        """Bytes of each server's shard."""
        return [self.wire_bytes(shard.stop - shard.start)
                for shard in comm_layout.split_by_speed(self.parameters, [1.0] * self.traffic.ps)]

    def make_graph(self, zones: Sequence[str]) -> Graph:
        """Graph of the islands of ranks in these leaf zones."""
        return GRAPHS[self.pattern]([zones[island[0]] for island in self.islands(zones)], self.seed)

    def cycle_length(self, zones: Sequence[str]) -> int:
        """Exchanges until the messages repeat, or a sample size if they do not."""
        return (self.make_graph(zones).period or SAMPLED_EXCHANGES) if self.is_gossip else 1


def rank_programs(workload: TrainingWorkload,
                  nodes: Sequence[int], zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    """Actions of each step of each rank; entry i of `nodes` and `zones` belongs to rank i."""
    ranks = range(len(zones))
    if workload.is_periodic:
        return _periodic_programs(workload, nodes, zones, steps)
    if workload.traffic.strategy == "ps":
        return [[_ps_program(workload, rank, len(zones))] * steps for rank in ranks]
    groups = group_ranks(ranks, zones) if workload.pattern == "hierarchical" else [ranks]
    uses_direct = _direct_ranks(groups, nodes, zones)
    return [[_allreduce_program(workload, groups, rank, rank in uses_direct)] * steps for rank in ranks]


def _direct_ranks(groups: Sequence[Sequence[int]], nodes: Sequence[int], zones: Sequence[str]) -> set[int]:
    """Ranks of the groups in which the ranks exchange the first buckets directly."""
    return {rank for group in groups if comm_layout.uses_direct_exchange(
        [nodes[i] for i in group], [zones[i] for i in group]) for rank in group}


def message_count(workload: TrainingWorkload, ranks: int, steps: int) -> int:
    """Approximate number of messages of all ranks."""
    if workload.is_gossip and not workload.traffic.islands:
        return ranks * (steps // workload.period)
    if workload.traffic.strategy == "ps":
        return 2 * workload.traffic.ps * (ranks - workload.traffic.ps) * steps
    return 2 * ranks * (ranks - 1) * len(workload.gradient_buckets()) * steps


def _periodic_programs(workload: TrainingWorkload, nodes: Sequence[int], zones: Sequence[str],
                       steps: int) -> list[list[list[Action]]]:
    """Allreduce of gradients in each island; once in a period an exchange of shards, which each island gathers."""
    islands, period = workload.islands(zones), workload.period
    direct = _direct_ranks(islands, nodes, zones)
    gradients = replace(workload, compression="none")
    pieces = [(part.stop - part.start, holders) for part, holders in
              comm_layout.shard_pieces(workload.parameters, islands)]
    graph = workload.make_graph(zones) if workload.is_gossip else None
    rounds = [graph.round(index) if graph else None for index in range(steps // period)]
    programs: list[list[list[Action]]] = [[] for _ in zones]
    for own, island in enumerate(islands):
        for rank in island:
            step_actions = _allreduce_program(gradients, [island], rank, rank in direct) if workload.traffic.islands \
                else [workload.compute_seconds]
            gather = [*_ring_turns([(island, workload.traffic.model_bytes)], rank)]
            for step in range(steps):
                exchange: list[Action] = []
                if step % period == period - 1:
                    for elements, holders in pieces:
                        if holders[own] == rank:
                            exchange += _exchange(workload, elements, holders, own, rounds[step // period])
                    exchange += gather if exchange else []
                programs[rank].append([*step_actions, *exchange])
    return programs


def _exchange(workload: TrainingWorkload, elements: int, holders: Sequence[int], own: int,
              graph_round: MixingRound | None) -> list[ExchangeAction]:
    """Exchange of a piece by the holder of island `own`: with its partners in a round of gossip, else with all."""
    size = workload.wire_bytes(elements)
    if graph_round is None:
        ring: list[Ring] = [(holders, size)]
        scatter = _direct if workload.compression != "none" else _ring_turns
        return [*scatter(ring, holders[own]), *_ring_turns(ring, holders[own])]
    target, source = int(graph_round.target[own]), int(graph_round.source[own])
    return [] if target == own else [([(holders[target], size)], [holders[source]])]


def _ps_program(workload: TrainingWorkload, rank: int, ranks: int) -> list[Action]:
    """Workers push and pull concurrently; a server answers after the pushes of all workers."""
    servers, workers, sizes = range(workload.traffic.ps), range(workload.traffic.ps, ranks), workload.shard_bytes()
    if rank in servers:
        return [([], list(workers)), ([(worker, sizes[rank]) for worker in workers], [])]
    return [workload.compute_seconds, ([(server, sizes[server]) for server in servers], list(servers))]


def _allreduce_program(workload: TrainingWorkload,
                       groups: Sequence[Sequence[int]], rank: int, uses_direct: bool) -> list[Action]:
    """For each bucket: reduce-scatter inside the group, allreduce of shards between groups, allgather inside."""
    program: list[Action] = []
    for start, elements, ready in workload.gradient_buckets():
        intra_group = _direct if uses_direct and start < comm_layout.DIRECT_ELEMENTS else _ring_turns
        inside: list[Ring] = [(group, workload.wire_bytes(elements)) for group in groups if rank in group]
        between: list[Ring] = [(holders, workload.wire_bytes(part.stop - part.start))
                               for part, holders in comm_layout.shard_pieces(elements, groups) if rank in holders]
        program += [ready, *intra_group(inside, rank), *_ring_turns(between, rank), *_ring_turns(between, rank),
                    *intra_group(inside, rank)]
    return [*program, workload.compute_seconds]


def _ring_turns(rings: Sequence[Ring], rank: int) -> Iterator[ExchangeAction]:
    """Turns of concurrent rings: each rank sends one part to its successor and receives one from its predecessor."""
    for _ in range(len(rings[0][0]) - 1 if rings else 0):
        sends, receives = [], []
        for ring, size in rings:
            position = ring.index(rank)
            sends.append((ring[(position + 1) % len(ring)], round(size / len(ring))))
            receives.append(ring[position - 1])
        yield sends, receives


def _direct(rings: Sequence[Ring], rank: int) -> Iterator[ExchangeAction]:
    """A single turn in which each rank sends one part to every other rank of its ring."""
    sends = [(peer, round(size / len(ring))) for ring, size in rings for peer in ring if peer != rank]
    if sends:
        yield sends, [peer for peer, _ in sends]
