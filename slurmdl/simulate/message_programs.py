"""Messages of each rank in each step, as the strategies of slurmdl.train send them.

Follows train.mixing.collectives and train.strategies.allreduce, gossip, islands and parameter_server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slurmdl import comm_layout
from slurmdl.plan import group_ranks
from slurmdl.simulate.workload import TrainingWorkload

ExchangeAction = tuple[list[tuple[int, int]], list[int]]  # concurrent sends (rank, bytes) and receives (rank)
Action = float | ExchangeAction  # seconds from the start of the step until which the rank computes, or an exchange
Ring = tuple[Sequence[int], float]  # ranks of a ring, and bytes of the vector that they reduce


def rank_programs(workload: TrainingWorkload,
                  nodes: Sequence[int], zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    """Actions of each step of each rank; entry i of `nodes` and `zones` belongs to rank i."""
    ranks = range(len(zones))
    if workload.inside:
        return _island_programs(workload, nodes, zones, steps)
    if workload.is_gossip:
        return _gossip_programs(workload, zones, steps)
    if workload.strategy == "ps":
        return [[_ps_program(workload, rank, len(zones))] * steps for rank in ranks]
    groups = group_ranks(ranks, zones) if workload.effective_pattern == "hierarchical" else [ranks]
    uses_direct = _direct_ranks(groups, nodes, zones)
    return [[_allreduce_program(workload, groups, rank, rank in uses_direct)] * steps for rank in ranks]


def _direct_ranks(groups: Sequence[Sequence[int]], nodes: Sequence[int], zones: Sequence[str]) -> set[int]:
    """Ranks of the groups whose ranks exchange the first buckets directly."""
    return {rank for group in groups if comm_layout.uses_direct_exchange(
        [nodes[i] for i in group], [zones[i] for i in group]) for rank in group}


def message_count(workload: TrainingWorkload, ranks: int, steps: int) -> int:
    """Approximate number of messages of all ranks."""
    if workload.is_gossip and not workload.inside:
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
