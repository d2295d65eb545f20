"""Text that explains a placement: zones, choices, ranks, costs, the slow links, and the assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import numpy as np

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.links.capacity import OVERSUBSCRIPTION, format_age, link_rows
from slurmdl.links.link_scores import LinkScores
from slurmdl.mesh import DEFAULT_MODEL, MeshTraffic
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.result import Cost, Placement, RankMap, format_zone_counts
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology, children_by_zone, nodes_by_leaf, walk_forest

MAX_RANK_LINES = 16  # ranks with a line each; more are folded by role and zone
MAX_NOTES = 3  # notes about the topology source
MAX_LIST_LINES = 12  # zones, and choices, with a line each
REACHED_GAP = 5e-4  # optimality gap below which a placement counts as optimal

_ORDER_LABELS = {"roles": "by role", "depth-first": "depth-first", "leaf": "leaf order",
                 "alphabetical": "alphabetical", "mesh": "by mesh", "groups": "by group",
                 "largest-first": "largest first",
                 "bisection": "by bisection", "swaps": "after swaps", "detour": "detoured",
                 "zones-swapped": "zones swapped", "rotated": "rotated", "renumbered": "renumbered"}
SLOWDOWN_THRESHOLD = 1.25  # slowdown from which a link counts as slow (see capacity.LinkRow)
MAX_REPORTED_LINKS = 12


def explain_placement(placement: Placement, topology: Topology, cluster: ClusterSnapshot, scores: LinkScores,
                      options: DlOptions) -> str:
    """Zones, choices, nodes, ranks, costs of the rank orders and link scores; long lists are folded."""
    lines = ["zones", *_zone_lines(placement, topology, cluster),
             *(f"note       {note}" for note in topology.notes[:MAX_NOTES])]
    rank_map = placement.rank_map
    if rank_map is None:
        return "\n".join([*lines, f"choice     none: {placement.reason}"])
    count = len(placement.nodes)
    names = fold_hostlist(placement.nodes) if count <= MAX_RANK_LINES else f"{count} nodes"
    assumptions = format_assumptions(options, topology, scores)
    lines += [f"choice     {names}: {placement.reason}",
              f"considered ({assumptions})", *_choice_lines(placement),
              "ranks", *_rank_lines(rank_map, topology), *_mesh_lines(options, rank_map, topology),
              f"cost of one iteration on these nodes, by order of the ranks ({assumptions})", *_order_lines(rank_map),
              *_traffic_lines(rank_map.cost), f"bound      {_format_bound(placement)}"]
    if scores.link_count:
        lines += format_score_report(decisive_scores(placement, topology, cluster, scores), scores)
    return "\n".join(lines)


def _zone_lines(placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> Iterator[str]:
    total = _count_below_zones(topology, cluster.names)
    idle = _count_below_zones(topology, [node.name for node in cluster.nodes if is_idle(node)])
    chosen = _count_below_zones(topology, placement.nodes)
    zones = list(walk_forest(children_by_zone(topology)))
    listed = set(sorted(zones, key=lambda entry: -int(chosen[entry[0]]))[:MAX_LIST_LINES])
    width = max((len(topology.zones[zone]) + 2 * depth for zone, depth in listed), default=0)
    nodes = nodes_by_leaf(topology)
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


def _choice_lines(placement: Placement) -> Iterator[str]:
    listed = placement.considered[:MAX_LIST_LINES]
    width = max(len(choice.label) for choice in listed)
    for choice in listed:
        cost = f"  ({_format_cost(choice.cost)})" if choice.cost else ""
        yield f"  {choice.label:{width}}  {choice.outcome}{cost}"
    if len(placement.considered) > len(listed):
        yield f"  and {len(placement.considered) - len(listed)} more"


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


def _mesh_lines(options: DlOptions, rank_map: RankMap, topology: Topology) -> Iterator[str]:
    """For each dimension of a mesh: the size of its groups, and the most nodes and leaf zones that one has."""
    traffic = options.traffic
    if not isinstance(traffic, MeshTraffic) or traffic.mesh.ranks != len(rank_map.nodes):
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


@dataclass(frozen=True)
class DecisiveScore:
    """Score of a link that influenced a choice.

    `kind` is one of samples.LINK_KINDS, `slowdown` the transfer time of a message relative to a link without a score,
    and `age` in seconds since the newest sample. `use` is "left out", "used", or "used, the busiest link".
    """

    kind: str
    name: str
    slowdown: float
    age: float
    samples: int
    loss: float
    use: str


def decisive_scores(placement: Placement, topology: Topology, cluster: ClusterSnapshot,
                    scores: LinkScores) -> list[DecisiveScore]:
    """Slow links among those available to the job now, and the busiest link of the choice; the worst first."""
    return decisive_step_scores(placement.rank_map, [node.name for node in cluster.nodes if is_idle(node)], topology,
                                scores)


def decisive_step_scores(ranks: RankMap | None, available: Sequence[str], topology: Topology,
                         scores: LinkScores) -> list[DecisiveScore]:
    """Like `decisive_scores`, for ranks that can use only the available nodes."""
    nodes, bottleneck_link = (set(ranks.nodes), ranks.cost.bottleneck_link) if ranks else (set[str](), "")
    leaves = sorted({leaf for node in nodes if (leaf := topology.leaf_of(node))})
    used = {*nodes, *(zone for node in nodes for zone in topology.path_of(node)),
            *("|".join(pair) for pair in combinations(leaves, 2))}
    reachable = {*nodes, *available}
    slow = []
    for row in link_rows(scores, topology):
        is_slow = row.slowdown >= SLOWDOWN_THRESHOLD and (row.kind != "node" or row.name in reachable)
        if is_slow or row.name == bottleneck_link:
            use = "used, the busiest link" if row.name == bottleneck_link else \
                "used" if row.name in used else "left out"
            slow.append(DecisiveScore(row.kind, row.name, row.slowdown, row.score.age, row.score.samples,
                                      row.score.loss, use))
    return slow


def format_score_report(decisive: list[DecisiveScore], scores: LinkScores) -> Iterator[str]:
    """Report lines: number and age of all scores, then the decisive ones."""
    ages = [score.age for links in scores.by_kind.values() for score in links.values()]
    counts = ", ".join(f"{len(links)} {name}" for name, links in (
        ("nodes", scores.nodes), ("zones", scores.zones), ("inter-leaf paths", scores.inter_leaf)) if links)
    oldest = f" to {format_age(max(ages))}" if max(ages) != min(ages) else ""
    yield f"scores     of {counts}, {format_age(min(ages))}{oldest} old"
    reported = decisive[:MAX_REPORTED_LINKS]
    width = max((len(link.name) for link in reported), default=0)
    for link in reported:
        loss = f", {link.loss:.2%} loss" if link.loss else ""
        yield (f"  {link.name:{width}}  {link.use}: slowdown {link.slowdown:.3g}{loss}, "
               f"{format_age(link.age)} old, samples: {link.samples}")
    if len(decisive) > len(reported):
        yield f"  and {len(decisive) - len(reported)} more"


def format_assumptions(options: DlOptions, topology: Topology, scores: LinkScores) -> str:
    """Assumptions of predictions: "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"."""
    default = "" if options.bytes else " (default)"
    traffic = f"model {units.format_bytes(options.model_bytes)}{default}"
    if options.comm_pattern and not is_comm_pattern(options.comm_pattern):
        traffic = f"traffic of {options.comm_pattern}"
    if options.groups:
        volumes = f"{options.bytes}{' and the meshes' if options.mesh else ''}" if "=" in options.bytes else traffic
        traffic = f"groups {options.groups}, {volumes}"
    elif options.mesh:
        volumes = ", ".join(filter(None, [options.model, options.bytes])) or f"{DEFAULT_MODEL} (default)"
        traffic = f"mesh {options.mesh}, {volumes}"
    return f"{traffic}, {link_assumption(topology, scores)}"


def link_assumption(topology: Topology, scores: LinkScores) -> str:
    return f"{unmeasured_link_assumption(topology, scores)}{', or as measured' if scores.link_count else ''}"


def unmeasured_link_assumption(topology: Topology, scores: LinkScores) -> str:
    """Assumption about node links, and about uplinks of zones with a parent."""
    default = " (default)" if scores.default_node_bandwidth == LinkScores.default_node_bandwidth else ""
    text = f"links {units.format_bit_rate(scores.default_node_bandwidth)}{default}"
    if scores.default_rails > 1:
        text += f" on {scores.default_rails} rails"
    if scores.default_leaf_bandwidth:
        text += f", {units.format_bit_rate(scores.default_leaf_bandwidth)} inside a leaf zone"
    has_parent = topology.parent >= 0
    if not has_parent.any():
        return text
    is_declared = np.isfinite(topology.uplink_bandwidth[has_parent])
    uplinks = "/".join(map(units.format_bit_rate, scores.default_zone_bandwidth)) or \
        f"1/{OVERSUBSCRIPTION:g} of their nodes"
    if is_declared.all():
        uplinks = "by LinkSpeed"
    elif is_declared.any():
        uplinks = f"by LinkSpeed or {uplinks}"
    return f"{text}, uplinks {uplinks}"
