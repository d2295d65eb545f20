"""Training workload of a simulation, and the messages of its ranks, as the strategies of slurmdl.train send them.

Follows train.mixing and train.strategies.allreduce, gossip, islands and parameter_server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slurmdl import comm_layout
from slurmdl.comm_layout import COMPRESSION_NAMES, FORWARD_SHARE
from slurmdl.errors import UsageError
from slurmdl.gossip_graphs import GRAPHS, Graph
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
        strategy: one of STRATEGIES, or with islands of plan.ISLAND_STRATEGIES.
        parameters: elements of the model.
        ps: number of parameter servers, the first ranks; 0 unless the strategy is `ps`.
        comm_pattern: one of plan.COMM_PATTERNS[strategy], "" for the default.
        compute_seconds: computation of a step on each worker.
        overlap: whether allreduce of gradients overlaps the backward pass.
        period: steps per exchange of gossip, or between islands.
        compression: one of comm_layout.COMPRESSION_NAMES; of messages between islands.
        seed: of random partners.
        islands: "zone" if leaf zones are islands: allreduce in each, and the strategy between them; else "".
    """

    strategy: str
    parameters: int
    ps: int = 0
    comm_pattern: str = ""
    compute_seconds: float = 0.0
    overlap: bool = True
    period: int = 1
    compression: str = "none"
    seed: int = 0
    islands: str = ""

    @property
    def effective_pattern(self) -> str:
        """`comm_pattern`, or the default; inside one zone hierarchical is a ring."""
        return self.comm_pattern or default_pattern(self.strategy, multiple_zones=True)

    @property
    def is_gossip(self) -> bool:
        return self.strategy in ("gossip", "adaptive-gossip")

    @property
    def is_periodic(self) -> bool:
        """Whether exchanges are made once in a period."""
        return self.is_gossip or self.islands != ""

    @property
    def placement_traffic(self) -> Traffic:
        """Traffic model for the placement."""
        size = 4 * self.parameters if self.islands else self.wire_bytes(self.parameters)
        return Traffic(self.strategy, size, self.ps, self.comm_pattern, islands=self.islands)

    def check_supported(self, ranks: int) -> None:
        """Raise UsageError, which names the option and the valid values, if `ranks` ranks cannot be simulated."""
        strategy, pattern = self.strategy, self.effective_pattern
        strategies = ISLAND_STRATEGIES if self.islands else STRATEGIES
        if self.islands not in ("", "zone"):
            raise UsageError(f"--islands {self.islands}: not supported; expected zone")
        if strategy not in strategies:
            condition = " with --islands" if self.islands else ""
            raise UsageError(f"--strategy {strategy}: not supported{condition}; expected {', '.join(strategies)}")
        patterns = COMM_PATTERNS[strategy]
        if pattern not in patterns:
            raise UsageError(f"--comm-pattern {pattern}: not supported with {strategy}; "
                             f"expected {', '.join(patterns)}")
        if strategy == "ps" and not 0 < self.ps < ranks:
            raise UsageError(f"--ps {self.ps}: expected 1 to {ranks - 1} parameter servers for {ranks} ranks"
                             if ranks > 1 else "--strategy ps: expected at least 2 ranks, a server and a worker")
        if strategy != "ps" and self.ps:
            raise UsageError(f"--ps {self.ps}: {strategy} has no parameter servers; use --strategy ps")
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
                for shard in comm_layout.split_by_speed(self.parameters, [1.0] * self.ps)]

    def make_graph(self, zones: Sequence[str]) -> Graph:
        """Gossip graph; entry i of `zones` is the leaf zone of rank or island i."""
        return GRAPHS[self.effective_pattern](zones, self.seed)

    def cycle_length(self, zones: Sequence[str]) -> int:
        """Exchanges until the messages repeat, or a sample size if they do not."""
        partners = [*dict.fromkeys(zones)] if self.islands else zones
        return (self.make_graph(partners).period or SAMPLED_EXCHANGES) if self.is_gossip else 1


