"""Text that explains a placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.mesh_traffic import MeshTraffic
from slurmdl.placement.result import Cost, Placement, RankMap, format_zone_counts
from slurmdl.placement.score_report import decisive_scores, format_assumptions, format_score_report
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize
from slurmdl.topology import text_tree
from slurmdl.topology.topology import Topology

MAX_RANK_LINES = 16  # ranks with a line each; more are folded by role and zone
MAX_NOTES = 3  # notes about the topology source
MAX_LIST_LINES = 12  # zones, and candidates, with a line each
REACHED_GAP = 5e-4  # optimality gap below which a placement counts as optimal

_ORDER_LABELS = {"roles": "by role", "depth-first": "depth-first", "leaf": "leaf order",
                 "alphabetical": "alphabetical", "mesh": "by mesh", "largest-first": "largest first",
                 "bisection": "by bisection", "swaps": "after swaps", "detour": "detoured",
                 "zones-swapped": "zones swapped", "rotated": "rotated", "renumbered": "renumbered"}


def explain_placement(placement: Placement, topology: Topology, cluster: ClusterSnapshot, scores: LinkScores,
                      dl: DlOptions) -> str:
    """Zones, candidates, nodes, ranks, costs of the rank orders and link scores; long lists are folded."""
    lines = ["zones", *_zone_lines(placement, topology, cluster),
             *(f"note       {note}" for note in topology.notes[:MAX_NOTES])]
    rank_map = placement.rank_map
    if rank_map is None:
        return "\n".join([*lines, f"choice     none: {placement.reason}"])
    count = len(placement.nodes)
    names = fold_hostlist(placement.nodes) if count <= MAX_RANK_LINES else f"{count} nodes"
    assumptions = format_assumptions(dl, topology, scores)
    lines += [f"choice     {names}: {placement.reason}",
              f"considered ({assumptions})", *_candidate_lines(placement),
              "ranks", *_rank_lines(rank_map, topology), *_mesh_lines(dl, rank_map, topology),
              f"cost of one iteration on these nodes, by order of the ranks ({assumptions})", *_order_lines(rank_map),
              *_traffic_lines(rank_map.cost), f"bound      {_format_bound(placement)}"]
    if scores.link_count:
        lines += format_score_report(decisive_scores(placement, topology, cluster, scores), scores)
    return "\n".join(lines)


def _zone_lines(placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> Iterator[str]:
    total = _count_below_zones(topology, cluster.names)
    idle = _count_below_zones(topology, [node.name for node in cluster.nodes if is_idle(node)])
    chosen = _count_below_zones(topology, placement.nodes)
    zones = list(text_tree.walk_forest(text_tree.children_by_zone(topology)))
    listed = set(sorted(zones, key=lambda entry: -int(chosen[entry[0]]))[:MAX_LIST_LINES])
    width = max((len(topology.zones[zone]) + 2 * depth for zone, depth in listed), default=0)
    nodes = text_tree.nodes_by_leaf(topology)
    for zone, depth in zones:
        if (zone, depth) in listed:
            name = "  " * depth + topology.zones[zone]
            chosen_count = f", {chosen[zone]} chosen" if chosen[zone] else ""
            names = f"  {fold_hostlist(nodes[zone])}" if zone in nodes else ""
            yield f"  {name:{width}}  {idle[zone]} of {pluralize(total[zone], 'node')} idle{chosen_count}{names}"
    if len(zones) > len(listed):
        yield f"  and {pluralize(len(zones) - len(listed), 'more zone')}"


def _count_below_zones(topology: Topology, names: Iterable[str]) -> IntArray:
    """Number of the named nodes below each zone; shape (zones,)."""
    index = np.array([topology.node_index[name] for name in names if name in topology.node_index], np.int64)
    return topology.sum_below(np.bincount(index, minlength=len(topology.nodes)))


def _candidate_lines(placement: Placement) -> Iterator[str]:
    listed = placement.candidates[:MAX_LIST_LINES]
    width = max(len(candidate.label) for candidate in listed)
    for candidate in listed:
        cost = f"  ({_format_cost(candidate.cost)})" if candidate.cost else ""
        yield f"  {candidate.label:{width}}  {candidate.verdict}{cost}"
    if len(placement.candidates) > len(listed):
        yield f"  and {len(placement.candidates) - len(listed)} more"


def _rank_lines(rank_map: RankMap, topology: Topology) -> Iterator[str]:
    entries = [(rank, role, topology.leaf_of(node) or "no zone", node)
               for rank, (role, node) in enumerate(zip(rank_map.roles, rank_map.nodes, strict=True))]
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


def _mesh_lines(dl: DlOptions, rank_map: RankMap, topology: Topology) -> Iterator[str]:
    """For each dimension of a mesh: the size of its groups, and the most nodes and leaf zones that one has."""
    traffic = MeshTraffic.from_options(dl)
    if traffic is None or traffic.mesh.ranks != len(rank_map.nodes):
        return
    yield f"mesh       {traffic.mesh}"
    for dimension in traffic.dimensions:
        groups = [[rank_map.nodes[rank] for rank in group] for group in traffic.groups(dimension.dims).tolist()]
        nodes = max(len(set(group)) for group in groups)
        zones = max(len({topology.leaf_of(node) for node in group}) for group in groups)
        where = "on one node" if nodes == 1 else f"on up to {nodes} nodes " + (
            "of one leaf zone" if zones == 1 else f"in {zones} leaf zones")
        size = units.format_bytes(traffic.volumes[dimension.kind].bytes)
        yield (f"  {dimension.kind:4} {pluralize(len(groups), 'group')} of {pluralize(dimension.size, 'rank')}, "
               f"{where}; {size} per iteration")


def _order_lines(rank_map: RankMap) -> Iterator[str]:
    for order, cost in rank_map.order_costs.items():
        chosen = "  chosen" if order == rank_map.order else ""
        yield f"  {_ORDER_LABELS[order]:12}  {_format_cost(cost)}{chosen}"
    if rank_map.rank0_slowdown and rank_map.any_rank0_cost:
        yield (f"  rank 0 stays on {rank_map.nodes[0]}, the first node, which takes {rank_map.rank0_slowdown:.1%} "
               f"more time; --dl-rank0=any: {_format_cost(rank_map.any_rank0_cost)}")


def _traffic_lines(cost: Cost) -> Iterator[str]:
    """Bytes between nodes; bytes by zone level, if several levels have traffic."""
    yield (f"traffic    {units.format_bytes(cost.inter_node_bytes)} across nodes; of all bytes "
           f"{cost.intra_node_fraction:.0%} stay inside a node, {cost.intra_zone_fraction:.0%} inside a leaf zone")
    levels = [f"{units.format_bytes(level_bytes)} at level {level}"
              for level, level_bytes in enumerate(cost.inter_zone_bytes_by_level) if level_bytes]
    if len(levels) > 1:
        yield f"{'':10} out of zones: {', '.join(levels)}"


def _format_bound(placement: Placement) -> str:
    bound, gap = placement.lower_bound, placement.optimality_gap
    if bound is None or gap is None:
        return "none known for this traffic"
    result = "reached" if gap < REACHED_GAP else f"this choice takes at most {gap:.1%} more"
    return f"any choice takes at least {units.format_duration(bound)} ({placement.lower_bound_reason}); {result}"


def _format_cost(cost: Cost) -> str:
    busiest = f", busiest link {cost.bottleneck_link}" if cost.bottleneck_link else ""
    return f"{units.format_duration(cost.seconds)}, {units.format_bytes(cost.inter_zone_bytes)} across zones{busiest}"
