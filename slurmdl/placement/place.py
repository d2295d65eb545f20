"""The one decision: nodes and rank map for a job, from values alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.network import capacity
from slurmdl.network.model import LinkScores
from slurmdl.placement.choose import Choice, IntArray, allowed, choices, count_below
from slurmdl.placement.eligible import Eligible, eligible, partitions
from slurmdl.placement.label import label
from slurmdl.placement.model import Candidate, Placement, RankMap
from slurmdl.placement.rankmap import rank_map
from slurmdl.placement.shape import Shape, shape
from slurmdl.placement.traffic import Traffic
from slurmdl.request import JobRequest
from slurmdl.topology.model import Topology

#: most zones that are listed as too small
MAX_REFUSED = 4


def place(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          matrices: tuple[npt.NDArray[np.float64], ...] = ()) -> Placement:
    """The nodes that serve the job best, and the rank map that it gets on exactly these.

    Every zone that fits is scored with its own rank map; the least cost wins, then the fewest zones, then the
    least Slurm weight, then the tightest fit. Where too few nodes are free now, the choice is made among the
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
    if not topology.zones:
        raise PlacementError("the topology has no zones")
    instance = _Instance(request, cluster, topology, scores, shape(request), Traffic.of(request.dl, matrices))
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
    """One choice of nodes with the rank map that it leads to."""

    choice: Choice
    nodes: tuple[str, ...]
    zones: Counter[str]
    ranks: RankMap
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

    def best(self, room: IntArray, free_now: bool) -> Placement:
        """The best choice among the nodes with room for their tasks.

        Parameters
        ----------
        room : shape (nodes of the cluster,), tasks that each node can take.

        Raises
        ------
        PlacementError : no zone has enough of them.
        """
        pool = self.pool(np.flatnonzero(room >= self.job.most_per_node))
        scored = list(self.scored(pool))
        winner = min(scored, key=lambda entry: entry.key)
        lost = [Candidate(label(entry.zones), entry.verdict(winner), entry.ranks.cost)
                for entry in scored if entry is not winner]
        return Placement(
            winner.nodes, winner.ranks, {name: self.topology.path(name) for name in winner.nodes},
            dict(winner.zones), free_now,
            (Candidate(label(winner.zones), "chosen", winner.ranks.cost), *lost, *self.too_small(pool)),
            self.reason(winner, free_now))

    def pool(self, fitting: IntArray) -> IntArray:
        """Indices in the topology of the fitting nodes, by Slurm's weight, the best link, then Slurm's order."""
        inside = allowed(self.topology, self.request.dl.zone)
        nodes = [self.cluster.nodes[i] for i in fitting]
        quality, _ = capacity.node_links([node.name for node in nodes], self.scores)
        ranked = np.lexsort((-quality, np.array([node.weight for node in nodes], np.int64)))
        index = [self.topology.node_index.get(nodes[i].name, -1) for i in ranked]
        return np.array([i for i in index if i >= 0 and inside[i]], np.int64)

    def scored(self, pool: IntArray) -> Iterator[_Scored]:
        order = {node.name: i for i, node in enumerate(self.cluster.nodes)}
        for choice in choices(self.topology, pool, self.job.nodes, self.request.dl.place):
            names = sorted((self.topology.nodes[i] for i in choice.nodes), key=order.__getitem__)
            slots = [(name, self.job.tasks_of(i)) for i, name in enumerate(names)]
            ranks = rank_map(slots, self.topology, self.scores, self.traffic)
            yield _Scored(choice, tuple(names), Counter(self.topology.leaf_of(name) for name in names), ranks,
                          sum(self.cluster.node[name].weight for name in names))

    def too_small(self, pool: IntArray) -> list[Candidate]:
        """The largest zones among those that have some fitting nodes, but not enough."""
        free, wanted = count_below(self.topology, pool), self.job.nodes
        small = [zone for zone in np.argsort(-free, kind="stable") if 0 < free[zone] < wanted]
        return [Candidate(self.topology.zones[zone], f"too small, {free[zone]} of {wanted} nodes fit")
                for zone in small[:MAX_REFUSED]]

    def reason(self, winner: _Scored, free_now: bool) -> str:
        zone = self.topology.zones[winner.choice.zone]
        if len(winner.zones) == 1:
            text = f"zone {zone} holds all nodes"
        elif self.request.dl.place == "spread":
            text = f"spread over {label(winner.zones)}"
        else:
            text = f"no smaller zone than {zone} holds all nodes; below it {label(winner.zones)}"
        return text if free_now else f"{text}; not all of them are free now"
