"""TODO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.algorithms.all_to_all import all_to_all_choices
from slurmdl.placement.algorithms.apportion import even_choices, uneven_choices
from slurmdl.placement.algorithms.lower_bound import compute_lower_bound
from slurmdl.placement.algorithms.node_swaps import single_node_swaps
from slurmdl.placement.algorithms.ps_search import ps_choices
from slurmdl.placement.algorithms.zone_candidates import (
    NodeChoice,
    ZoneCandidate,
    depends_on_counts,
    has_two_roles,
    rank_zones,
)
from slurmdl.placement.candidate_nodes import CandidateNodes, IntArray
from slurmdl.placement.candidate_nodes import build_candidate_nodes as pool_of
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.ranks.rank_orders import RankOrders
from slurmdl.placement.result import Candidate, Placement, format_zone_counts
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.slurm.step_layout import block_distribution
from slurmdl.topology.topology import Topology


def count_based_choices(pool: CandidateNodes, job: JobSize, zone_candidates: Sequence[ZoneCandidate],
            phases: Sequence[Phase], max_slowdown: float) -> Iterator[tuple[ZoneCandidate, NodeChoice]]:
    """The choice of the least time in each of the most promising zones.

    Parameters
    ----------
    almost : choices that take more than so many times the least time are left out.
    """
    if job.nodes == 1:
        return
    found = ps_choices(pool, job, zone_candidates, phases) if has_two_roles(
        phases) else all_to_all_choices(pool, job, zone_candidates, phases)
    ways = list(found)
    least = min((seconds for seconds, _, _ in ways), default=0.0)
    for seconds, start, choice in ways:
        if seconds <= max_slowdown * least:
            yield start, choice


#: most zones that are listed as too small
MAX_TOO_SMALL_ZONES = 4
#: tasks of all choices that are compared for those who read what lost, where they cannot win
MAX_EVALUATED_TASKS = 2048
#: how many times as many where they can at most take the same time
MAX_TIE_FACTOR = 2
#: choices by counts are scored up to so many times the least time, by their own figures
MAX_SLOWDOWN = 2.0
#: tasks above which only the best of them is scored, and the plain choices are tried in so few zones
MAX_FULL_SEARCH_TASKS, MAX_EVEN_ZONES = 256, 1
#: where counts do not tell the time: exchanges of a node in a round, rounds, and most tasks of such a job
MAX_SWAPS_PER_ROUND, MAX_SWAP_ROUNDS, MAX_SWAP_TASKS = 32, 4, 64
#: slow ways between zones that are avoided one after the other
MAX_AVOIDED_PATHS = 4


@dataclass(frozen=True)
class _EvaluatedChoice:
    """One choice of nodes with the orders of the ranks that it leads to."""

    choice: NodeChoice
    nodes: tuple[str, ...]
    nodes_per_zone: Counter[str]
    rank_orders: RankOrders
    weight: int

    @property
    def sort_key(self) -> tuple[tuple[float, ...], int, int, int]:
        """Sort key; the names of its parts stand in `verdict`."""
        return self.rank_orders.rule_based_cost.sort_key, len(
            self.nodes_per_zone), self.weight, self.choice.unused_nodes

    def loss_reason(self, winner: _EvaluatedChoice) -> str:
        """Why this choice lost."""
        seconds, least = self.rank_orders.rule_based_cost.sort_key[0], winner.rank_orders.rule_based_cost.sort_key[0]
        if seconds > least:
            return f"{seconds / least:.3g} times the time per iteration" if least else "slower"
        names = ("more bytes", "more zones", "a higher Slurm weight", "leaves a larger rest of the zone unused")
        return next((name for name, mine, best in zip(names, self.sort_key, winner.sort_key, strict=True) if mine != best),
                    "the same cost, less even" if self.choice.zone == winner.choice.zone
                    else "the same cost, later in the order of the topology")


@dataclass(frozen=True)
class PlacementSearch:
    """One job on one cluster."""

    request: JobRequest
    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores
    job: JobSize
    traffic: Traffic
    phases: list[Phase]

    def best_placement(self, max_tasks: IntArray, free_now: bool) -> Placement:
        """The best choice among the nodes with room for their tasks.

        Parameters
        ----------
        room : shape (nodes of the cluster,), tasks that each node can take.

        Raises
        ------
        PlacementError : no zone has enough of them.
        """
        pool = self.build_pool(np.where(max_tasks >= self.job.max_tasks_per_node, max_tasks, 0))
        whole = pool
        if not (pool.node_count >= self.job.nodes).any() and not self.request.ntasks_per_node:
            # nodes with less room than an even share serve where others have more
            all_nodes = self.build_pool(max_tasks)
            scored = [self.evaluate(all_nodes, choice) for choice in uneven_choices(all_nodes, self.job)]
        else:
            scored = []
        even = not scored
        scored = scored or self.evaluate_candidates(pool)
        winner = min(scored, key=lambda entry: entry.sort_key)
        if even:
            pool, winner, more = self.avoid_slow_paths(pool, winner)
            scored += more
        if even and not self.traffic.is_count_based and self.request.dl.place == "pack" and self.job.tasks <= MAX_SWAP_TASKS:
            winner = self.swap_nodes(pool, winner)
        ranks = winner.rank_orders.best_map()
        # of choices with the same nodes per zone the first one tells enough
        losers = {format_zone_counts(entry.nodes_per_zone): entry for entry in reversed(
            scored) if entry.nodes_per_zone != winner.nodes_per_zone}
        lost = [Candidate(name, entry.loss_reason(winner), entry.rank_orders.rule_based_cost)
                          for name, entry in reversed(losers.items())]
        least = compute_lower_bound(
    whole,
    self.job,
    self.phases,
     ranks.cost.seconds) if even and self.has_lower_bound else None
        return Placement(
            winner.nodes, ranks, {name: self.topology.path_of(name) for name in winner.nodes},
            dict(winner.nodes_per_zone), free_now,
            (Candidate(format_zone_counts(winner.nodes_per_zone), "chosen", ranks.cost), *lost, *self.too_small_zones(whole)),
            self.choice_reason(pool, winner, free_now), least.seconds if least else None, least.reason if least else "")

    @property
    def has_lower_bound(self) -> bool:
        """Whether the phases say all: not where they follow the zones, or are what the user gave."""
        return not self.traffic.is_zone_dependent and not self.traffic.matrices

    def build_pool(self, max_tasks: IntArray) -> CandidateNodes:
        dl = self.request.dl
        # Slurm does not join trees that no switch connects
        joined = self.topology.kind != "tree" or dl.place == "spread"
        return pool_of(self.cluster, self.topology, self.scores, max_tasks, dl.zone, joined, self.request.seed)

    def evaluate_candidates(self, pool: CandidateNodes) -> list[_EvaluatedChoice]:
        """The choices that may win, and a few more for those who read what lost."""
        wanted = self.job.nodes
        if not (pool.node_count >= wanted).any():
            most = int(pool.node_count.argmax()) if len(pool.topology_zone_index) else -1
            largest = f" (the most: {pool.node_count[most]} in {self.zone_name(pool, most)})" if most >= 0 else ""
            raise PlacementError(f"no zone has {wanted} fitting nodes{largest}")
        found: list[_EvaluatedChoice] = []
        seen: set[tuple[bytes, int]] = set()
        for start, choice in self.candidates(pool):
            least = min((entry.rank_orders.rule_based_cost.sort_key[0] for entry in found), default=np.inf)
            # of choices that no figure tells apart one is enough
            nodes = pool.choice_signature(choice.nodes), choice.unused_nodes
            spent = len(found) * self.job.tasks / MAX_EVALUATED_TASKS
            hopeless = start.min_seconds > least if spent <= MAX_TIE_FACTOR else start.min_seconds >= least
            if nodes in seen or (spent > 1 and hopeless):
                continue
            seen.add(nodes)
            found.append(self.evaluate(pool, choice))
        return found

    def candidates(self, pool: CandidateNodes) -> Iterator[tuple[ZoneCandidate, NodeChoice]]:
        """The choices that may win, each with the zone that it was made in."""
        place, wanted = self.request.dl.place, self.job.nodes
        promising = rank_zones(pool, self.job, place, self.phases, self.traffic.is_zone_dependent)
        if place == "pack" and depends_on_counts(self.phases):
            large = self.job.tasks > MAX_FULL_SEARCH_TASKS
            yield from count_based_choices(pool, self.job, promising, self.phases, 1.0 if large else MAX_SLOWDOWN)
            promising = promising[:MAX_EVEN_ZONES] if large else promising
        for start in promising:
            for choice in even_choices(pool, start, wanted, place):
                yield start, choice

    def avoid_slow_paths(self, pool: CandidateNodes,
                         best: _EvaluatedChoice) -> tuple[CandidateNodes, _EvaluatedChoice, list[_EvaluatedChoice]]:
        """The choice without one of two zones with a slow way between them, while that is better.

        Returns
        -------
        the pool that the choice was made in, the choice, and all others that were compared.
        """
        others: list[_EvaluatedChoice] = []
        for _ in range(MAX_AVOIDED_PATHS):
            slow, busiest = best.rank_orders.network.slow_paths, best.rank_orders.rule_based_cost.bottleneck_link
            if not slow.names:
                break
            tried = []
            for name in (busiest if busiest in slow.names else slow.names[int(slow.latency.argmax())]).split("|"):
                leaf = self.topology.zone_index[name]
                left = np.flatnonzero(pool.topology_zone_index[pool.leaf] != leaf)
                room = np.zeros(len(self.cluster.names), np.int64)
                room[pool.snapshot_index[left]] = pool.max_tasks[left]
                rest = self.build_pool(room)
                if (rest.node_count >= self.job.nodes).any():
                    tried += [(rest, entry) for entry in self.evaluate_candidates(rest)]
            others += [entry for _, entry in tried]
            rest, better = min(tried, key=lambda entry: entry[1].sort_key, default=(pool, best))
            if better.sort_key >= best.sort_key:
                break
            pool, best = rest, better
        return pool, best, others

    def swap_nodes(self, pool: CandidateNodes, best: _EvaluatedChoice) -> _EvaluatedChoice:
        """The choice after exchanges of one node for another, the best of each round, while one helps."""
        for _ in range(MAX_SWAP_ROUNDS):
            found = [
    self.evaluate(
        pool,
        choice) for choice in islice(
            single_node_swaps(
                pool,
                best.choice),
                 MAX_SWAPS_PER_ROUND)]
            better = min(found, key=lambda entry: entry.sort_key, default=best)
            if better.sort_key >= best.sort_key:
                break
            best = better
        return best

    def evaluate(self, pool: CandidateNodes, choice: NodeChoice) -> _EvaluatedChoice:
        """A choice with its rank map; Slurm deals the tasks to the nodes in the order of the snapshot."""
        nodes = choice.nodes[np.argsort(pool.snapshot_index[choice.nodes])]
        names = [self.cluster.names[i] for i in pool.snapshot_index[nodes].tolist()]
        room = pool.max_tasks[nodes]
        tasks = [self.job.tasks_on_node(i) for i in range(len(names))] if room.min() >= self.job.max_tasks_per_node else \
            block_distribution(room.tolist(), self.job.tasks)
        ranks = RankOrders(list(zip(names, tasks, strict=True)), self.topology, self.scores, self.traffic,
                       self.request.dl.rank0)
        zones = Counter({self.zone_name(pool, leaf): count
                         for leaf, count in enumerate(np.bincount(pool.leaf[nodes]).tolist()) if count})
        return _EvaluatedChoice(choice, tuple(names), zones, ranks, int(pool.weight[nodes].sum()))

    def zone_name(self, pool: CandidateNodes, zone: int) -> str:
        index = int(pool.topology_zone_index[zone])
        return self.topology.zones[index] if index >= 0 else "the whole cluster"

    def too_small_zones(self, pool: CandidateNodes) -> Iterator[Candidate]:
        """The largest zones among those that have some fitting nodes, but not enough."""
        small = np.argsort(-np.where(pool.node_count < self.job.nodes, pool.node_count, 0),
                           kind="stable")[:MAX_TOO_SMALL_ZONES]
        for zone in small:
            if pool.node_count[zone] < self.job.nodes:
                yield Candidate(self.zone_name(pool, zone), f"too small, {pool.node_count[zone]} of {self.job.nodes} nodes fit")

    def choice_reason(self, pool: CandidateNodes, winner: _EvaluatedChoice, free_now: bool) -> str:
        zone = self.zone_name(pool, winner.choice.zone)
        if len(winner.nodes_per_zone) == 1:
            text = f"zone {zone} holds all nodes"
        elif self.request.dl.place == "spread":
            text = f"spread over {format_zone_counts(winner.nodes_per_zone)}"
        elif winner.choice.is_smallest_zone:
            text = f"no smaller zone than {zone} holds all nodes; below it {format_zone_counts(winner.nodes_per_zone)}"
        else:
            text = f"{format_zone_counts(winner.nodes_per_zone)} below {zone} take less time than any smaller zone"
        return text if free_now else f"{text}; not all of them are free now"
