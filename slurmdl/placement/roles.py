"""Which nodes hold the parameter servers.

The cost of synchronous parameter-server traffic depends only on how many servers and workers stand below each
link. So the state that is searched is the number of servers per leaf zone: every split of the servers over the
zones where there are few, else moves of one server at a time from several starting points. Inside a zone the
servers go to the best links, one to a node as long as there are nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl.placement.cost import IntArray, Links, cost
from slurmdl.placement.model import Cost
from slurmdl.placement.traffic import Phase

#: most splits that are tried one by one
MAX_SPLITS = 256
#: most rounds of moves
MAX_ROUNDS = 64
#: most moves of a server between two nodes in a round
MAX_MOVES = 512


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
    servers = search.spread_in_zones(search.best_split())
    return search.move_between_nodes(servers) if ps * len(tasks) <= MAX_MOVES else servers


class _Search:
    """The splits of one job's servers over its zones, and what each costs."""

    def __init__(self, network: Links, tasks: IntArray, traffic: Sequence[Phase], ps: int) -> None:
        self.network, self.tasks, self.traffic, self.ps = network, tasks, traffic, ps
        self.zones, self.zone = np.unique(network.leaf, return_inverse=True)
        self.room = np.bincount(self.zone, tasks).astype(np.int64)
        # the order in which a zone's nodes take servers: one each on the best links, then a second each, ...
        quality = np.argsort(-network.node_capacity, kind="stable")
        self.turns = []
        for z in range(len(self.zones)):
            nodes = quality[self.zone[quality] == z]
            self.turns.append(np.array([node for turn in range(int(tasks[nodes].max()))
                                        for node in nodes if tasks[node] > turn], np.int64))

    def spread_in_zones(self, split: tuple[int, ...]) -> IntArray:
        taken = np.concatenate([turns[:count] for turns, count in zip(self.turns, split, strict=True)])
        return np.bincount(taken, minlength=len(self.tasks)).astype(np.int64)

    def key(self, servers: IntArray) -> tuple[float, ...]:
        """Sort key: the cost, then the servers that share a node with another."""
        return (*self.cost(servers).key, float((servers - 1).clip(min=0).sum()))

    def cost(self, servers: IntArray) -> Cost:
        everyone = np.arange(len(self.tasks))
        place = np.concatenate([np.repeat(everyone, servers), np.repeat(everyone, self.tasks - servers)])
        return cost(self.traffic, self.network, place)

    def best_split(self) -> tuple[int, ...]:
        """Servers per zone, the best that is found."""
        splits = list(_splits(self.ps, self.room.tolist(), MAX_SPLITS + 1))
        if len(splits) <= MAX_SPLITS:
            return min(splits, key=lambda split: self.key(self.spread_in_zones(split)))
        return min((self._moved(start) for start in (self._fill(), self._proportional())),
                   key=lambda split: self.key(self.spread_in_zones(split)))

    def _fill(self) -> tuple[int, ...]:
        """All in the largest zone, what does not fit in the next, and so on."""
        split, left = [0] * len(self.room), self.ps
        for z in np.argsort(-self.room, kind="stable"):
            split[z] = min(left, int(self.room[z]))
            left -= split[z]
        return tuple(split)

    def _proportional(self) -> tuple[int, ...]:
        """In proportion to the tasks of each zone, by largest remainder."""
        exact = self.ps * self.room / self.room.sum()
        split = exact.astype(np.int64)
        split[np.argsort(split - exact, kind="stable")[:self.ps - int(split.sum())]] += 1
        return tuple(split.tolist())

    def _moved(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """Moves of one server between zones, from or to the zones that matter most, until none helps."""
        best = self.key(self.spread_in_zones(split))
        for _ in range(MAX_ROUNDS):
            givers = sorted((z for z in range(len(split)) if split[z]), key=lambda z: -split[z])[:8]
            takers = sorted((z for z in range(len(split)) if split[z] < self.room[z]),
                            key=lambda z: split[z] - int(self.room[z]))[:8]
            moves = [tuple(count - (z == giver) + (z == taker) for z, count in enumerate(split))
                     for giver in givers for taker in takers if giver != taker]
            found = min(((self.key(self.spread_in_zones(move)), move) for move in moves), default=(best, split))
            if found[0] >= best:
                break
            best, split = found
        return split

    def move_between_nodes(self, servers: IntArray) -> IntArray:
        """Moves of one server between any two nodes, until none helps."""
        best = self.key(servers)
        for _ in range(MAX_ROUNDS):
            moves = []
            for giver in np.flatnonzero(servers):
                for taker in np.flatnonzero(servers < self.tasks):
                    if giver != taker:
                        move = servers.copy()
                        move[giver] -= 1
                        move[taker] += 1
                        moves.append((self.key(move), move))
            if not moves:
                break
            key, move = min(moves, key=lambda found: found[0])
            if key >= best:
                break
            best, servers = key, move
        return servers


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
