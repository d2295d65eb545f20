"""Placement of a job, computed from values alone: the nodes, and the ranks on them.

Choices of nodes are proposed, evaluated with their rank maps, and the best one is improved. An algorithm that
proposes choices is a function `(candidates, problem, zones) -> proposals`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot, Node
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, JobSize, resolve_job_size
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import IntArray, run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes, SlurmLimits, build_candidate_nodes, in_idle_leaf
from slurmdl.placement.eligibility import candidate_partitions, eligible_tasks, split_tasks
from slurmdl.placement.lower_bound import compute_lower_bound
from slurmdl.placement.rank_orders import RankOrders, best_rank_map, rank_orders
from slurmdl.placement.result import ConsideredChoice, Placement, best_cost, format_zone_counts
from slurmdl.placement.zones import (
    NodeChoice,
    Proposal,
    SearchProblem,
    even_choices,
    group_choices,
    make_choice,
    rank_zones,
    segment_choices,
    uneven_choices,
)
from slurmdl.text import pluralize, sample_names
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

MAX_TOO_SMALL_ZONES = 4  # zones listed as too small
MAX_EVALUATED_TASKS = 2048  # total tasks of evaluated choices; beyond it only choices that can win or tie
MAX_TIE_FACTOR = 2  # multiple of it, beyond which only choices that can win
MAX_SLOWDOWN = 2.0  # count-based choices are evaluated up to this multiple of the least estimate
MAX_FULL_SEARCH_TASKS = 256  # above it only the best count-based choice is evaluated
MAX_EVEN_ZONES = 1  # zones with even choices for such large jobs
MAX_SWAP_STARTS = 3  # choices of a mesh or of groups that are improved by node swaps
MAX_SWAPS_PER_ROUND = 32
MAX_SWAP_ROUNDS = 4
MAX_SWAP_TASKS = 64  # largest job with node swaps
MAX_LARGE_MESH_ZONES = 2  # zones whose choices are compared for a mesh of such a large job
MAX_AVOIDED_PATHS = 4  # slow inter-leaf paths that are avoided one after the other
#: relative difference of times up to which choices on blocks count as equal; docs/replay.md has the figures
MAX_BLOCK_TIE = 0.5


def place_job(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
              traffic: Traffic | None = None) -> Placement:
    """Choose the nodes of a job and its rank map on them.

    Each choice that may win is evaluated with its own rank map. The least cost wins, then the fewest zones, the least
    Slurm weight, and the fewest unused nodes. Powered-down nodes are used if the job does not fit on those that are
    up. If too few nodes are free now, the choice is among the nodes that fit when idle, and `free_now` is false.
    `traffic` is that of the options if it is None. With ranks per node in --dl-launcher, or a mesh with
    more than one task per node, the job still needs nodes for its tasks, but the traffic is that of its ranks.

    Raises PlacementError with the reason if no choice is possible or determined by the request, and UsageError for an
    unknown zone in --dl-zone, or for a mesh or groups that do not have the job's number of ranks or nodes.
    """
    if request.unplaceable_reason:
        raise PlacementError(request.unplaceable_reason)
    if request.nodelist:
        raise PlacementError("-w is given: the nodes are chosen already")
    size, traffic = resolve_job_size(request), traffic or request.options.traffic
    check_feasible(size, cluster, topology)
    limits = SlurmLimits.of_job(request, topology, size.nodes)
    ranks_per_node, tasks_per_node = request.options.ranks_per_node, size.max_tasks_per_node
    if not ranks_per_node:
        ranks_per_node = traffic.launched_ranks_per_node(size.tasks, size.nodes)
        if not ranks_per_node and size.tasks == size.nodes and not traffic.ps and request.script_ranks_per_node > 1:
            ranks_per_node = request.script_ranks_per_node
        if ranks_per_node:
            request = replace(request, options=request.options.with_ranks_per_node(ranks_per_node))
    if ranks_per_node:
        size = JobSize(size.nodes, size.nodes * ranks_per_node)
    if mismatch := traffic.size_mismatch(size.nodes, size.tasks):
        raise UsageError(mismatch)
    problem = SearchProblem(size, traffic, traffic.phases(size.tasks))
    search = PlacementSearch(request, cluster, topology, scores, problem, limits)
    reason = ""
    for boots, free_now in ((False, True), (True, True), (True, False)):
        for partition in candidate_partitions(request, cluster) or (None,):
            eligible = eligible_tasks(request, cluster, partition)
            max_tasks = eligible.tasks_when_idle if not free_now else \
                eligible.tasks_now if boots else eligible.tasks_up
            if ranks_per_node:
                max_tasks = np.where(max_tasks >= tasks_per_node, ranks_per_node, 0)
            if request.exclusive_blocks and free_now:
                max_tasks = np.where(in_idle_leaf(cluster, topology), max_tasks, 0)
            try:
                resolved = replace(search, request=replace(request, exclusive=eligible.exclusive))
                placement = resolved.best_placement(max_tasks, free_now)
            except PlacementError as error:
                rejected = ", ".join(f"{count} {why}" for why, count in eligible.rejection_counts.items())
                reason = f"{error}; rejected: {rejected}" if rejected else str(error)
            else:
                if not (boots and free_now):
                    return placement
                reason = f"{placement.reason}; too few nodes are up, so powered-down ones boot for the job"
                return replace(placement, boots=True, reason=reason)
    raise PlacementError(reason)


def check_feasible(size: JobSize, cluster: ClusterSnapshot, topology: Topology) -> None:
    """Raise PlacementError if no choice is possible: no zones, another cluster, or too many nodes or tasks."""
    if not topology.zones:
        raise PlacementError("the topology has no zones")
    if cluster.names != topology.nodes and topology.node_index.keys().isdisjoint(cluster.names):
        raise PlacementError(f"{topology.source or 'the topology'} has none of the cluster's nodes: the cluster has "
                             f"{sample_names(cluster.names, 3)}, the topology has {sample_names(topology.nodes, 3)}")
    if size.nodes > len(cluster.names):
        raise PlacementError(f"{pluralize(size.nodes, 'node')} requested; the cluster has {len(cluster.names)}")
    cpus = int(cluster.cpus.sum())
    if size.tasks > cpus:
        raise PlacementError(f"{pluralize(size.tasks, 'task')} requested; the cluster has {pluralize(cpus, 'CPU')}")


@dataclass(frozen=True)
class EvaluatedChoice:
    """A choice of candidate nodes with its rank orders and costs.

    `remainders` are the numbers of leaf zones of which only a part of the candidate nodes is chosen, and of their
    other candidates.
    """

    candidates: CandidateNodes
    choice: NodeChoice
    nodes: tuple[str, ...]
    nodes_per_zone: Counter[str]
    rank_orders: RankOrders
    weight: int
    remainders: tuple[int, int]

    @property
    def seconds(self) -> float:
        return self.rank_orders.rule_based_cost.sort_key[0]

    @property
    def sort_key(self) -> tuple[tuple[float, ...], int, int, int, int]:
        """Cost, zones, Slurm's weight, unused nodes and partly used zones; `loss_reason` names them."""
        return (self.rank_orders.rule_based_cost.sort_key, len(self.nodes_per_zone), self.weight,
                self.choice.unused_nodes, self.remainders[0])

    def loss_reason(self, winner: EvaluatedChoice, keeps_blocks_whole: bool) -> str:
        if keeps_blocks_whole and self.sort_key < winner.sort_key and self.remainders > winner.remainders:
            return f"{'faster, but ' * (self.seconds < winner.seconds)}leaves more blocks partly used"
        if self.seconds > winner.seconds:
            ratio = self.seconds / winner.seconds if winner.seconds else np.inf
            return f"{ratio:.3g} times the time per iteration" if 1.005 <= ratio < np.inf else "slower"
        reasons = ("more bytes", "more zones", "higher Slurm weight", "leaves more nodes of the zone unused",
                   "same cost, leaves more zones partly used")
        for reason, value, best in zip(reasons, self.sort_key, winner.sort_key, strict=True):
            if value != best:
                return reason
        return "same cost, later in topology order"


