"""Search for the nodes of a job: algorithms propose choices, which are evaluated with their rank maps and improved.

An algorithm is a function `(pool, problem, zone candidates) -> proposals` in slurmdl.placement.algorithms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.all_to_all import all_to_all_choices
from slurmdl.placement.arrays import IntArray, run_starts
from slurmdl.placement.block_rule import BlockRule, block_rule
from slurmdl.placement.candidate_nodes import CandidateNodes, build_candidate_nodes
from slurmdl.placement.eligibility import JobSize, split_tasks
from slurmdl.placement.lower_bound import compute_lower_bound
from slurmdl.placement.parameter_servers import ps_choices
from slurmdl.placement.quotas import even_choices, group_choices, segment_choices, uneven_choices
from slurmdl.placement.rank_orders import RankOrders
from slurmdl.placement.result import Candidate, Placement, format_zone_counts, rank_tied_costs
from slurmdl.placement.traffic import Traffic
from slurmdl.placement.zones import NodeChoice, Proposal, SearchProblem, make_choice, rank_zones
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology

MAX_TOO_SMALL_ZONES = 4  # zones listed as too small
MAX_EVALUATED_TASKS = 2048  # total tasks of evaluated choices; beyond it only choices that can win or tie
MAX_TIE_FACTOR = 2  # multiple of it, beyond which only choices that can win
MAX_SLOWDOWN = 2.0  # count-based choices are evaluated up to this multiple of the least estimate
MAX_FULL_SEARCH_TASKS = 256  # above it only the best count-based choice is evaluated
MAX_EVEN_ZONES = 1  # zones with even choices for such large jobs
MAX_SWAPS_PER_ROUND = 32  # node swaps
MAX_SWAP_ROUNDS = 4
MAX_SWAP_TASKS = 64  # largest job with node swaps
MAX_LARGE_MESH_ZONES = 2  # zones whose choices are compared for a mesh of such a large job
MAX_AVOIDED_PATHS = 4  # slow inter-leaf paths that are avoided one after the other
#: relative difference of times up to which choices on blocks count as equal; docs/replay.md has the figures
MAX_BLOCK_TIE = 0.5


@dataclass(frozen=True)
class EvaluatedChoice:
    """A choice of nodes with its rank orders and costs.

    `remainders` are the numbers of leaf zones of which only a part of the candidate nodes is chosen, and of their
    other candidates.
    """

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
    traffic: Traffic

    @property
    def job(self) -> JobSize:
        return self.problem.job

    def best_placement(self, max_tasks: IntArray, free_now: bool) -> Placement:
        """Best placement on the nodes that can take their tasks; PlacementError if no zone has enough nodes.

        `max_tasks` gives the tasks that each node of the snapshot can take.
        """
        even_pool = pool = self.build_pool(np.where(max_tasks >= self.job.max_tasks_per_node, max_tasks, 0))
        evaluated: list[EvaluatedChoice] = []
        has_fixed_split = bool(self.request.ntasks_per_node or self.request.dl.ranks_per_node)
        if not self.has_enough_nodes(pool) and not has_fixed_split:
            # uneven: nodes with fewer slots than an even split needs, next to nodes with more
            pool = self.build_pool(max_tasks)
            evaluated = [self.evaluate(pool, choice) for choice in uneven_choices(pool, self.job)
                         if self.is_allowed(pool, choice)]
        is_even = not evaluated
        if is_even:
            evaluated = self.evaluate_proposals(even_pool)
        winner = self.best_choice(evaluated)
        if is_even:
            pool, winner, others = self.avoid_slow_paths(even_pool, winner)
            evaluated += others
            depends_on_order = self.traffic.needs_search or self.traffic.is_zone_dependent
            if depends_on_order and not self.traffic.prefers_few_bytes and self.job.tasks <= MAX_SWAP_TASKS and \
                    not self.keeps_blocks_whole:
                winner = self.swap_nodes(pool, winner)
        rank_map = winner.rank_orders.best_map
        has_bound = is_even and np.ptp(winner.rank_orders.tasks) <= 1 and not self.scores.default_leaf_bandwidth and \
            not (self.traffic.is_zone_dependent or self.traffic.matrices or self.traffic.mesh or self.traffic.groups)
        bound = compute_lower_bound(even_pool, self.problem, rank_map.cost.seconds) if has_bound else None
        # the first of several choices with the same nodes per zone is enough
        losers = {format_zone_counts(entry.nodes_per_zone): entry for entry in reversed(evaluated)
                  if entry.nodes_per_zone != winner.nodes_per_zone}
        candidates = (Candidate(format_zone_counts(winner.nodes_per_zone), "chosen", rank_map.cost),
                      *(Candidate(label, entry.loss_reason(winner, self.keeps_blocks_whole),
                                  entry.rank_orders.rule_based_cost) for label, entry in reversed(losers.items())),
                      *self.too_small_zones(even_pool))
        zone_paths = {name: self.topology.path_of(name) for name in winner.nodes}
        return Placement(winner.nodes, rank_map, zone_paths, dict(winner.nodes_per_zone), free_now, candidates,
                         self.choice_reason(pool, winner, free_now), *(bound or (None, "")))

    def build_pool(self, max_tasks: IntArray) -> CandidateNodes:
        return build_candidate_nodes(self.request, self.cluster, self.topology, self.scores, max_tasks)

    def has_enough_nodes(self, pool: CandidateNodes) -> bool:
        """Whether any zone has enough nodes."""
        return bool((pool.node_count >= self.job.nodes).any())

    def proposals(self, pool: CandidateNodes) -> Iterator[Proposal]:
        """Choices that may win."""
        problem, candidates = self.problem, rank_zones(pool, self.problem)
        if self.segment:
            yield from segment_choices(pool, problem, candidates, self.segment)
            return
        if problem.mesh:
            if self.job.tasks > MAX_FULL_SEARCH_TASKS:
                candidates = candidates[:MAX_LARGE_MESH_ZONES]
            yield from segment_choices(pool, problem, candidates)
        if problem.group_sizes:
            yield from group_choices(pool, problem, candidates)
        if problem.depends_on_counts:
            is_large = self.job.tasks > MAX_FULL_SEARCH_TASKS
            if self.job.nodes > 1:
                algorithm = ps_choices if problem.has_two_roles else all_to_all_choices
                count_based = list(algorithm(pool, problem, candidates))
                least = min((proposal.estimated_seconds for proposal in count_based), default=0.0)
                limit = (1.0 if is_large else MAX_SLOWDOWN) * least
                yield from (proposal for proposal in count_based if proposal.estimated_seconds <= limit)
            if is_large:
                candidates = candidates[:MAX_EVEN_ZONES]
        yield from even_choices(pool, problem, candidates)

    def evaluate_proposals(self, pool: CandidateNodes) -> list[EvaluatedChoice]:
        """Evaluate the choices that may win, and a few more to show the alternatives."""
        if not self.has_enough_nodes(pool):
            most = int(pool.node_count.argmax()) if pool.zone_count else -1
            largest = f" (the most: {pool.node_count[most]} in {self.zone_name(pool, most)})" if most >= 0 else ""
            raise PlacementError(f"no zone has {self.job.nodes} fitting nodes{largest}")
        evaluated: list[EvaluatedChoice] = []
        seen: set[tuple[bytes, int]] = set()
        for choice, min_seconds, _ in self.proposals(pool):
            if not self.is_allowed(pool, choice):
                continue
            least = min((entry.seconds for entry in evaluated), default=np.inf)
            signature = pool.choice_signature(choice.nodes), choice.unused_nodes
            effort = len(evaluated) * self.job.tasks / MAX_EVALUATED_TASKS
            cannot_win = min_seconds > least if effort <= MAX_TIE_FACTOR else min_seconds >= least
            if signature not in seen and (effort <= 1 or not cannot_win):
                seen.add(signature)
                evaluated.append(self.evaluate(pool, choice))
        if not evaluated:
            limit = f"--segment={self.segment}" if self.segment else f"--switches={self.request.switches}" \
                if self.request.switches else "topology/block without --segment"
            raise PlacementError(f"{limit}: no choice of {pluralize(self.job.nodes, 'node')} satisfies it now")
        return evaluated

    @property
    def segment(self) -> int:
        """Nodes of each segment that must share a leaf zone; 0 without segments, which only blocks have."""
        segment = self.request.segment if self.topology.kind == "block" else 0
        return segment if segment <= self.job.nodes else 0

    def is_allowed(self, pool: CandidateNodes, choice: NodeChoice) -> bool:
        """Whether a choice satisfies --segment and --switches, and the rule of blocks."""
        counts = np.bincount(pool.leaf[choice.nodes])
        if (self.segment and (counts % self.segment).any()) or 0 < self.request.switches < np.count_nonzero(counts):
            return False
        return self.block_rule is None or \
            self.block_rule.allows(self.block_number[pool.topology_zone_index[np.flatnonzero(counts)]])

    @cached_property
    def block_rule(self) -> BlockRule | None:
        """Slurm's rule for jobs without segments on blocks; None if it does not apply.

        With --dl-node-binding=zone the job gets the segments of the choice.
        """
        if self.topology.kind != "block" or self.segment or self.request.dl.node_binding == "zone":
            return None
        return block_rule(self.topology, self.job.nodes)

    @cached_property
    def keeps_blocks_whole(self) -> bool:
        """Whether the choice that leaves the fewest partly used blocks wins, unless others are much faster.

        Slurm's rule gives a job that a block can hold only a single block, so other jobs wait for whole blocks.
        """
        return self.block_rule is not None and not self.traffic.prefers_few_bytes

    @cached_property
    def block_number(self) -> IntArray:
        """Position of each base block among them; shape (zones of the topology,)."""
        return np.asarray(np.cumsum(self.topology.level == 0) - 1)

    def evaluate(self, pool: CandidateNodes, choice: NodeChoice) -> EvaluatedChoice:
        """Compute the rank orders of a choice; Slurm distributes the tasks over the nodes in snapshot order."""
        nodes = choice.nodes[np.argsort(pool.snapshot_index[choice.nodes])]
        names = [self.cluster.names[i] for i in pool.snapshot_index[nodes].tolist()]
        tasks = split_tasks(self.request, self.job, pool.max_tasks[nodes].tolist())
        rank_orders = RankOrders(list(zip(names, tasks, strict=True)), self.topology, self.scores, self.traffic,
                                 self.request.dl.rank0, node_by_node=self.request.dl.ranks_per_node > 0)
        counts = np.bincount(pool.leaf[nodes])
        nodes_per_zone = Counter({self.zone_name(pool, leaf): count for leaf, count in enumerate(counts.tolist())
                                  if count})
        used = np.flatnonzero(counts)
        left = pool.node_count[used] - counts[used]
        return EvaluatedChoice(choice, tuple(names), nodes_per_zone, rank_orders, int(pool.weight[nodes].sum()),
                               (int(np.count_nonzero(left)), int(left.sum())))

    def avoid_slow_paths(self, pool: CandidateNodes,
                         best: EvaluatedChoice) -> tuple[CandidateNodes, EvaluatedChoice, list[EvaluatedChoice]]:
        """Improve a choice by excluding one of two leaf zones with a slow path between them, while that helps.

        Returns the pool of the best choice, that choice, and all other evaluated choices.
        """
        others: list[EvaluatedChoice] = []
        for _ in range(MAX_AVOIDED_PATHS):
            paths, bottleneck = best.rank_orders.network.slow_paths, best.rank_orders.rule_based_cost.bottleneck_link
            if not paths.names:
                break
            path = bottleneck if bottleneck in paths.names else paths.names[int(paths.latency.argmax())]
            evaluated = []
            for leaf in path.split("|"):
                kept = np.flatnonzero(pool.topology_zone_index[pool.leaf] != self.topology.zone_index[leaf])
                max_tasks = np.zeros(len(self.cluster.names), np.int64)
                max_tasks[pool.snapshot_index[kept]] = pool.max_tasks[kept]
                smaller = self.build_pool(max_tasks)
                if self.has_enough_nodes(smaller):
                    evaluated += [(smaller, entry) for entry in self.evaluate_proposals(smaller)]
            others += [entry for _, entry in evaluated]
            new_pool, better = min(evaluated, key=lambda entry: entry[1].sort_key, default=(pool, best))
            if better.sort_key >= best.sort_key:
                break
            pool, best = new_pool, better
        return pool, best, others

    def swap_nodes(self, pool: CandidateNodes, best: EvaluatedChoice) -> EvaluatedChoice:
        """Improve a choice by the best single-node swap of each round, while one helps."""
        for _ in range(MAX_SWAP_ROUNDS):
            swaps = islice(single_node_swaps(pool, best.choice), MAX_SWAPS_PER_ROUND)
            better = min((self.evaluate(pool, choice) for choice in swaps if self.is_allowed(pool, choice)),
                         key=lambda entry: entry.sort_key, default=best)
            if better.sort_key >= best.sort_key:
                break
            best = better
        return best

    def best_choice(self, choices: Sequence[EvaluatedChoice]) -> EvaluatedChoice:
        """The choice of least cost; for a mesh or groups see `rank_tied_costs`, for blocks `keeps_blocks_whole`."""
        if self.keeps_blocks_whole:
            longest = min(entry.seconds for entry in choices) * (1 + MAX_BLOCK_TIE)
            return min((entry for entry in choices if entry.seconds <= longest),
                       key=lambda entry: (entry.remainders, entry.sort_key))
        if not self.traffic.prefers_few_bytes:
            return min(choices, key=lambda entry: entry.sort_key)
        ordered = sorted(choices, key=lambda entry: entry.sort_key)
        return ordered[rank_tied_costs([entry.rank_orders.rule_based_cost for entry in ordered])[0]]

    def zone_name(self, pool: CandidateNodes, zone: int) -> str:
        index = int(pool.topology_zone_index[zone])
        return self.topology.zones[index] if index >= 0 else "the whole cluster"

    def too_small_zones(self, pool: CandidateNodes) -> Iterator[Candidate]:
        """The largest of the zones with too few fitting nodes."""
        small = np.flatnonzero(pool.node_count < self.job.nodes)
        for zone in small[np.argsort(-pool.node_count[small], kind="stable")][:MAX_TOO_SMALL_ZONES]:
            yield Candidate(self.zone_name(pool, zone),
                            f"too small, {pool.node_count[zone]} of {pluralize(self.job.nodes, 'node')} fit")

    def choice_reason(self, pool: CandidateNodes, winner: EvaluatedChoice, free_now: bool) -> str:
        zone, counts = self.zone_name(pool, winner.choice.zone), format_zone_counts(winner.nodes_per_zone)
        if len(winner.nodes_per_zone) == 1:
            reason = f"zone {zone} holds all nodes"
        elif winner.choice.is_smallest_zone:
            reason = f"no smaller zone than {zone} holds all nodes; below it {counts}"
        else:
            reason = f"{counts} below {zone} take less time than any smaller zone"
        return reason if free_now else f"{reason}; not all of them are free now"


def single_node_swaps(pool: CandidateNodes, choice: NodeChoice) -> Iterator[NodeChoice]:
    """Choices with one node swapped for an unused node of the same tree; leaves in use come first.

    Only the last used and the first unused node of each leaf are swapped: its other nodes are no better.
    """
    is_used = np.zeros(len(pool.snapshot_index), bool)
    is_used[choice.nodes] = True
    root = _root_of(pool, choice.zone)
    is_free = ~is_used
    is_free[:pool.node_begin[root]] = is_free[pool.node_end[root]:] = False
    used, free = np.flatnonzero(is_used), np.flatnonzero(is_free)
    removable = used[np.append(run_starts(pool.leaf[used])[1:], len(used)) - 1]
    addable = free[run_starts(pool.leaf[free])] if len(free) else free
    is_near = np.isin(pool.leaf[addable], pool.leaf[used])
    for added in np.concatenate([addable[is_near], addable[~is_near]]):
        for removed in removable:
            nodes = np.append(used[used != removed], added)
            yield make_choice(pool, _smallest_common_zone(pool, nodes), nodes)


def _root_of(pool: CandidateNodes, zone: int) -> int:
    while pool.parent[zone] >= 0:
        zone = int(pool.parent[zone])
    return zone


def _smallest_common_zone(pool: CandidateNodes, nodes: IntArray) -> int:
    """Smallest zone that holds all these nodes of one tree."""
    first, last, zone = int(nodes.min()), int(nodes.max()), int(pool.leaf[nodes[0]])
    while not pool.node_begin[zone] <= first <= last < pool.node_end[zone]:
        zone = int(pool.parent[zone])
    return zone
