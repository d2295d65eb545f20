"""The search problem, the zones that may hold its best choice of nodes, and choices by quotas per leaf zone in them.

Zones are ranked by a lower bound on their time: each used link carries at least the bytes of one node. If every used
link carries the same load, as in a ring, the nodes with the k widest paths are optimal; for other traffic they give a
bound (widest-path criterion: Pollack, The maximum capacity through a network, 1960).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, permutations, product
from typing import NamedTuple

import numpy as np

from slurmdl.job_request import JobSize
from slurmdl.placement.arrays import FloatArray, IntArray, round_mantissa, run_starts, sorted_unique, transfer_seconds
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.traffic import Phase, Traffic, count_shards

MAX_ZONES_PER_LEVEL = 8  # zones with the best links first, then the smallest ones
MAX_LATENCY_CAPS = 512  # caps that are tried
MAX_CAP_NODE_PRODUCT = 1_000_000  # caps times nodes
MAX_RELEVANT_CAPS = 64  # caps that are tried by searches with a step per cap
MIN_LATENCY_FRACTION = 1e-4  # smaller fractions of the time are ignored
MAX_UNEVEN_ZONES = 4  # zones with an uneven choice
MAX_SEGMENT_SIZES = 4  # sizes that are tried, the largest ones
MAX_GROUP_SEQUENCES = 6  # sequences of groups that are tried


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Job whose nodes are searched; `phases` is the traffic of one iteration of its ranks in a single zone."""

    size: JobSize
    traffic: Traffic
    phases: Sequence[Phase]

    @cached_property
    def rounds(self) -> float:
        """Message rounds of one iteration between nodes."""
        return self.traffic.rounds(self.phases, self.size.max_tasks_per_node)

    @cached_property
    def depends_on_counts(self) -> bool:
        """Whether the time depends on the number of ranks below each link, not only on the links in use."""
        return bool(self.phases) and self.traffic.kind != "groups" and all(phase.all_pairs for phase in self.phases)

    @cached_property
    def has_two_roles(self) -> bool:
        """Whether the phases go between two roles, such as parameter servers and workers."""
        return self.depends_on_counts and self.phases[0].has_two_roles

    @cached_property
    def min_node_bytes(self) -> float:
        """Lower bound on the bytes over the busier direction of each used node link, summed over the phases."""
        if self.size.nodes == 1:
            return 0.0
        known = self.traffic.min_node_bytes(self.size.max_tasks_per_node)
        return sum(min_node_bytes(phase, self.size) for phase in self.phases) if known is None else known