@dataclass(frozen=True)
class PlacementSearch:
    """Search for the placement of one job on one cluster."""

    request: JobRequest
    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores
    problem: SearchProblem
    limits: SlurmLimits

    @property
    def size(self) -> JobSize:
        return self.problem.size

    def best_placement(self, max_tasks: IntArray, free_now: bool) -> Placement:
        """Best placement on the nodes that can take their tasks; PlacementError if no zone has enough nodes.

        `max_tasks` gives the tasks that each node of the snapshot can take.
        """
        traffic = self.problem.traffic
        even_candidates = self.build_candidates(np.where(max_tasks >= self.size.max_tasks_per_node, max_tasks, 0))
        has_fixed_split = bool(self.request.ntasks_per_node or self.request.options.ranks_per_node)
        evaluated: list[EvaluatedChoice] = []
        if not self.has_enough_nodes(even_candidates) and not has_fixed_split:
            # uneven: nodes with fewer slots than an even split needs, next to nodes with more
            candidates = self.build_candidates(max_tasks)
            evaluated = [self.evaluate(candidates, choice) for choice in uneven_choices(candidates, self.size)
                         if self.limits.allows(candidates, choice.nodes)]
        is_even = not evaluated
        evaluated = evaluated or self.evaluate_proposals(even_candidates)
        winner = self.best_choice(evaluated)
        if is_even:
            winner, others = self.improve(winner, self.without_slow_path, MAX_AVOIDED_PATHS)
            evaluated += others
            depends_on_nodes = traffic.kind not in ("ring", "servers") or traffic.is_zone_dependent
            if depends_on_nodes and self.size.tasks <= MAX_SWAP_TASKS and not self.keeps_blocks_whole:
                starts = [winner]
                if traffic.tie:  # swaps of ranks change the order of the choices
                    others = sorted((entry for entry in evaluated if entry.nodes != winner.nodes),
                                    key=lambda entry: entry.sort_key)
                    starts += others[:MAX_SWAP_STARTS - 1]
                swapped = [self.improve(start, self.node_swaps, MAX_SWAP_ROUNDS)[0] for start in starts]
                winner = self.least_cost([*starts, *swapped], with_rank_swaps=True)
        rank_map = winner.rank_orders.best_map
        has_bound = is_even and np.ptp(winner.rank_orders.tasks) <= 1 and not self.scores.default_leaf_bandwidth and \
            not traffic.is_zone_dependent and traffic.kind in ("ring", "servers", "graph")
        bound = compute_lower_bound(even_candidates, self.problem, rank_map.cost.seconds) if has_bound else None
        # the first of several choices with the same nodes per zone is enough
        losers = {format_zone_counts(entry.nodes_per_zone): entry for entry in reversed(evaluated)
                  if entry.nodes_per_zone != winner.nodes_per_zone}
        considered = (ConsideredChoice(format_zone_counts(winner.nodes_per_zone), "chosen", rank_map.cost),
                      *(ConsideredChoice(label, entry.loss_reason(winner, self.keeps_blocks_whole),
                                         entry.rank_orders.rule_based_cost)
                        for label, entry in reversed(losers.items())),
                      *self.too_small_zones(even_candidates))
        zone_paths = {name: self.topology.path_of(name) for name in winner.nodes}
        return Placement(winner.nodes, rank_map, zone_paths, dict(winner.nodes_per_zone), free_now, considered,
                         self.choice_reason(winner, free_now), *(bound or (None, "")))

    def build_candidates(self, max_tasks: IntArray) -> CandidateNodes:
        return build_candidate_nodes(self.request, self.cluster, self.topology, self.scores, max_tasks)

    def has_enough_nodes(self, candidates: CandidateNodes) -> bool:
        """Whether any zone has enough nodes."""
        return bool((candidates.node_count >= self.size.nodes).any())

    def proposals(self, candidates: CandidateNodes) -> Iterator[Proposal]:
        """Choices that may win."""
        problem, zones = self.problem, rank_zones(candidates, self.problem)
        is_large = self.size.tasks > MAX_FULL_SEARCH_TASKS
        if self.limits.segment:
            yield from segment_choices(candidates, problem, zones, self.limits.segment)
            return
        if problem.traffic.kind == "mesh":
            zones = zones[:MAX_LARGE_MESH_ZONES] if is_large else zones
            yield from segment_choices(candidates, problem, zones)
        elif problem.traffic.kind == "groups":
            yield from group_choices(candidates, problem, zones)
        elif problem.depends_on_counts:
            if self.size.nodes > 1:
                if problem.has_two_roles:
                    from slurmdl.placement.parameter_servers import ps_choices as count_based
                else:
                    from slurmdl.placement.all_to_all import all_to_all_choices as count_based
                proposals = list(count_based(candidates, problem, zones))
                least = min((proposal.estimated_seconds for proposal in proposals), default=0.0)
                limit = (1.0 if is_large else MAX_SLOWDOWN) * least
                yield from (proposal for proposal in proposals if proposal.estimated_seconds <= limit)
            zones = zones[:MAX_EVEN_ZONES] if is_large else zones
        yield from even_choices(candidates, problem, zones)

    def evaluate_proposals(self, candidates: CandidateNodes) -> list[EvaluatedChoice]:
        """Evaluate the choices that may win, and a few more to show the alternatives."""
        if not self.has_enough_nodes(candidates):
            largest = ""
            if candidates.zone_count:
                most = int(candidates.node_count.argmax())
                largest = f" (the most: {candidates.node_count[most]} in {self.zone_name(candidates, most)})"
            raise PlacementError(f"no zone has {self.size.nodes} fitting nodes{largest}")
        evaluated: list[EvaluatedChoice] = []
        seen: set[tuple[bytes, int]] = set()
        for choice, min_seconds, _ in self.proposals(candidates):
            if not self.limits.allows(candidates, choice.nodes):
                continue
            least = min((entry.seconds for entry in evaluated), default=np.inf)
            signature = candidates.choice_signature(choice.nodes), choice.unused_nodes
            effort = len(evaluated) * self.size.tasks / MAX_EVALUATED_TASKS
            cannot_win = min_seconds > least if effort <= MAX_TIE_FACTOR else min_seconds >= least
            if signature not in seen and (effort <= 1 or not cannot_win):
                seen.add(signature)
                evaluated.append(self.evaluate(candidates, choice))
        if not evaluated:
            raise PlacementError(f"{self.limits}: no choice of {pluralize(self.size.nodes, 'node')} satisfies it now")
        return evaluated

    @property
    def keeps_blocks_whole(self) -> bool:
        """Whether the choice that leaves the fewest partly used blocks wins, unless others are much faster.

        Slurm's rule gives a job that a block can hold only a single block, so other jobs wait for whole blocks.
        """
        return self.limits.block_rule is not None and not self.problem.traffic.tie

    def evaluate(self, candidates: CandidateNodes, choice: NodeChoice) -> EvaluatedChoice:
        """Compute the rank orders of a choice; Slurm distributes the tasks over the nodes in snapshot order."""
        nodes = choice.nodes[np.argsort(candidates.snapshot_index[choice.nodes])]
        names = [self.cluster.names[i] for i in candidates.snapshot_index[nodes].tolist()]
        tasks = split_tasks(self.request, self.size, candidates.max_tasks[nodes].tolist())
        orders = rank_orders(list(zip(names, tasks, strict=True)), self.topology, self.scores, self.problem.traffic,
                             self.request.options.rank0, node_by_node=self.request.options.ranks_per_node > 0)
        counts = np.bincount(candidates.leaf[nodes])
        nodes_per_zone = Counter({self.zone_name(candidates, leaf): count
                                  for leaf, count in enumerate(counts.tolist()) if count})
        used = np.flatnonzero(counts)
        left = candidates.node_count[used] - counts[used]
        return EvaluatedChoice(candidates, choice, tuple(names), nodes_per_zone, orders,
                               int(candidates.weight[nodes].sum()), (int(np.count_nonzero(left)), int(left.sum())))

    def improve(self, best: EvaluatedChoice, neighbors: Callable[[EvaluatedChoice], Iterator[EvaluatedChoice]],
                max_rounds: int) -> tuple[EvaluatedChoice, list[EvaluatedChoice]]:
        """Replace a choice by the best of its neighbors while that helps; also returns all evaluated neighbors."""
        evaluated: list[EvaluatedChoice] = []
        for _ in range(max_rounds):
            found = [*neighbors(best)]
            evaluated += found
            better = self.least_cost([best, *found])
            if better is best:
                break
            best = better
        return best, evaluated

    def without_slow_path(self, best: EvaluatedChoice) -> Iterator[EvaluatedChoice]:
        """Choices without one of two leaf zones with a slow path between them."""
        paths, bottleneck = best.rank_orders.network.slow_paths, best.rank_orders.rule_based_cost.bottleneck_link
        if not paths.names:
            return
        path = bottleneck if bottleneck in paths.names else paths.names[int(paths.latency.argmax())]
        for leaf in path.split("|"):
            every = best.candidates
            kept = np.flatnonzero(every.topology_zone_index[every.leaf] != self.topology.zone_index[leaf])
            max_tasks = np.zeros(len(self.cluster.names), np.int64)
            max_tasks[every.snapshot_index[kept]] = every.max_tasks[kept]
            smaller = self.build_candidates(max_tasks)
            if self.has_enough_nodes(smaller):
                yield from self.evaluate_proposals(smaller)

    def node_swaps(self, best: EvaluatedChoice) -> Iterator[EvaluatedChoice]:
        """Choices with one node swapped for an unused one."""
        for choice in islice(single_node_swaps(best.candidates, best.choice), MAX_SWAPS_PER_ROUND):
            if self.limits.allows(best.candidates, choice.nodes):
                yield self.evaluate(best.candidates, choice)

    def best_choice(self, choices: Sequence[EvaluatedChoice]) -> EvaluatedChoice:
        """The choice of least cost, or on blocks see `keeps_blocks_whole`."""
        if self.keeps_blocks_whole:
            longest = min(entry.seconds for entry in choices) * (1 + MAX_BLOCK_TIE)
            return min((entry for entry in choices if entry.seconds <= longest),
                       key=lambda entry: (entry.remainders, entry.sort_key))
        return self.least_cost(choices)

    def least_cost(self, choices: Sequence[EvaluatedChoice], with_rank_swaps: bool = False) -> EvaluatedChoice:
        """The choice of least cost, of equal ones the first; for meshes and groups see `best_cost`."""
        ordered = sorted(choices, key=lambda entry: entry.sort_key)
        costs = [entry.rank_orders.best_map.cost if with_rank_swaps else entry.rank_orders.rule_based_cost
                 for entry in ordered]
        return ordered[best_cost(costs, self.problem.traffic.tie)]

    def zone_name(self, candidates: CandidateNodes, zone: int) -> str:
        index = int(candidates.topology_zone_index[zone])
        return self.topology.zones[index] if index >= 0 else "the whole cluster"

    def too_small_zones(self, candidates: CandidateNodes) -> Iterator[ConsideredChoice]:
        """The largest of the zones with too few fitting nodes."""
        small = np.flatnonzero(candidates.node_count < self.size.nodes)
        for zone in small[np.argsort(-candidates.node_count[small], kind="stable")][:MAX_TOO_SMALL_ZONES]:
            needed = pluralize(self.size.nodes, "node")
            yield ConsideredChoice(self.zone_name(candidates, zone),
                                   f"too small, {candidates.node_count[zone]} of {needed} fit")

    def choice_reason(self, winner: EvaluatedChoice, free_now: bool) -> str:
        zone = self.zone_name(winner.candidates, winner.choice.zone)
        counts = format_zone_counts(winner.nodes_per_zone)
        if len(winner.nodes_per_zone) == 1:
            reason = f"zone {zone} holds all nodes"
        elif winner.choice.is_smallest_zone:
            reason = f"no smaller zone than {zone} holds all nodes; below it {counts}"
        else:
            reason = f"{counts} below {zone} take less time than any smaller zone"
        return reason if free_now else f"{reason}; not all of them are free now"


