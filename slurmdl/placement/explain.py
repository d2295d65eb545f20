"""The text that says what was chosen and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement import score_report
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.result import Cost, Placement, RankMap, format_zone_counts
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.topology import text_tree
from slurmdl.topology.topology import Topology

#: most ranks that get a line each; more are folded by role and zone
MAX_RANK_LINES = 16
#: most notes about the source of the zones
MAX_NOTES = 3
#: most zones, and most candidates, that get a line each
MAX_LIST_LINES = 12

_ORDER_LABELS = {"roles": "by role", "depth-first": "depth-first", "leaf": "leaf order", "alphabetical": "alphabetical",
           "largest-first": "largest first", "bisection": "by bisection", "swaps": "after swaps",
           "detour": "detoured", "zones-swapped": "rearranged",
           "rotated": "rotated", "renumbered": "renumbered"}


def explain_placement(placement: Placement, topology: Topology, cluster: ClusterSnapshot, scores: LinkScores,
            dl: DlOptions) -> str:
    """Zones, what was considered, the nodes, the ranks with their roles, the cost of other orders, and the scores.

    A few lines where the job is small; ranks, zones and candidates are folded where there are many.
    """
    lines = ["zones", *_zone_lines(placement, topology, cluster),
             *(f"note       {note}" for note in topology.notes[:MAX_NOTES])]
    if placement.rank_map is None:
        return "\n".join([*lines, f"choice     none: {placement.reason}"])
    names = fold_hostlist(placement.nodes) if len(
        placement.nodes) <= MAX_RANK_LINES else f"{len(placement.nodes)} nodes"
    assumptions = score_report.format_assumptions(dl, topology, scores)
    lines += [f"choice     {names}: {placement.reason}",
              f"considered ({assumptions})", *_candidate_lines(placement),
              "ranks", *_rank_lines(placement.rank_map, topology),
              f"cost of one iteration on these nodes, by order of the ranks ({assumptions})", *_order_lines(
                  placement.rank_map),
              *_traffic_lines(placement.rank_map.cost), f"bound      {_format_bound(placement)}"]
    if scores.link_count:
        lines += score_report.format_score_report(score_report.decisive_scores(placement, topology, cluster, scores), scores)
    return "\n".join(lines)


def _zone_lines(placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> Iterator[str]:
    total = _count_below_zones(topology, [node.name for node in cluster.nodes])
    quiet = _count_below_zones(topology, [node.name for node in cluster.nodes if is_idle(node)])
    chosen = _count_below_zones(topology, placement.nodes)
    order = list(text_tree.walk_zones(topology))
    shown = set(sorted(order, key=lambda entry: -int(chosen[entry[0]]))[:MAX_LIST_LINES])
    width = max((len(topology.zones[zone]) + 2 * depth for zone, depth in shown), default=0)
    nodes = text_tree.nodes_by_leaf(topology)
    for zone, depth in order:
        if (zone, depth) in shown:
            name = "  " * depth + topology.zones[zone]
            mark = f", {chosen[zone]} chosen" if chosen[zone] else ""
            listed = f"  {fold_hostlist(nodes[zone])}" if zone in nodes else ""
            yield f"  {name:{width}}  {quiet[zone]} of {total[zone]} nodes idle{mark}{listed}"
    if len(order) > len(shown):
        yield f"  and {len(order) - len(shown)} more zones"


def _count_below_zones(topology: Topology, names: Iterable[str]) -> IntArray:
    """How many of the named nodes lie below each zone."""
    index = np.array([topology.node_index[name] for name in names if name in topology.node_index], np.int64)
    return topology.sum_below(np.bincount(index, minlength=len(topology.nodes)))


def _candidate_lines(placement: Placement) -> Iterator[str]:
    shown = placement.candidates[:MAX_LIST_LINES]
    width = max(len(candidate.label) for candidate in shown)
    for candidate in shown:
        cost = f"  ({_format_cost(candidate.cost)})" if candidate.cost else ""
        yield f"  {candidate.label:{width}}  {candidate.verdict}{cost}"
    if len(placement.candidates) > len(shown):
        yield f"  and {len(placement.candidates) - len(shown)} more"


def _rank_lines(ranks: RankMap, topology: Topology) -> Iterator[str]:
    entries = [(rank, role, topology.leaf_of(node) or "no zone", node)
               for rank, (role, node) in enumerate(zip(ranks.roles, ranks.nodes, strict=True))]
    if len(entries) <= MAX_RANK_LINES:
        for rank, role, zone, node in entries:
            yield f"  {rank:2d}  {role:6}  {node}  {zone}"
        return
    runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry[1:3])]
    if len(runs) > MAX_LIST_LINES:
        runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry[1])]
    for run in runs:
        span = f"{run[0][0]}-{run[-1][0]}" if len(run) > 1 else str(run[0][0])
        yield f"  {span:11}  {run[0][1]:6}  {format_zone_counts(Counter(zone for _, _, zone, _ in run))}"


def _order_lines(ranks: RankMap) -> Iterator[str]:
    for order, cost in ranks.order_costs.items():
        chosen = "  chosen" if order == ranks.order else ""
        yield f"  {_ORDER_LABELS[order]:12}  {_format_cost(cost)}{chosen}"
    if ranks.rank0_slowdown and ranks.any_rank0_cost:
        yield (f"  rank 0 stays on {ranks.nodes[0]}, the first node, which takes {ranks.rank0_slowdown:.1%} more time; "
               f"--dl-rank0=any: {_format_cost(ranks.any_rank0_cost)}")


def _traffic_lines(cost: Cost) -> Iterator[str]:
    """What crosses what. Where zones of one level only are left, the cost of the order has said it already."""
    yield (f"traffic    {units.format_bytes(cost.inter_node_bytes)} across nodes; of all bytes "
           f"{cost.intra_node_fraction:.0%} stay inside a node, {cost.intra_zone_fraction:.0%} inside a leaf zone")
    levels = [f"{units.format_bytes(sent)} at level {level}" for level,
     sent in enumerate(cost.inter_zone_bytes_by_level) if sent]
    if len(levels) > 1:
        yield f"{'':10} out of zones: {', '.join(levels)}"


def _format_bound(placement: Placement) -> str:
    if placement.lower_bound is None or placement.optimality_gap is None:
        return "none is known for this traffic"
    above = "which is reached" if placement.optimality_gap < 5e-4 else f"this one takes at most {placement.optimality_gap:.1%} more"
    return f"no choice takes less than {units.format_duration(placement.lower_bound)} ({placement.lower_bound_reason}); {above}"


def _format_cost(cost: Cost) -> str:
    busiest = f", busiest link {cost.bottleneck_link}" if cost.bottleneck_link else ""
    return f"{units.format_duration(cost.seconds)}, {units.format_bytes(cost.inter_zone_bytes)} across zones{busiest}"
