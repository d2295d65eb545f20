"""What each rank sends and receives in each step, message by message, as the strategies of slurmdl.train do it.

Traffic inside a step follows train.mixing.sums.Sum, train.strategies.allreduce, gossip and servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from slurmdl import buckets
from slurmdl.plan import by_zone
from slurmdl.simulate.training import Training

#: what is sent to whom, and from whom something comes, all at once
Exchange = tuple[list[tuple[int, int]], list[int]]
#: seconds after the begin of the step until which is waited, or an exchange
Action = float | Exchange
#: the ranks of a ring, and the bytes of the vector that is summed round it
Ring = tuple[Sequence[int], float]


def programs(training: Training, nodes: Sequence[int], zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    """For each rank its steps, each a list of actions; entry i of `nodes` and `zones` is that of rank i."""
    ranks = range(len(zones))
    if training.gossips:
        return _gossip(training, zones, steps)
    if training.strategy == "ps":
        return [[_shard(training, rank, len(zones))] * steps for rank in ranks]
    groups = by_zone(ranks, zones) if training.pattern == "hierarchical" else [ranks]
    meet = {rank: buckets.meet([nodes[its] for its in group], [zones[its] for its in group])
            for group in groups for rank in group}
    return [[_sums(training, groups, rank, meet[rank])] * steps for rank in ranks]


def count(training: Training, ranks: int, steps: int) -> int:
    """Messages of all ranks, about."""
    if training.gossips:
        return ranks * (steps // training.period)
    if training.strategy == "ps":
        return 2 * training.ps * (ranks - training.ps) * steps
    return 2 * ranks * (ranks - 1) * len(training.buckets()) * steps


def _gossip(training: Training, zones: Sequence[str], steps: int) -> list[list[list[Action]]]:
    graph, size = training.graph(zones), round(training.bytes(training.parameters))
    found: list[list[list[Action]]] = [[] for _ in zones]
    for step in range(steps):
        turn = graph.round(step // training.period) if step % training.period == training.period - 1 else None
        for rank, program in enumerate(found):
            program.append([training.compute])
            if turn is not None and turn.target[rank] != rank:
                program[-1].append(([(int(turn.target[rank]), size)], [int(turn.source[rank])]))
    return found


def _shard(training: Training, rank: int, ranks: int) -> list[Action]:
    """Workers push and pull at once; a server answers when it has what all have pushed."""
    servers, workers = range(training.ps), range(training.ps, ranks)
    sizes = [round(training.bytes(shard)) for shard in training.shards()]
    if rank in servers:
        return [([], list(workers)), ([(worker, sizes[rank]) for worker in workers], [])]
    return [training.compute, ([(server, sizes[server]) for server in servers], list(servers))]


def _sums(training: Training, groups: Sequence[Sequence[int]], rank: int, meet: bool) -> list[Action]:
    """Bucket after bucket: reduce-scatter inside the group, shards between the groups and back, allgather inside."""
    found: list[Action] = []
    for start, elements, ready in training.buckets():
        inward = _at_once if meet and start < buckets.AT_ONCE else _round
        inside: list[Ring] = [(group, training.bytes(elements)) for group in groups if rank in group]
        between: list[Ring] = []
        borders = sorted({elements * place // len(group) for group in groups for place in range(len(group) + 1)})
        for begin, end in pairwise(borders):
            holders = [group[bisect_right([elements * place // len(group) for place in range(len(group) + 1)],
                                          begin) - 1] for group in groups]
            if rank in holders:
                between.append((holders, training.bytes(end - begin)))
        found += [ready, *inward(inside, rank), *_round(between, rank), *_round(between, rank), *inward(inside, rank)]
    return [*found, training.compute]


def _round(rings: Sequence[Ring], rank: int) -> Iterator[Exchange]:
    """The turns of rings that turn together: each rank passes a part to its right, and receives one from its left."""
    for _ in range(len(rings[0][0]) - 1 if rings else 0):
        sends, receives = [], []
        for ring, size in rings:
            place = ring.index(rank)
            sends.append((ring[(place + 1) % len(ring)], round(size / len(ring))))
            receives.append(ring[place - 1])
        yield sends, receives


def _at_once(rings: Sequence[Ring], rank: int) -> Iterator[Exchange]:
    """One turn, in which each rank sends a part to all others of its ring."""
    others = [(peer, round(size / len(ring))) for ring, size in rings for peer in ring if peer != rank]
    if others:
        yield others, [peer for peer, _ in others]
