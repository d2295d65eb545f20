"""Which nodes hold the parameter servers.

The cost of synchronous parameter-server traffic depends only on how many servers and workers stand below each
link. So the state that is searched is the number of servers per leaf zone: every split of the servers over the
zones where there are few, else moves of one server at a time from several starting points. Inside a zone the
servers go to the best links, one to a node as long as there are nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from slurmdl.placement.cost import FloatArray, IntArray, Links, role_costs
from slurmdl.placement.traffic import Phase

#: most splits that are tried one by one
MAX_SPLITS = 512
#: most rounds of moves
MAX_ROUNDS = 64
#: most zones that give, and that take, a server in a round
MAX_ENDS = 8
#: most moves of a server between two nodes in a round
MAX_MOVES = 1024


def servers_per_node(network: Links, tasks: IntArray, traffic: Sequence[Phase], ps: int) -> IntArray:
    """How many of each node's tasks are parameter servers.

    Parameters
    ----------
    tasks : shape (nodes,), tasks per node.
    traffic : phases whose ranks below `ps` are the servers.

    Returns
    -------
    shape (nodes,), sum `ps`, at most `tasks`.
    """
    search = _Search(network, tasks, traffic, ps)
    servers = search.over_zones()
    return search.over_nodes(servers) if ps * len(tasks) <= MAX_MOVES else servers


class _Search:
    """The ways to deal out one job's servers, and what each costs."""

    def __init__(self, network: Links, tasks: IntArray, traffic: Sequence[Phase], ps: int) -> None:
        self.network, self.tasks, self.traffic, self.ps = network, tasks, traffic, ps
        zones, self.zone = np.unique(network.leaf, return_inverse=True)
        self.room = np.bincount(self.zone, tasks, len(zones)).astype(np.int64)
        # turn of each task within its zone: one of each node on the best links, then a second of each, ...
        node = np.repeat(np.arange(len(tasks)), tasks)
        second = np.arange(len(node)) - np.repeat(np.cumsum(tasks) - tasks, tasks)
        order = np.lexsort((node, -network.node_capacity[node], second, self.zone[node]))
        self.node = node[order]
        self.task_zone = self.zone[self.node]
        self.turn = np.arange(len(node)) - (np.cumsum(self.room) - self.room)[self.task_zone]

    def spread(self, splits: IntArray) -> IntArray:
        """Servers per node for servers per zone: (ways, zones) -> (ways, nodes)."""
        rows, taken = np.nonzero(self.turn < splits[:, self.task_zone])
        servers = np.zeros((len(splits), len(self.tasks)), np.int64)
        np.add.at(servers, (rows, self.node[taken]), 1)
        return servers

    def keys(self, servers: IntArray) -> FloatArray:
        """Shape (ways, 4): the cost, then the servers that share a node with another; free of rounding noise."""
        costs = role_costs(self.traffic, self.network, servers, self.tasks - servers)
        crowded = (servers - 1).clip(min=0).sum(axis=1)
        fraction, exponent = np.frexp(np.column_stack([costs, crowded]))
        return np.asarray(np.ldexp(np.round(fraction * 2**30), exponent))

    def best(self, servers: IntArray) -> int:
        """Index of the best way, the first one where several are."""
        return int(np.lexsort(self.keys(servers).T[::-1])[0])

    def over_zones(self) -> IntArray:
        """The best split over the leaf zones that is found, spread over the nodes."""
        splits = np.array(list(_splits(self.ps, self.room.tolist(), MAX_SPLITS + 1)), np.int64)
        if len(splits) > MAX_SPLITS:
            splits = np.stack([self.moved(start) for start in (self.filled(), self.proportional())])
        servers = self.spread(splits)
        return np.asarray(servers[self.best(servers)])

    def filled(self) -> IntArray:
        """All in the largest zone, what does not fit in the next, and so on."""
        order = np.argsort(-self.room, kind="stable")
        before = np.cumsum(self.room[order]) - self.room[order]
        split = np.zeros_like(self.room)
        split[order] = np.clip(self.ps - before, 0, self.room[order])
        return split

    def proportional(self) -> IntArray:
        """In proportion to the tasks of each zone, by largest remainder."""
        exact = self.ps * self.room / self.room.sum()
        split: IntArray = exact.astype(np.int64)
        split[np.argsort(split - exact, kind="stable")[:self.ps - int(split.sum())]] += 1
        return split

    def moved(self, split: IntArray) -> IntArray:
        """Moves of one server between the zones with most servers and those with most room, until none helps."""
        for _ in range(MAX_ROUNDS):
            givers = [z for z in np.argsort(-split, kind="stable") if split[z]][:MAX_ENDS]
            takers = [z for z in np.argsort(split - self.room, kind="stable") if split[z] < self.room[z]][:MAX_ENDS]
            moves = np.array([split, *_moves(split, givers, takers)])
            servers = self.spread(moves)
            best = self.best(servers)
            if not best:
                break
            split = moves[best]
        return split

    def over_nodes(self, servers: IntArray) -> IntArray:
        """Moves of one server between any two nodes, until none helps."""
        for _ in range(MAX_ROUNDS):
            moves = np.array([servers, *_moves(servers, np.flatnonzero(servers),
                                               np.flatnonzero(servers < self.tasks))])
            best = self.best(moves)
            if not best:
                break
            servers = moves[best]
        return servers


def _moves(counts: IntArray, givers: Iterable[int], takers: Sequence[int] | IntArray) -> Iterator[IntArray]:
    """The counts after each move of one unit."""
    for giver in givers:
        for taker in takers:
            if giver != taker:
                move = counts.copy()
                move[giver] -= 1
                move[taker] += 1
                yield move


def _splits(total: int, room: list[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Ways to put `total` over parts with so much room each, at most `limit` of them."""
    def extend(done: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        if len(done) == len(room):
            if not left:
                yield done
            return
        behind = sum(room[len(done) + 1:])
        for count in range(max(0, left - behind), min(left, room[len(done)]) + 1):
            yield from extend((*done, count), left - count)

    for number, split in enumerate(extend((), total)):
        if number == limit:
            return
        yield split
