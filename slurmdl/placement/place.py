"""The one decision: nodes and rank map for a job, from values alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.network.model import LinkScores
from slurmdl.placement.choice.bound import bound
from slurmdl.placement.choice.choose import Choice, Start, choices, crossed, starts
from slurmdl.placement.choice.crossed import choices as by_counts
from slurmdl.placement.choice.exchange import exchanges
from slurmdl.placement.choice.uneven import uneven
from slurmdl.placement.label import label
from slurmdl.placement.model import Candidate, Placement
from slurmdl.placement.nodes import impossible
from slurmdl.placement.nodes.eligible import Eligible, eligible, partitions
from slurmdl.placement.nodes.pool import IntArray, Pool
from slurmdl.placement.nodes.pool import pool as pool_of
from slurmdl.placement.ranks.rankmap import Orders
from slurmdl.placement.shape import Shape, deal, shape
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.request import JobRequest
from slurmdl.topology.model import Topology

#: most zones that are listed as too small
MAX_REFUSED = 4
#: tasks of all choices that are compared for those who read what lost, where they cannot win
MAX_SCORED_TASKS = 2048
#: how many times as many where they can at most take the same time
MAX_TIES = 2
#: choices by counts are scored up to so many times the least time, by their own figures
ALMOST = 2.0
#: tasks above which only the best of them is scored, and the plain choices are tried in so few zones
MAX_TASKS, MAX_PLAIN = 256, 1
#: where counts do not tell the time: exchanges of a node in a round, rounds, and most tasks of such a job
MAX_EXCHANGES, MAX_ROUNDS, MAX_EXCHANGED = 32, 4, 64
#: slow ways between zones that are avoided one after the other
MAX_DETOURS = 4


def place(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          matrices: tuple[npt.NDArray[np.float64], ...] = ()) -> Placement:
    """The nodes that serve the job best, and the rank map that it gets on exactly these.

    Every choice that may win is scored with its own rank map; the least cost wins, then the fewest zones, then
    the least Slurm weight, then the tightest fit. Where too few nodes are free now, the choice is made among the
    nodes that fit once they are idle, and `free_now` is false.

    Parameters
    ----------
    matrices : the user's own traffic, see traffic.Traffic.

    Raises
    ------
    PlacementError : no choice is possible or it would be a guess; the text says why.
    UsageError : a zone of --dl-zone does not exist.
    """
    if request.unpinnable:
        raise PlacementError(request.unpinnable)
    if request.nodelist:
        raise PlacementError("-w is given: the nodes are chosen already")
    job, traffic = shape(request), Traffic.of(request.dl, matrices)
    impossible.refuse(job, cluster, topology)
    instance = _Instance(request, cluster, topology, scores, job, traffic, traffic.phases(job.tasks))
    refusal = ""
    for free_now in (True, False):
        for partition in partitions(request, cluster) or (None,):
            found = eligible(request, cluster, partition)
            try:
                return instance.best(found.now if free_now else found.once_idle, free_now)
            except PlacementError as error:
                refusal = _why(error, found)
    raise PlacementError(refusal)


def _why(error: PlacementError, found: Eligible) -> str:
    refused = ", ".join(f"{count} {why}" for why, count in found.refused.items())
    return f"{error}{f'; refused: {refused}' if refused else ''}"


@dataclass(frozen=True)
class _Scored:
    """One choice of nodes with the orders of the ranks that it leads to."""

    choice: Choice
    nodes: tuple[str, ...]
    zones: Counter[str]
    ranks: Orders
    weight: int

    @property
    def key(self) -> tuple[tuple[float, ...], int, int, int]:
        """Sort key; the names of its parts stand in `verdict`."""
        return self.ranks.cost.key, len(self.zones), self.weight, self.choice.left

    def verdict(self, winner: _Scored) -> str:
        """Why this choice lost."""
        seconds, least = self.ranks.cost.key[0], winner.ranks.cost.key[0]
        if seconds > least:
            return f"{seconds / least:.3g} times the time per iteration" if least else "slower"
        names = ("more bytes", "more zones", "a higher Slurm weight", "leaves a larger rest of the zone unused")
        return next((name for name, mine, best in zip(names, self.key, winner.key, strict=True) if mine != best),
                    "the same cost, less even" if self.choice.zone == winner.choice.zone
                    else "the same cost, later in the order of the topology")


@dataclass(frozen=True)
class _Instance:
    """One job on one cluster."""

    request: JobRequest
    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores
    job: Shape
    traffic: Traffic
    phases: list[Phase]

    def best(self, room: IntArray, free_now: bool) -> Placement:
        """The best choice among the nodes with room for their tasks.

        Parameters
        ----------
        room : shape (nodes of the cluster,), tasks that each node can take.

        Raises
        ------
        PlacementError : no zone has enough of them.
        """
        pool = self.pool(np.where(room >= self.job.most_per_node, room, 0))
        whole = pool
        if not (pool.size >= self.job.nodes).any() and not self.request.ntasks_per_node:
            # nodes with less room than an even share serve where others have more
            all_nodes = self.pool(room)
            scored = [self.scored(all_nodes, choice) for choice in uneven(all_nodes, self.job)]
        else:
            scored = []
        even = not scored
        scored = scored or self.compared(pool)
        winner = min(scored, key=lambda entry: entry.key)
        if even:
            pool, winner, more = self.around(pool, winner)
            scored += more
        if even and not self.traffic.counted and self.request.dl.place == "pack" and self.job.tasks <= MAX_EXCHANGED:
            winner = self.exchanged(pool, winner)
        ranks = winner.ranks.best()
        # of choices with the same nodes per zone the first one tells enough
        losers = {label(entry.zones): entry for entry in reversed(scored) if entry.zones != winner.zones}
        lost = [Candidate(name, entry.verdict(winner), entry.ranks.cost) for name, entry in reversed(losers.items())]
        least = bound(whole, self.job, self.phases, ranks.cost.seconds) if even and self.has_bound else None
        return Placement(
            winner.nodes, ranks, {name: self.topology.path(name) for name in winner.nodes},
            dict(winner.zones), free_now,
            (Candidate(label(winner.zones), "chosen", ranks.cost), *lost, *self.too_small(whole)),
            self.reason(pool, winner, free_now), least.seconds if least else None, least.basis if least else "")

    @property
    def has_bound(self) -> bool:
        """Whether the phases say all: not where they follow the zones, or are what the user gave."""
        return not self.traffic.follows_zones and not self.traffic.matrices

    def pool(self, room: IntArray) -> Pool:
        dl = self.request.dl
        # Slurm does not join trees that no switch connects
        joined = self.topology.kind != "tree" or dl.place == "spread"
        return pool_of(self.cluster, self.topology, self.scores, room, dl.zone, joined, self.request.seed)

    def compared(self, pool: Pool) -> list[_Scored]:
        """The choices that may win, and a few more for those who read what lost."""
        wanted = self.job.nodes
        if not (pool.size >= wanted).any():
            most = int(pool.size.argmax()) if len(pool.zone) else -1
            largest = f" (the most: {pool.size[most]} in {self.name(pool, most)})" if most >= 0 else ""
            raise PlacementError(f"no zone has {wanted} fitting nodes{largest}")
        found: list[_Scored] = []
        seen: set[tuple[bytes, int]] = set()
        for start, choice in self.ways(pool):
            least = min((entry.ranks.cost.key[0] for entry in found), default=np.inf)
            # of choices that no figure tells apart one is enough
            nodes = pool.signature(choice.nodes), choice.left
            spent = len(found) * self.job.tasks / MAX_SCORED_TASKS
            hopeless = start.seconds > least if spent <= MAX_TIES else start.seconds >= least
            if nodes in seen or (spent > 1 and hopeless):
                continue
            seen.add(nodes)
            found.append(self.scored(pool, choice))
        return found

    def ways(self, pool: Pool) -> Iterator[tuple[Start, Choice]]:
        """The choices that may win, each with the zone that it was made in."""
        place, wanted = self.request.dl.place, self.job.nodes
        promising = starts(pool, self.job, place, self.phases, self.traffic.follows_zones)
        if place == "pack" and crossed(self.phases):
            large = self.job.tasks > MAX_TASKS
            yield from by_counts(pool, self.job, promising, self.phases, 1.0 if large else ALMOST)
            promising = promising[:MAX_PLAIN] if large else promising
        for start in promising:
            for choice in choices(pool, start, wanted, place):
                yield start, choice

    def around(self, pool: Pool, best: _Scored) -> tuple[Pool, _Scored, list[_Scored]]:
        """The choice without one of two zones with a slow way between them, while that is better.

        Returns
        -------
        the pool that the choice was made in, the choice, and all others that were compared.
        """
        others: list[_Scored] = []
        for _ in range(MAX_DETOURS):
            slow, busiest = best.ranks.network.trunks, best.ranks.cost.busiest
            if not slow.names:
                break
            tried = []
            for name in (busiest if busiest in slow.names else slow.names[int(slow.delay.argmax())]).split("|"):
                leaf = self.topology.zone_index[name]
                left = np.flatnonzero(pool.zone[pool.leaf] != leaf)
                room = np.zeros(len(self.cluster.names), np.int64)
                room[pool.node[left]] = pool.room[left]
                rest = self.pool(room)
                if (rest.size >= self.job.nodes).any():
                    tried += [(rest, entry) for entry in self.compared(rest)]
            others += [entry for _, entry in tried]
            rest, better = min(tried, key=lambda entry: entry[1].key, default=(pool, best))
            if better.key >= best.key:
                break
            pool, best = rest, better
        return pool, best, others

    def exchanged(self, pool: Pool, best: _Scored) -> _Scored:
        """The choice after exchanges of one node for another, the best of each round, while one helps."""
        for _ in range(MAX_ROUNDS):
            found = [self.scored(pool, choice) for choice in islice(exchanges(pool, best.choice), MAX_EXCHANGES)]
            better = min(found, key=lambda entry: entry.key, default=best)
            if better.key >= best.key:
                break
            best = better
        return best

    def scored(self, pool: Pool, choice: Choice) -> _Scored:
        """A choice with its rank map; Slurm deals the tasks to the nodes in the order of the snapshot."""
        nodes = choice.nodes[np.argsort(pool.node[choice.nodes])]
        names = [self.cluster.names[i] for i in pool.node[nodes].tolist()]
        room = pool.room[nodes]
        tasks = [self.job.tasks_of(i) for i in range(len(names))] if room.min() >= self.job.most_per_node else \
            deal(room.tolist(), self.job.tasks)
        ranks = Orders(list(zip(names, tasks, strict=True)), self.topology, self.scores, self.traffic,
                       self.request.dl.rank0)
        zones = Counter({self.name(pool, leaf): count
                         for leaf, count in enumerate(np.bincount(pool.leaf[nodes]).tolist()) if count})
        return _Scored(choice, tuple(names), zones, ranks, int(pool.weight[nodes].sum()))

    def name(self, pool: Pool, zone: int) -> str:
        index = int(pool.zone[zone])
        return self.topology.zones[index] if index >= 0 else "the whole cluster"

    def too_small(self, pool: Pool) -> Iterator[Candidate]:
        """The largest zones among those that have some fitting nodes, but not enough."""
        small = np.argsort(-np.where(pool.size < self.job.nodes, pool.size, 0), kind="stable")[:MAX_REFUSED]
        for zone in small:
            if pool.size[zone] < self.job.nodes:
                yield Candidate(self.name(pool, zone), f"too small, {pool.size[zone]} of {self.job.nodes} nodes fit")

    def reason(self, pool: Pool, winner: _Scored, free_now: bool) -> str:
        zone = self.name(pool, winner.choice.zone)
        if len(winner.zones) == 1:
            text = f"zone {zone} holds all nodes"
        elif self.request.dl.place == "spread":
            text = f"spread over {label(winner.zones)}"
        elif winner.choice.smallest:
            text = f"no smaller zone than {zone} holds all nodes; below it {label(winner.zones)}"
        else:
            text = f"{label(winner.zones)} below {zone} take less time than any smaller zone"
        return text if free_now else f"{text}; not all of them are free now"