def single_node_swaps(candidates: CandidateNodes, choice: NodeChoice) -> Iterator[NodeChoice]:
    """Choices with one node swapped for an unused node of the same tree; leaves in use come first.

    Only the last used and the first unused node of each leaf are swapped: its other nodes are no better.
    """
    is_used = np.zeros(len(candidates.snapshot_index), bool)
    is_used[choice.nodes] = True
    root = choice.zone
    while candidates.parent[root] >= 0:
        root = int(candidates.parent[root])
    is_free = ~is_used
    is_free[:candidates.node_begin[root]] = is_free[candidates.node_end[root]:] = False
    used, free = np.flatnonzero(is_used), np.flatnonzero(is_free)
    removable = used[np.append(run_starts(candidates.leaf[used])[1:], len(used)) - 1]
    addable = free[run_starts(candidates.leaf[free])] if len(free) else free
    is_near = np.isin(candidates.leaf[addable], candidates.leaf[used])
    for added in np.concatenate([addable[is_near], addable[~is_near]]):
        for removed in removable:
            nodes = np.append(used[used != removed], added)
            zone = int(candidates.leaf[nodes.min()])
            while not candidates.node_begin[zone] <= nodes.min() <= nodes.max() < candidates.node_end[zone]:
                zone = int(candidates.parent[zone])
            yield make_choice(candidates, zone, nodes)


