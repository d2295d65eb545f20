"""The one decision: nodes and rank map for a job, from values alone."""

from __future__ import annotations

from collections import Counter

import numpy as np

from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.network import capacity
from slurmdl.network.model import LinkScores
from slurmdl.placement.choose import Choice, IntArray, allowed, choices
from slurmdl.placement.eligible import Eligible, eligible, partitions
from slurmdl.placement.model import Candidate, Placement, RankMap
from slurmdl.placement.rankmap import rank_map
from slurmdl.placement.shape import Shape, shape
from slurmdl.request import JobRequest
from slurmdl.topology.model import Topology


def place(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores) -> Placement:
    """The nodes that serve the job best, and the rank map that it gets on exactly these.

    Every zone that fits is scored with its own rank map; the least cost wins, then the fewest zones, then the
    least Slurm weight, then the tightest fit. Where too few nodes are free now, the choice is made among the
    nodes that fit once they are idle, and `free_now` is false.

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
    job = shape(request)
    refusals = []
    for free_now in (True, False):
        for partition in partitions(request, cluster) or (None,):
            found = eligible(request, cluster, partition)
            try:
                return _best(request, cluster, topology, scores, job, found, free_now)
            except PlacementError as error:
                refusals.append(_why(error, found))
    raise PlacementError(refusals[-1])


def _why(error: PlacementError, found: Eligible) -> str:
    refused = ", ".join(f"{count} {why}" for why, count in found.refused.items())
    return f"{error}{f'; refused: {refused}' if refused else ''}"


def _best(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores, job: Shape,
          found: Eligible, free_now: bool) -> Placement:
    room = found.now if free_now else found.once_idle
    pool = _pool(request, cluster, topology, scores, np.flatnonzero(room >= job.most_per_node))
    scored = []
    order = {node.name: i for i, node in enumerate(cluster.nodes)}
    for choice in choices(topology, pool, job.nodes, request.dl.place):
        names = sorted((topology.nodes[i] for i in choice.nodes), key=order.__getitem__)
        ranks = rank_map([(name, job.tasks_of(i)) for i, name in enumerate(names)], topology, scores,
                         strategy=request.dl.strategy, ps=request.dl.ps, model_bytes=request.dl.model_bytes)
        weight = sum(cluster.node[name].weight for name in names)
        zones = Counter(topology.leaf_of(name) for name in names)
        scored.append((ranks.cost.key, len(zones), weight, choice.left, zones, names, ranks, choice))
    winner = min(scored, key=lambda entry: entry[:4])
    *_, zones, names, ranks, choice = winner
    candidates = [Candidate(_label(winner[4]), "chosen", ranks.cost)] + [
        Candidate(_label(entry[4]), _verdict(entry[:4], winner[:4], entry[6], ranks), entry[6].cost)
        for entry in scored if entry is not winner]
    return Placement(tuple(names), ranks, {name: topology.path(name) for name in names}, dict(zones), free_now,
                     tuple(candidates), _reason(topology, choice, zones, free_now))


def _pool(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          fitting: IntArray) -> IntArray:
    """Indices in the topology of the nodes that fit, by Slurm's weight, then the best link, then Slurm's order."""
    inside = allowed(topology, request.dl.zone)
    nodes = [cluster.nodes[i] for i in fitting]
    quality, _ = capacity.node_links([node.name for node in nodes], scores)
    ranked = np.lexsort((-quality, [node.weight for node in nodes])) if nodes else np.zeros(0, int)
    index = [topology.node_index.get(nodes[i].name, -1) for i in ranked]
    return np.array([i for i in index if i >= 0 and inside[i]], np.int64)


def _label(zones: Counter[str]) -> str:
    return " + ".join(f"{zone} x{count}" for zone, count in zones.most_common())


def _verdict(key: tuple[object, ...], best: tuple[object, ...], ranks: RankMap, winner: RankMap) -> str:
    """Why a scored choice lost."""
    if ranks.cost.key[0] > winner.cost.key[0]:
        return f"{ranks.cost.seconds / winner.cost.seconds:.3g} times the time per iteration"
    names = ("more bytes", "more zones", "a higher Slurm weight", "leaves a larger rest of the zone unused")
    return next((name for name, mine, least in zip(names, key, best, strict=True) if mine != least),
                "the same cost, later in the order of the topology")


def _reason(topology: Topology, choice: Choice, zones: Counter[str], free_now: bool) -> str:
    zone = topology.zones[choice.zone]
    if len(zones) == 1:
        text = f"zone {zone} holds all nodes"
    else:
        text = f"no smaller zone than {zone} holds all nodes; below it {_label(zones)}"
    return text if free_now else f"{text}; not all of them are free now"