def rank_programs(workload: TrainingWorkload,
                  nodes: Sequence[int], zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    """Actions of each step of each rank; entry i of `nodes` and `zones` belongs to rank i."""
    ranks = range(len(zones))
    if workload.islands:
        return _island_programs(workload, nodes, zones, steps)
    if workload.is_gossip:
        return _gossip_programs(workload, zones, steps)
    if workload.strategy == "ps":
        return [[_ps_program(workload, rank, len(zones))] * steps for rank in ranks]
    groups = group_ranks(ranks, zones) if workload.effective_pattern == "hierarchical" else [ranks]
    uses_direct = _direct_ranks(groups, nodes, zones)
    return [[_allreduce_program(workload, groups, rank, rank in uses_direct)] * steps for rank in ranks]


def _direct_ranks(groups: Sequence[Sequence[int]], nodes: Sequence[int], zones: Sequence[str]) -> set[int]:
    """Ranks of the groups in which the ranks exchange the first buckets directly."""
    return {rank for group in groups if comm_layout.uses_direct_exchange(
        [nodes[i] for i in group], [zones[i] for i in group]) for rank in group}


def message_count(workload: TrainingWorkload, ranks: int, steps: int) -> int:
    """Approximate number of messages of all ranks."""
    if workload.is_gossip and not workload.islands:
        return ranks * (steps // workload.period)
    if workload.strategy == "ps":
        return 2 * workload.ps * (ranks - workload.ps) * steps
    return 2 * ranks * (ranks - 1) * len(workload.gradient_buckets()) * steps


def _gossip_programs(workload: TrainingWorkload, zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    graph, size = workload.make_graph(zones), workload.wire_bytes(workload.parameters)
    programs: list[list[list[Action]]] = [[] for _ in zones]
    for step in range(steps):
        matching = graph.round(step // workload.period) if step % workload.period == workload.period - 1 else None
        for rank, program in enumerate(programs):
            program.append([workload.compute_seconds])
            if matching is not None and matching.target[rank] != rank:
                program[-1].append(([(int(matching.target[rank]), size)], [int(matching.source[rank])]))
    return programs


def _island_programs(workload: TrainingWorkload, nodes: Sequence[int], zones: Sequence[str],
                     steps: int) -> list[list[list[Action]]]:
    """Allreduce of gradients in each zone; once in a period an exchange of shards, and a gathering in each zone."""
    islands = group_ranks(range(len(zones)), zones)
    direct = _direct_ranks(islands, nodes, zones)
    gradients = replace(workload, compression="none")
    pieces = [(part.stop - part.start, holders) for part, holders in
              comm_layout.shard_pieces(workload.parameters, islands)]
    programs: list[list[list[Action]]] = []
    for rank in range(len(zones)):
        island = next(group for group in islands if rank in group)
        step_actions = _allreduce_program(gradients, [island], rank, rank in direct)
        gather = [*_ring_turns([(island, 4.0 * workload.parameters)], rank)]
        programs.append([])
        for step in range(steps):
            exchange: list[Action] = []
            if step % workload.period == workload.period - 1:
                index = step // workload.period
                for elements, holders in pieces:
                    if rank in holders:
                        exchange += _outer_exchange(workload, zones, elements, holders, rank, index)
                exchange += gather if exchange else []
            programs[-1].append([*step_actions, *exchange])
    return programs


def _outer_exchange(workload: TrainingWorkload, zones: Sequence[str], elements: int, holders: Sequence[int],
                    rank: int, index: int) -> list[ExchangeAction]:
    """A rank's exchange of a piece with its other holders."""
    size = workload.wire_bytes(elements)
    if workload.strategy == "local-sgd":
        ring: list[Ring] = [(holders, size)]
        scatter = _direct if workload.compression != "none" else _ring_turns
        return [*scatter(ring, rank), *_ring_turns(ring, rank)]
    matching = workload.make_graph([zones[holder] for holder in holders]).round(index)
    own = holders.index(rank)
    target, source = int(matching.target[own]), int(matching.source[own])
    return [] if target == own else [([(holders[target], size)], [holders[source]])]


def _ps_program(workload: TrainingWorkload, rank: int, ranks: int) -> list[Action]:
    """Workers push and pull concurrently; a server answers after the pushes of all workers."""
    servers, workers, sizes = range(workload.ps), range(workload.ps, ranks), workload.shard_bytes()
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
