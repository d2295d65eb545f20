"""The text that says what was chosen and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from slurmdl import units
from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.dl_options import DlOptions
from slurmdl.network.model import LinkScores
from slurmdl.placement import assumed, scored
from slurmdl.placement.label import label
from slurmdl.placement.model import Cost, Placement, RankMap
from slurmdl.placement.nodes.eligible import idle
from slurmdl.placement.nodes.pool import IntArray
from slurmdl.topology import tree
from slurmdl.topology.hostlist import fold
from slurmdl.topology.model import Topology

#: most ranks that get a line each; more are folded by role and zone
MAX_RANKS = 16
#: most notes about the source of the zones
MAX_NOTES = 3
#: most zones, and most candidates, that get a line each
MAX_LINES = 12

_ORDERS = {"roles": "by role", "depth-first": "depth-first", "leaf": "leaf order", "alphabetical": "alphabetical",
           "largest-first": "largest first", "bisection": "by bisection", "swaps": "after swaps",
           "around": "detoured", "zones exchanged": "rearranged",
           "rotated": "rotated", "renumbered": "renumbered"}


def explain(placement: Placement, topology: Topology, cluster: ClusterSnapshot, scores: LinkScores,
            dl: DlOptions) -> str:
    """Zones, what was considered, the nodes, the ranks with their roles, the cost of other orders, and the scores.

    A few lines where the job is small; ranks, zones and candidates are folded where there are many.
    """
    lines = ["zones", *_zones(placement, topology, cluster),
             *(f"note       {note}" for note in topology.notes[:MAX_NOTES])]
    if placement.map is None:
        return "\n".join([*lines, f"choice     none: {placement.reason}"])
    names = fold(placement.nodes) if len(placement.nodes) <= MAX_RANKS else f"{len(placement.nodes)} nodes"
    assumptions = assumed.text(dl, topology, scores)
    lines += [f"choice     {names}: {placement.reason}",
              f"considered ({assumptions})", *_candidates(placement),
              "ranks", *_ranks(placement.map, topology),
              f"cost of one iteration on these nodes, by order of the ranks ({assumptions})", *_orders(placement.map),
              *_traffic(placement.map.cost), f"bound      {_bound(placement)}"]
    if scores.measured:
        lines += scored.lines(scored.mattered(placement, topology, cluster, scores), scores)
    return "\n".join(lines)


def _zones(placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> Iterator[str]:
    total = _count(topology, [node.name for node in cluster.nodes])
    quiet = _count(topology, [node.name for node in cluster.nodes if idle(node)])
    chosen = _count(topology, placement.nodes)
    order = list(tree.walk(topology))
    shown = set(sorted(order, key=lambda entry: -int(chosen[entry[0]]))[:MAX_LINES])
    width = max((len(topology.zones[zone]) + 2 * depth for zone, depth in shown), default=0)
    nodes = tree.members(topology)
    for zone, depth in order:
        if (zone, depth) in shown:
            name = "  " * depth + topology.zones[zone]
            mark = f", {chosen[zone]} chosen" if chosen[zone] else ""
            listed = f"  {fold(nodes[zone])}" if zone in nodes else ""
            yield f"  {name:{width}}  {quiet[zone]} of {total[zone]} nodes idle{mark}{listed}"
    if len(order) > len(shown):
        yield f"  and {len(order) - len(shown)} more zones"


def _count(topology: Topology, names: Iterable[str]) -> IntArray:
    """How many of the named nodes lie below each zone."""
    index = np.array([topology.node_index[name] for name in names if name in topology.node_index], np.int64)
    return topology.sums(np.bincount(index, minlength=len(topology.nodes)))


def _candidates(placement: Placement) -> Iterator[str]:
    shown = placement.candidates[:MAX_LINES]
    width = max(len(candidate.label) for candidate in shown)
    for candidate in shown:
        cost = f"  ({_cost(candidate.cost)})" if candidate.cost else ""
        yield f"  {candidate.label:{width}}  {candidate.verdict}{cost}"
    if len(placement.candidates) > len(shown):
        yield f"  and {len(placement.candidates) - len(shown)} more"


def _ranks(ranks: RankMap, topology: Topology) -> Iterator[str]:
    entries = [(rank, role, topology.leaf_of(node) or "no zone", node)
               for rank, (role, node) in enumerate(zip(ranks.roles, ranks.nodes, strict=True))]
    if len(entries) <= MAX_RANKS:
        for rank, role, zone, node in entries:
            yield f"  {rank:2d}  {role:6}  {node}  {zone}"
        return
    runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry[1:3])]
    if len(runs) > MAX_LINES:
        runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry[1])]
    for run in runs:
        span = f"{run[0][0]}-{run[-1][0]}" if len(run) > 1 else str(run[0][0])
        yield f"  {span:11}  {run[0][1]:6}  {label(Counter(zone for _, _, zone, _ in run))}"


def _orders(ranks: RankMap) -> Iterator[str]:
    for order, cost in ranks.compared.items():
        chosen = "  chosen" if order == ranks.order else ""
        yield f"  {_ORDERS[order]:12}  {_cost(cost)}{chosen}"
    if ranks.held and ranks.anywhere:
        yield (f"  rank 0 stays on {ranks.nodes[0]}, the first node, which takes {ranks.held:.1%} more time; "
               f"--dl-rank0=any: {_cost(ranks.anywhere)}")


def _traffic(cost: Cost) -> Iterator[str]:
    """What crosses what. Where zones of one level only are left, the cost of the order has said it already."""
    yield (f"traffic    {units.size(cost.bytes_across_nodes)} across nodes; of all bytes "
           f"{cost.aggregation_nodes:.0%} stay inside a node, {cost.aggregation_zones:.0%} inside a leaf zone")
    levels = [f"{units.size(sent)} at level {level}" for level, sent in enumerate(cost.bytes_across_levels) if sent]
    if len(levels) > 1:
        yield f"{'':10} out of zones: {', '.join(levels)}"


def _bound(placement: Placement) -> str:
    if placement.bound is None or placement.gap is None:
        return "none is known for this traffic"
    above = "which is reached" if placement.gap < 5e-4 else f"this one takes at most {placement.gap:.1%} more"
    return f"no choice takes less than {units.duration(placement.bound)} ({placement.bound_basis}); {above}"


def _cost(cost: Cost) -> str:
    busiest = f", busiest link {cost.busiest}" if cost.busiest else ""
    return f"{units.duration(cost.seconds)}, {units.size(cost.bytes_across_zones)} across zones{busiest}"
