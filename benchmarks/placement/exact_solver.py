"""Exact optimum of a small job over all choices of nodes and servers, by constraint programming.

Independent of the search of `place_job`: one variable per node, link loads as tables over the tasks below each link,
and the predicted seconds or the bytes as objective, for the solver CP-SAT of OR-tools (Perron and Furnon, OR-tools;
Stuckey, Lazy clause generation, 2010). Supports ring allreduce, parameter servers and random gossip, whose cost
depends only on the counts below each link: with depth-first ranks a ring enters and leaves every zone once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest, JobSize, resolve_job_size
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import FloatArray
from slurmdl.placement.eligibility import candidate_partitions, eligible_tasks
from slurmdl.placement.iteration_cost import NetworkLinks, network_links, predict_cost
from slurmdl.placement.result import Cost
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Phase

Objective = Literal["seconds", "bytes"]

TIME_SCALE = 2 * 10**8  # predicted seconds of the initial placement, in the solver's integers
MAX_SCALED_TIME = 10**9  # larger times are cut off
_OBJECTIVE_KEYS: dict[Objective, Callable[[Cost], tuple[float, ...]]] = {
    "seconds": lambda cost: cost.sort_key[:1], "bytes": lambda cost: cost.sort_key[1:]}


@dataclass(frozen=True)
class ExactPlacement:
    """Best placement that the solver found.

    Attributes:
        nodes: names, in snapshot order.
        node_of_rank: names.
        cost: predicted cost.
        proven: no placement takes less time, within a relative tolerance of 1e-8, or sends fewer bytes.
    """

    nodes: tuple[str, ...]
    node_of_rank: tuple[str, ...]
    cost: Cost
    proven: bool


def solve_exactly(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
                  time_limit_s: float = 10.0, objective: Objective = "seconds") -> ExactPlacement:
    """Best nodes and ranks among the nodes that are free now.

    Args:
        time_limit_s: time after which the best placement so far is returned, not proven.
        objective: minimize the predicted seconds, or the bytes between zones and then between nodes.

    Raises PlacementError if no choice is possible, or if the traffic depends on more than counts.
    """
    job, traffic = resolve_job_size(request), request.options.traffic
    phases = traffic.phases(job.tasks)
    is_count_based = len(phases) < 2 or all(phase.all_pairs for phase in phases)
    if not is_count_based or any(np.ndim(phase.bytes_per_pair) for phase in phases):
        raise PlacementError(f"--dl-comm-pattern={request.options.comm_pattern}: no exact solution for this pattern")
    best: ExactPlacement | None = None
    for partition in candidate_partitions(request, cluster) or (None,):
        fitting = eligible_tasks(request, cluster, partition).tasks_now >= job.max_tasks_per_node
        names = [name for i in np.flatnonzero(fitting)
                 if _is_in_zones(topology, request.options.zone, name := cluster.names[i])]
        for root in sorted({topology.path_of(name)[0] for name in names}):
            nodes = [name for name in names if topology.path_of(name)[0] == root]
            if len(nodes) < job.nodes:
                continue
            network = network_links(nodes, topology, scores)
            if network.slow_paths.names:
                raise PlacementError(f"inter-leaf path {network.slow_paths.names[0]} is slower than its links: "
                                     "no exact solution for such paths")
            exact = _CpSatModel(job, traffic.ps, phases, network).minimize(time_limit_s, objective)
            if best is None or _OBJECTIVE_KEYS[objective](exact.cost) < _OBJECTIVE_KEYS[objective](best.cost):
                best = exact
        if best is not None:
            return best
    raise PlacementError(f"no zone has {job.nodes} fitting nodes")


def _is_in_zones(topology: Topology, zones: tuple[str, ...], node: str) -> bool:
    path = topology.path_of(node)
    return bool(path) and (not zones or not set(zones).isdisjoint(path))


class GroupVariables(NamedTuple):
    """Variables for the part of a job on some nodes; `tasks` is at most `max_tasks`."""

    tasks: Any
    servers: Any
    max_tasks: int


class _CpSatModel:
    """Model of one job on given nodes of one tree."""

    def __init__(self, job: JobSize, ps: int, phases: list[Phase], network: NetworkLinks) -> None:
        self.job, self.ps, self.phases, self.network = job, ps, phases, network
        self.model = cp_model.CpModel()
        self.rounds = sum(phase.rounds for phase in phases)
        nodes, max_tasks = range(len(network.nodes)), job.max_tasks_per_node
        self.is_chosen = [self.model.new_bool_var(f"chosen {i}") for i in nodes]
        self.model.add(sum(self.is_chosen) == job.nodes)
        self.tasks = [self.model.new_int_var(0, max_tasks, f"tasks {i}") for i in nodes]
        tasks_per_node, remainder = divmod(job.tasks, job.nodes)
        # the first chosen nodes get the remainder, one task each
        chosen_before: Any = 0
        for chosen, tasks in zip(self.is_chosen, self.tasks, strict=True):
            if remainder:
                is_first = self.model.new_bool_var("")
                self.model.add(chosen_before < remainder).only_enforce_if(is_first)
                self.model.add(chosen_before >= remainder).only_enforce_if(is_first.negated())
                extra = self.model.new_bool_var("")
                self.model.add_multiplication_equality(extra, chosen, is_first)
                self.model.add(tasks == tasks_per_node * chosen + extra)
            else:
                self.model.add(tasks == tasks_per_node * chosen)
            chosen_before = chosen_before + chosen
        self.servers = [self.model.new_int_var(0, min(ps, max_tasks), f"servers {i}") for i in nodes]
        for servers, tasks in zip(self.servers, self.tasks, strict=True):
            self.model.add(servers <= tasks)
        self.model.add(sum(self.servers) == ps)

    def minimize(self, time_limit_s: float, objective: Objective) -> ExactPlacement:
        network, initial = self.network, self.initial_placement()
        if not initial.cost.seconds:
            return replace(initial, proven=True)
        zones = [self.group_variables(np.flatnonzero((network.ancestors == zone).any(axis=1)).tolist())
                 for zone in range(len(network.zones))]
        nodes = [GroupVariables(tasks, servers, self.job.max_tasks_per_node)
                 for tasks, servers in zip(self.tasks, self.servers, strict=True)]
        leaves = [zones[zone] for zone in sorted(set(network.leaf.tolist()))]
        if objective == "seconds":
            self.model.minimize(self.scaled_seconds(nodes, zones, TIME_SCALE / initial.cost.seconds))
        else:
            # the factor exceeds the number of messages between nodes
            self.model.minimize((self.job.tasks**2 + 1) * self.total_messages(leaves) + self.total_messages(nodes))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return initial
        solution = self.to_placement([solver.value(tasks) for tasks in self.tasks],
                                     [solver.value(servers) for servers in self.servers],
                                     status == cp_model.OPTIMAL)
        key = _OBJECTIVE_KEYS[objective]
        return solution if key(solution.cost) <= key(initial.cost) else replace(initial, proven=solution.proven)

    def messages(self, tasks: int, servers: int) -> tuple[int, int]:
        """Messages of one iteration between these tasks and all others, by direction for parameter servers."""
        if not 0 < tasks < self.job.tasks:
            return 0, 0
        if not self.phases[0].all_pairs:
            return 1, 0
        if not self.ps:
            return tasks * (self.job.tasks - tasks), 0
        workers, all_workers = tasks - servers, self.job.tasks - self.ps
        return servers * (all_workers - workers), workers * (self.ps - servers)

    def group_variables(self, nodes: Sequence[int]) -> GroupVariables:
        tasks = self.model.new_int_var(0, self.job.tasks, "")
        self.model.add(tasks == sum(self.tasks[i] for i in nodes))
        servers = self.model.new_int_var(0, self.ps, "")
        self.model.add(servers == sum(self.servers[i] for i in nodes))
        return GroupVariables(tasks, servers, self.job.tasks)

    def scaled_seconds(self, nodes: Sequence[GroupVariables], zones: Sequence[GroupVariables], scale: float) -> Any:
        """Predicted seconds times `scale`."""
        network, size = self.network, float(self.phases[0].bytes_per_pair)
        busiest = self.model.new_int_var(0, MAX_SCALED_TIME, "busiest")
        levels = [-1, *sorted(set(network.zone_level.tolist()))]  # -1: node links
        level_latency = {level: self.model.new_int_var(0, MAX_SCALED_TIME, f"latency {level}") for level in levels}
        capacities = np.concatenate([network.node_capacity, network.zone_capacity]).tolist()
        latencies = np.concatenate([network.node_latency, network.zone_latency]).tolist()
        link_levels = [-1] * len(nodes) + network.zone_level.tolist()
        for group, capacity, latency, level in zip([*nodes, *zones], capacities, latencies, link_levels, strict=True):
            loads = size * self.load_table(group, max)
            self.require_at_least(busiest, group, loads / capacity * scale)
            waits = np.where(loads > 0, 2 * self.rounds * latency * scale, 0.0)
            self.require_at_least(level_latency[level], group, waits)
        return len(self.phases) * busiest + sum(level_latency.values())

    def total_messages(self, groups: Sequence[GroupVariables]) -> Any:
        """Number of messages between these groups."""
        counts = []
        for group in groups:
            count = self.model.new_int_var(0, self.job.tasks**2, "")
            self.require_at_least(count, group, self.load_table(group, sum))
            counts.append(count)
        return sum(counts)

    def load_table(self, group: GroupVariables, combine: Callable[[tuple[int, int]], int]) -> FloatArray:
        """Combined messages of both directions by number of tasks (rows) and servers (columns) of the group."""
        servers_range = range(min(self.ps, group.max_tasks) + 1)
        return np.array([[combine(self.messages(tasks, servers)) for servers in servers_range]
                         for tasks in range(group.max_tasks + 1)], float)

    def require_at_least(self, bound: Any, group: GroupVariables, table: FloatArray) -> None:
        """Require `bound` to be at least the group's rounded entry of the table."""
        values = np.minimum(np.round(table), MAX_SCALED_TIME).astype(np.int64)
        if values.any():
            entry = self.model.new_int_var(0, MAX_SCALED_TIME, "")
            self.model.add_element(group.tasks * values.shape[1] + group.servers, values.ravel().tolist(), entry)
            self.model.add(bound >= entry)

    def initial_placement(self) -> ExactPlacement:
        """The first nodes, with the first tasks as servers: an upper bound that sets the scale."""
        tasks = [self.job.tasks_on_node(i) if i < self.job.nodes else 0 for i in range(len(self.network.nodes))]
        tasks_before = np.cumsum([0, *tasks])
        return self.to_placement(tasks, [int(min(count, max(0, self.ps - before)))
                                         for count, before in zip(tasks, tasks_before[:-1], strict=True)], False)

    def to_placement(self, tasks: list[int], servers: list[int], proven: bool) -> ExactPlacement:
        network = self.network
        paths = [tuple(zone for zone in reversed(row) if zone >= 0) for row in network.ancestors.tolist()]
        depth_first = sorted(range(len(tasks)), key=lambda i: paths[i])
        order = np.array([i for i in depth_first for _ in range(servers[i])]
                         + [i for i in depth_first for _ in range(tasks[i] - servers[i])], np.int64)
        return ExactPlacement(tuple(name for name, count in zip(network.nodes, tasks, strict=True) if count),
                              tuple(network.nodes[i] for i in order),
                              predict_cost(self.phases, network, order), proven)