def min_node_bytes(phase: Phase, size: JobSize) -> float:
    """Lower bound on the bytes of one phase over the busier direction of each used node link."""
    tasks = np.array([size.tasks // size.nodes, size.max_tasks_per_node])
    if not phase.all_pairs:
        return float(np.mean(phase.bytes_per_pair)) if len(phase.source) else 0.0
    if not phase.has_two_roles:
        return float(np.min(phase.bytes_per_pair * tasks * (size.tasks - tasks)))
    all_servers, all_workers = len(phase.source), len(phase.target)
    servers = np.arange(min(all_servers, size.max_tasks_per_node) + 1)
    workers = np.clip(tasks[:, None] - servers, 0, all_workers)
    return float(np.min(phase.bytes_per_pair * count_shards(servers, workers, all_servers, all_workers)))


@dataclass(frozen=True, eq=False)
class NodeChoice:
    """Pool indices of nodes, and the smallest zone that holds them all.

    `unused_nodes` counts the other candidates below the zone; if `is_smallest_zone`, no zone below it has enough.
    """

    zone: int
    nodes: IntArray
    unused_nodes: int
    is_smallest_zone: bool = True


class Proposal(NamedTuple):
    """Choice proposed by an algorithm; `estimated_seconds` is its estimate of the time, 0 if it has none.

    `min_seconds` is a lower bound on the time of any choice in the zone that the algorithm searched.
    """

    choice: NodeChoice
    min_seconds: float
    estimated_seconds: float = 0.0


def make_choice(candidates: CandidateNodes, zone: int, nodes: IntArray) -> NodeChoice:
    """Choice of nodes, all of which are below `zone`."""
    is_smallest = not (candidates.node_count[candidates.parent == zone] >= len(nodes)).any()
    return NodeChoice(zone, nodes, int(candidates.node_count[zone]) - len(nodes), is_smallest)


@dataclass(frozen=True)
class LatencyCap:
    """Upper bounds on the latency of node links, and of the zone uplinks of each level."""

    node_s: float
    uplinks_s: tuple[float, ...]

    def path_latency(self, candidates: CandidateNodes) -> FloatArray:
        """One-way seconds to the top of each zone if every link has the maximum latency; shape (zones,)."""
        up = np.append(0.0, np.cumsum(self.uplinks_s))
        return np.asarray(self.node_s + up[np.minimum(candidates.level, len(self.uplinks_s))])

    def node_capacity(self, candidates: CandidateNodes) -> FloatArray:
        """Bytes/s of the node links; 0 for links that exceed the cap."""
        return np.where(candidates.node_latency <= self.node_s, candidates.node_capacity, 0.0)

    def first_link_capacity(self, candidates: CandidateNodes) -> FloatArray:
        """Bytes/s of each node inside its leaf zone; 0 for nodes whose link exceeds the cap."""
        if not candidates.leaf_bandwidth:
            return self.node_capacity(candidates)
        return np.where(candidates.node_latency <= self.node_s, candidates.leaf_bandwidth, 0.0)

    def zone_capacity(self, candidates: CandidateNodes) -> FloatArray:
        """Bytes/s of the zone uplinks; 0 for links that exceed the cap."""
        max_latency = np.append(self.uplinks_s, np.inf)[np.minimum(candidates.level, len(self.uplinks_s))]
        return np.where(candidates.zone_latency <= max_latency, candidates.zone_capacity, 0.0)


UNCAPPED = LatencyCap(np.inf, ())


def latency_caps(candidates: CandidateNodes) -> list[LatencyCap]:
    """Latency caps to try, the tightest first: all combinations of latencies, or quantiles if these are too many.

    If all links of a level have the same latency, the only cap allows all links.
    """
    per_level = [candidates.zone_latency[(candidates.level == level) & (candidates.parent >= 0)]
                 for level in range(int(candidates.level.max(initial=0)))]
    values = [sorted_unique(latencies) for latencies in (candidates.node_latency, *per_level)]
    values = [latencies if len(latencies) else np.zeros(1) for latencies in values]
    max_caps = max(2, min(MAX_LATENCY_CAPS, MAX_CAP_NODE_PRODUCT // max(1, len(candidates.snapshot_index))))
    if np.prod([len(latencies) for latencies in values], dtype=float) > max_caps:
        quantiles = max(2, int(max_caps ** (1 / max(1, sum(len(latencies) > 1 for latencies in values)))))
        values = [latencies[sorted_unique(np.linspace(0, len(latencies) - 1, quantiles).astype(int))]
                  for latencies in values]
    caps = [LatencyCap(node_s, tuple(uplinks_s))
            for node_s, *uplinks_s in product(*(latencies.tolist() for latencies in values))]
    return sorted(caps, key=lambda cap: cap.node_s + sum(cap.uplinks_s))


def relevant_latency_caps(candidates: CandidateNodes, seconds: float, rounds: float) -> list[LatencyCap]:
    """Latency caps that may matter for an iteration of at least `seconds`, the tightest first."""
    caps = latency_caps(candidates)
    if 2 * rounds * float(caps[-1].path_latency(candidates).max()) < MIN_LATENCY_FRACTION * seconds:
        return caps[-1:]
    return [caps[i] for i in sorted_unique(np.linspace(0, len(caps) - 1, MAX_RELEVANT_CAPS).astype(int))]


def path_widths(candidates: CandidateNodes, top: int, cap: LatencyCap) -> FloatArray:
    """Bytes/s of the narrowest link from each node below `top` up to it, 0 if one exceeds the cap; shape (nodes,)."""
    nodes = candidates.nodes_below(top)
    width, zone_capacity = cap.first_link_capacity(candidates)[nodes], cap.zone_capacity(candidates)
    node_capacity = cap.node_capacity(candidates)[nodes]
    for zones in candidates.ancestors[nodes].T:
        below = (zones >= 0) & (candidates.level[zones] < candidates.level[top])
        width = np.where(below, np.minimum(np.minimum(width, node_capacity), zone_capacity[zones]), width)
    return width


def kth_widest_paths(candidates: CandidateNodes, k: int, cap: LatencyCap) -> FloatArray:
    """Bytes/s of the k-th widest path within the cap from the nodes of each zone to it, 0 if none; shape (zones,)."""
    widths = np.zeros(candidates.zone_count)
    width, zone_capacity = cap.first_link_capacity(candidates), cap.zone_capacity(candidates)
    node_capacity = cap.node_capacity(candidates)
    zone: IntArray = candidates.leaf.copy() if len(candidates.snapshot_index) else candidates.snapshot_index
    for level in range(int(candidates.level.max(initial=-1)) + 1):
        nodes = np.flatnonzero((zone >= 0) & (candidates.level[zone] == level))
        if len(nodes):
            zones = zone[nodes]
            begin = run_starts(zones)
            counts = np.diff(np.append(begin, len(nodes)))
            # the nodes of a zone are contiguous, zones in any order; equal widths need no sorting
            is_uniform = width[nodes].min() == width[nodes].max()
            run = np.repeat(np.arange(len(begin)), counts)
            order = nodes if is_uniform else nodes[np.lexsort((-width[nodes], run))]
            has_enough = counts >= k
            widths[zones[begin[has_enough]]] = width[order][begin[has_enough] + k - 1]
            width[nodes] = np.minimum(np.minimum(width[nodes], node_capacity[nodes]), zone_capacity[zones])
            zone[nodes] = candidates.parent[zones]
    return widths


@dataclass(frozen=True, eq=False)
class RankedZone:
    """A zone to choose nodes in, and the worst links that its best nodes need.

    `index` is the zone's in CandidateNodes. `min_seconds` is a lower bound for choices in this zone that fit in none
    of its children; `min_capacity` gives the bytes/s of the narrowest link.
    """

    index: int
    min_seconds: float
    min_capacity: float
    latency_cap: LatencyCap


def rank_zones(candidates: CandidateNodes, problem: SearchProblem) -> list[RankedZone]:
    """Zones to choose nodes in, the most promising first.

    If only the worst link matters, a zone is dropped if a zone below it is as good.
    """
    seconds = np.full(candidates.zone_count, np.inf)
    capacity = np.zeros(candidates.zone_count)
    cap_index = np.zeros(candidates.zone_count, np.int64)
    caps: list[LatencyCap] = []
    min_transfer = problem.min_node_bytes / max(float(candidates.node_capacity.max()), candidates.leaf_bandwidth)
    for cap in latency_caps(candidates):
        if caps and min_transfer + 2 * problem.rounds * cap.node_s > seconds.min(initial=np.inf):
            break
        widths = kth_widest_paths(candidates, problem.size.nodes, cap)
        time = transfer_seconds(problem.min_node_bytes, widths)
        time = round_mantissa(time + 2 * problem.rounds * cap.path_latency(candidates) * (time < np.inf))
        better = time < seconds
        seconds[better], capacity[better], cap_index[better] = time[better], widths[better], len(caps)
        caps.append(cap)
    kept = seconds < np.inf
    if problem.has_two_roles or problem.traffic.is_zone_dependent:
        # an uplink, e.g. with servers and workers on both sides, may carry less than a node link
        seconds = np.where(kept, min_node_link_seconds(candidates, problem), np.inf)
    if not problem.depends_on_counts and not problem.traffic.is_zone_dependent:
        best_below = np.full(candidates.zone_count, np.inf)
        for level in candidates.levels:
            np.minimum.at(best_below, candidates.parent[level.zones], np.minimum(seconds, best_below)[level.zones])
        kept &= seconds < best_below
    zones = np.flatnonzero(kept)
    keys = (candidates.tie_break, candidates.node_count, candidates.level, seconds)
    zones = zones[np.lexsort([key[zones] for key in keys])]
    levels = candidates.level[zones]
    first_of_level = np.concatenate([zones[levels == level][:MAX_ZONES_PER_LEVEL] for level in sorted_unique(levels)])
    # two networks share the bytes of a node, so those of one link have no bound
    min_seconds = np.zeros_like(seconds) if candidates.leaf_bandwidth else seconds
    return [RankedZone(int(zone), float(min_seconds[zone]), float(capacity[zone]), caps[cap_index[zone]])
            for zone in zones[np.isin(zones, first_of_level)]]


def fitting_nodes(candidates: CandidateNodes, zone: RankedZone) -> tuple[IntArray, IntArray]:
    """Nodes of the zone with wide enough paths, and their number in each leaf zone, shape (zones,)."""
    widths = path_widths(candidates, zone.index, zone.latency_cap)
    fitting = int(candidates.node_begin[zone.index]) + np.flatnonzero(widths >= zone.min_capacity)
    return fitting, np.bincount(candidates.leaf[fitting], minlength=candidates.zone_count)


def min_node_link_seconds(candidates: CandidateNodes, problem: SearchProblem) -> FloatArray:
    """Lower bound from node links alone: seconds over the k-th widest one of each zone; shape (zones,)."""
    nodes_only = replace(candidates, zone_capacity=np.full(candidates.zone_count, np.inf))
    return transfer_seconds(problem.min_node_bytes, kth_widest_paths(nodes_only, problem.size.nodes, UNCAPPED))


def even_choices(candidates: CandidateNodes, problem: SearchProblem,
                 zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """Choices of each zone: the fewest leaves evenly, the largest leaves first, and all leaves evenly."""
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        for quotas in zone_quotas(available, candidates.tie_break, problem.size.nodes):
            choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, quotas))
            yield Proposal(choice, zone.min_seconds)


def uneven_choices(candidates: CandidateNodes, size: JobSize) -> Iterator[NodeChoice]:
    """The nodes with the largest `max_tasks` of each of the lowest and smallest zones, if they hold all tasks.

    With `-n` and no --ntasks-per-node Slurm takes any nodes that together hold the tasks.
    """
    found = 0
    for zone in np.lexsort((candidates.node_count, candidates.level)):
        if candidates.node_count[zone] >= size.nodes and found < MAX_UNEVEN_ZONES:
            nodes = np.arange(int(candidates.node_begin[zone]), int(candidates.node_end[zone]))
            largest = nodes[np.argsort(-candidates.max_tasks[nodes], kind="stable")][:size.nodes]
            if candidates.max_tasks[largest].sum() >= size.tasks:
                found += 1
                yield NodeChoice(int(zone), largest, len(nodes) - size.nodes)


def zone_quotas(available: IntArray, tie_break: IntArray, wanted: int) -> Iterator[IntArray]:
    """Distinct quotas per zone; all arrays of shape (zones,), `tie_break` orders equal zones."""
    leaves = np.flatnonzero(available)
    leaves = leaves[np.argsort(tie_break[leaves], kind="stable")]
    sizes = available[leaves]
    by_size = np.argsort(-sizes, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(sizes[by_size]), wanted) + 1)
    largest = np.zeros_like(sizes)
    largest[by_size[:fewest]] = sizes[by_size[:fewest]]
    leaf_quotas = (water_fill(largest, wanted), fill_largest_first(sizes, wanted), water_fill(sizes, wanted))
    for quota in {quota.tobytes(): quota for quota in leaf_quotas}.values():
        quotas = np.zeros_like(available)
        quotas[leaves] = quota
        yield quotas


def take_nodes(candidates: CandidateNodes, nodes: IntArray, quotas: IntArray) -> IntArray:
    """The first of the nodes of each leaf, up to its quota; `nodes` ascend, `quotas` has shape (zones,)."""
    leaf = candidates.leaf[nodes]
    begin = run_starts(leaf)
    position = np.arange(len(nodes)) - np.repeat(begin, np.diff(np.append(begin, len(nodes))))
    return nodes[position < quotas[leaf]]


def fill_largest_first(available: IntArray, wanted: int) -> IntArray:
    """Quotas that fill the zones in descending order of size, and put the remainder where it fits best."""
    quotas, remaining = np.zeros_like(available), wanted
    for zone in np.argsort(-available, kind="stable"):
        if remaining <= available[zone]:
            open_zones = np.flatnonzero((quotas == 0) & (available >= remaining))
            quotas[open_zones[available[open_zones].argmin()]] = remaining
            break
        quotas[zone] = available[zone]
        remaining -= int(available[zone])
    return quotas


def water_fill(available: IntArray, wanted: int) -> IntArray:
    """Quotas as even as the sizes allow; the remainder goes to the zones with most free nodes."""
    quotas, remaining = np.zeros_like(available), wanted
    while remaining > 0:
        open_zones = np.flatnonzero(quotas < available)
        step = remaining // len(open_zones)
        if step == 0:
            by_free = open_zones[np.argsort(quotas[open_zones] - available[open_zones], kind="stable")]
            quotas[by_free[:remaining]] += 1
            break
        taken = np.minimum(step, available[open_zones] - quotas[open_zones])
        quotas[open_zones] += taken
        remaining -= int(taken.sum())
    return quotas


def segment_choices(candidates: CandidateNodes, problem: SearchProblem, zones: Sequence[RankedZone],
                    segment: int | None = None) -> Iterator[Proposal]:
    """Choices of each zone for a segment size, or for the largest divisors of the node count that fit a leaf zone."""
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        largest = int(available.max(initial=0))
        divisors = [size for size in range(min(largest, problem.size.nodes), 1, -1) if problem.size.nodes % size == 0]
        for size in [segment] if segment else divisors[:MAX_SEGMENT_SIZES]:
            quotas = segment_quotas(candidates, zone.index, available // size * size, problem.size.nodes)
            if quotas is not None:
                choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, quotas))
                yield Proposal(choice, zone.min_seconds)


def group_choices(candidates: CandidateNodes, problem: SearchProblem,
                  zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """Choices of each zone for named groups: each in as few zones as possible, one after the other."""
    sequences = list(dict.fromkeys(islice(permutations(problem.traffic.group_sizes()), MAX_GROUP_SEQUENCES)))
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        for sequence in sequences:
            left = available.copy()
            for size in sequence:
                quotas = segment_quotas(candidates, zone.index, left, size)
                if quotas is None:
                    break
                left -= quotas
            else:
                choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, available - left))
                yield Proposal(choice, zone.min_seconds)