def select_subset(allocated: Sequence[str], request: JobRequest, required_node: str, topology: Topology,
                  scores: LinkScores, traffic: Traffic | None = None) -> tuple[str, ...]:
    """Select the nodes to keep from an allocation, by the same search as `place_job`.

    If the selection lacks the required node, that node replaces the selected node whose loss costs least. Raises
    PlacementError if the counts contradict each other, or if the topology has no zones.

    Args:
        allocated: nodes to choose from, in Slurm's order; each can take its share of the tasks.
        request: gives the number of nodes to keep, the tasks and the --dl-* options.
        required_node: one of the nodes, e.g. the node of the batch script.
    """
    nodes, _ = request.nodes or (1, None)
    tasks = request.ntasks or nodes * (request.ntasks_per_node or 1)
    size, traffic = JobSize(nodes, tasks), traffic or request.options.traffic
    cpus = size.max_tasks_per_node
    cluster = ClusterSnapshot.from_nodes([Node(name, ("IDLE",), cpus=cpus, cpus_unallocated=cpus)
                                          for name in allocated])
    selected = place_job(JobRequest(replace(request.options, zone=()), request.nodes, tasks, exclusive=True), cluster,
                         topology, scores, traffic).nodes
    if required_node in selected:
        return selected

    def cost_key(kept: tuple[str, ...]) -> tuple[float, ...]:
        slots = [(name, size.tasks_on_node(i)) for i, name in enumerate(kept)]
        return best_rank_map(slots, topology, scores, traffic, request.options.rank0).cost.sort_key

    alternatives = [tuple(name for name in allocated if name == required_node or (name in selected and name != lost))
                    for lost in _worst_node_per_leaf(selected, topology, scores)]
    return min(alternatives, key=cost_key)


def _worst_node_per_leaf(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> Iterable[str]:
    """The node of each leaf zone with the slowest link, of equal ones with the highest latency."""
    bandwidth, latency = capacity.node_links(nodes, scores)
    worst: dict[str, str] = {}
    for i in np.lexsort((-latency, bandwidth)):
        worst.setdefault(topology.leaf_of(nodes[i]), nodes[i])
    return worst.values()
