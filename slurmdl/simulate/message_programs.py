"""What each rank sends and receives in each step, message by message, as the strategies of slurmdl.train do it.

Traffic inside a step follows train.mixing.sums.Sum, train.strategies.allreduce, gossip and servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from slurmdl import comm_layout
from slurmdl.plan import group_ranks
from slurmdl.simulate.workload import TrainingWorkload

#: what is sent to whom, and from whom something comes, all at once
ExchangeAction = tuple[list[tuple[int, int]], list[int]]
#: seconds after the begin of the step until which is waited, or an exchange
Action = float | ExchangeAction
#: the ranks of a ring, and the bytes of the vector that is summed round it
Ring = tuple[Sequence[int], float]


def rank_programs(workload: TrainingWorkload,
                  nodes: Sequence[int], zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    """For each rank its steps, each a list of actions; entry i of `nodes` and `zones` is that of rank i."""
    ranks = range(len(zones))
    if workload.is_gossip:
        return _gossip_programs(workload, zones, steps)
    if workload.strategy == "ps":
        return [[_ps_program(workload, rank, len(zones))] * steps for rank in ranks]
    groups = group_ranks(ranks, zones) if workload.effective_pattern == "hierarchical" else [ranks]
    meet = {rank: comm_layout.uses_direct_exchange([nodes[its] for its in group], [zones[its] for its in group])
            for group in groups for rank in group}
    return [[_allreduce_program(workload, groups, rank, meet[rank])] * steps for rank in ranks]


def message_count(workload: TrainingWorkload, ranks: int, steps: int) -> int:
    """Messages of all ranks, about."""
    if workload.is_gossip:
        return ranks * (steps // workload.period)
    if workload.strategy == "ps":
        return 2 * workload.ps * (ranks - workload.ps) * steps
    return 2 * ranks * (ranks - 1) * len(workload.gradient_buckets()) * steps


def _gossip_programs(workload: TrainingWorkload, zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    graph, size = workload.make_graph(zones), round(workload.wire_bytes(workload.parameters))
    found: list[list[list[Action]]] = [[] for _ in zones]
    for step in range(steps):
        turn = graph.round(step // workload.period) if step % workload.period == workload.period - 1 else None
        for rank, program in enumerate(found):
            program.append([workload.compute_seconds])
            if turn is not None and turn.target[rank] != rank:
                program[-1].append(([(int(turn.target[rank]), size)], [int(turn.source[rank])]))
    return found


def _ps_program(workload: TrainingWorkload, rank: int, ranks: int) -> list[Action]:
    """Workers push and pull at once; a server answers when it has what all have pushed."""
    servers, workers = range(workload.ps), range(workload.ps, ranks)
    sizes = [round(workload.wire_bytes(shard)) for shard in workload.shard_sizes()]
    if rank in servers:
        return [([], list(workers)), ([(worker, sizes[rank]) for worker in workers], [])]
    return [workload.compute_seconds, ([(server, sizes[server]) for server in servers], list(servers))]


def _allreduce_program(workload: TrainingWorkload,
                       groups: Sequence[Sequence[int]], rank: int, uses_direct: bool) -> list[Action]:
    """Bucket after bucket: reduce-scatter inside the group, shards between the groups and back, allgather inside."""
    found: list[Action] = []
    for start, elements, ready in workload.gradient_buckets():
        inward = _direct if uses_direct and start < comm_layout.DIRECT_ELEMENTS else _ring_turns
        inside: list[Ring] = [(group, workload.wire_bytes(elements)) for group in groups if rank in group]
        between: list[Ring] = []
        borders = sorted({elements * place // len(group) for group in groups for place in range(len(group) + 1)})
        for begin, end in pairwise(borders):
            holders = [group[bisect_right([elements * place // len(group) for place in range(len(group) + 1)],
                                          begin) - 1] for group in groups]
            if rank in holders:
                between.append((holders, workload.wire_bytes(end - begin)))
        found += [ready, *inward(inside, rank), *_ring_turns(between, rank), * \
                                 _ring_turns(between, rank), *inward(inside, rank)]
    return [*found, workload.compute_seconds]


def _ring_turns(rings: Sequence[Ring], rank: int) -> Iterator[ExchangeAction]:
    """The turns of rings that turn together: each rank passes a part to its right, and receives one from its left."""
    for _ in range(len(rings[0][0]) - 1 if rings else 0):
        sends, receives = [], []
        for ring, size in rings:
            place = ring.index(rank)
            sends.append((ring[(place + 1) % len(ring)], round(size / len(ring))))
            receives.append(ring[place - 1])
        yield sends, receives


def _direct(rings: Sequence[Ring], rank: int) -> Iterator[ExchangeAction]:
    """One turn, in which each rank sends a part to all others of its ring."""
    others = [(peer, round(size / len(ring))) for ring, size in rings for peer in ring if peer != rank]
    if others:
        yield others, [peer for peer, _ in others]