def segment_quotas(candidates: CandidateNodes, zone: int, available: IntArray, wanted: int) -> IntArray | None:
    """Nodes of each leaf below `zone` in as few zones as possible at each level; None if it has too few.

    `available`, shape (zones,), holds the nodes of each leaf in whole segments; `wanted` is a multiple of a segment.
    The smallest zone that holds the rest is filled, else the largest one.
    """
    total = available.copy()
    for level in candidates.levels:
        total[level.parents] += np.add.reduceat(total[level.zones], level.child_begin)
    if total[zone] < wanted:
        return None
    quotas = np.zeros_like(available)
    stack = [(zone, wanted)]
    while stack:
        parent, rest = stack.pop()
        # the zone's own nodes count as a child
        parts = np.append(np.flatnonzero((candidates.parent == parent) & (total > 0)), parent)
        sizes = np.append(total[parts[:-1]], available[parent])
        for i in np.lexsort((candidates.tie_break[parts], -sizes)):
            fits = np.flatnonzero(sizes >= rest)
            chosen = int(fits[sizes[fits].argmin()]) if len(fits) else int(i)
            count = min(rest, int(sizes[chosen]))
            if not count:
                continue
            sizes[chosen] = 0
            rest -= count
            if parts[chosen] == parent:
                quotas[parent] = count
            else:
                stack.append((int(parts[chosen]), count))
            if not rest:
                break
    return quotas
