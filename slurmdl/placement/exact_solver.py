"""The exact optimum of a small job: every choice of nodes and of servers, by constraint programming.

Independent of the search that `place` makes: one variable per node, the loads of links as tables over what is below
them, and the predicted seconds or the bytes as the objective, for the solver CP-SAT of OR-tools (Perron and Furnon,
OR-tools; Stuckey, Lazy clause generation, 2010). For ring allreduce, parameter servers and random gossip, whose cost
depends only on the counts below each link; a ring enters and leaves every zone once where its ranks stand
depth-first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError, UnavailableError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.eligibility import candidate_partitions, eligible_tasks
from slurmdl.placement.iteration_cost import FloatArray, NetworkLinks, network_links, predict_cost
from slurmdl.placement.job_size import JobSize, resolve_job_size
from slurmdl.placement.result import Cost
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.topology.topology import Topology

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Objective = Literal["seconds", "bytes"]
#: what of a job is on some nodes: variables for tasks and for servers, and the most tasks that it may be
GroupVariables = tuple[Any, Any, int]

#: the predicted seconds of the first choice, in the solver's integers; what is far above it is cut off
TIME_SCALE, MAX_SCALED_TIME = 2 * 10**8, 10**9
_OBJECTIVE_KEYS: dict[Objective, Callable[[Cost], tuple[float, ...]]] = {
    "seconds": lambda cost: cost.sort_key[:1], "bytes": lambda cost: cost.sort_key[1:]}


@dataclass(frozen=True)
class ExactPlacement:
    """The best choice that the solver found.

    Attributes
    ----------
    nodes : names, in the order of the snapshot.
    order : entry i is the node of rank i.
    cost : of these ranks, as `cost` gives it.
    proven : no choice takes less time, but for one part in 10^8, or sends fewer bytes.
    """

    nodes: tuple[str, ...]
    node_of_rank: tuple[str, ...]
    cost: Cost
    proven: bool


def solve_exactly(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          time_limit_s: float = 10.0, objective: Objective = "seconds") -> ExactPlacement:
    """The best nodes and ranks among the nodes that are free now.

    Parameters
    ----------
    limit_s : seconds after which the best choice so far is returned, not proven.
    least : what is least: the predicted seconds, or the bytes across zones, and where these are equal those across
        nodes.

    Raises
    ------
    PlacementError : no choice is possible, or the traffic depends on more than counts.
    UnavailableError : OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnavailableError("the exact solver needs OR-tools: pip install slurmdl[exact]") from error
    job, traffic = resolve_job_size(request), Traffic.from_options(request.dl)
    phases = traffic.phases(job.tasks)
    if any(np.ndim(phase.bytes_per_pair) for phase in phases) or not (
        len(phases) < 2 or all(p.all_pairs for p in phases)):
        raise PlacementError(f"--dl-comm-pattern={request.dl.comm_pattern}: no exact answer is known for this pattern")
    best: ExactPlacement | None = None
    for partition in candidate_partitions(request, cluster) or (None,):
        room = eligible_tasks(request, cluster, partition).tasks_now
        names = [cluster.names[i] for i in np.flatnonzero(room >= job.max_tasks_per_node) if _is_in_zones(
            topology, request.dl.zone, cluster.names[i])]
        for root in sorted({topology.path_of(name)[0] for name in names}):
            nodes = [name for name in names if topology.path_of(name)[0] == root]
            if len(nodes) < job.nodes:
                continue
            network = network_links(nodes, topology, scores)
            if network.slow_paths.names:
                raise PlacementError(f"the way {network.slow_paths.names[0]} is slower than the links on it: no exact "
                                     "answer is known for that")
            found = _CpSatModel(cp_model, job, traffic, phases, network).minimize(time_limit_s, objective)
            if best is None or _OBJECTIVE_KEYS[objective](found.cost) < _OBJECTIVE_KEYS[objective](best.cost):
                best = found
        if best is not None:
            return best
    raise PlacementError(f"no zone has {job.nodes} fitting nodes")


def _is_in_zones(topology: Topology, zones: tuple[str, ...], node: str) -> bool:
    path = topology.path_of(node)
    return bool(path) and (not zones or not set(zones).isdisjoint(path))


class _CpSatModel:
    """One job on given nodes of one tree."""

    def __init__(self, solver: Any, job: JobSize, traffic: Traffic,
                 phases: list[Phase], network: NetworkLinks) -> None:
        self.cp_module, self.job, self.ps, self.phases, self.network = solver, job, traffic.ps, phases, network
        self.model: cp_model.CpModel = solver.CpModel()
        self.rounds = sum(phase.rounds for phase in phases)
        each, more = divmod(job.tasks, job.nodes)
        count = len(network.nodes)
        self.is_chosen = [self.model.new_bool_var(f"chosen {i}") for i in range(count)]
        self.model.add(sum(self.is_chosen) == job.nodes)
        self.tasks = [self.model.new_int_var(0, job.max_tasks_per_node, f"tasks {i}") for i in range(count)]
        # the first nodes that are chosen get one task more
        before: Any = 0
        for chosen, tasks in zip(self.is_chosen, self.tasks, strict=True):
            if more:
                first = self.model.new_bool_var("")
                self.model.add(before < more).only_enforce_if(first)
                self.model.add(before >= more).only_enforce_if(first.negated())
                extra = self.model.new_bool_var("")
                self.model.add_multiplication_equality(extra, chosen, first)
                self.model.add(tasks == each * chosen + extra)
            else:
                self.model.add(tasks == each * chosen)
            before = before + chosen
        self.servers = [self.model.new_int_var(0, min(self.ps, job.max_tasks_per_node), f"servers {i}")
                        for i in range(count)]
        for servers, tasks in zip(self.servers, self.tasks, strict=True):
            self.model.add(servers <= tasks)
        self.model.add(sum(self.servers) == self.ps)

    def link_bytes(self, tasks: int, servers: int) -> float:
        """Bytes in one phase over a link with so much on one side."""
        if not self.phases or not 0 < tasks < self.job.tasks:
            return 0.0
        size = float(self.phases[0].bytes_per_pair)
        if not self.phases[0].all_pairs:
            return size
        if not self.ps:
            return size * tasks * (self.job.tasks - tasks)
        workers, others = tasks - servers, self.job.tasks - self.ps
        return size * max(servers * (others - workers), workers * (self.ps - servers))

    def message_count(self, tasks: int, servers: int) -> int:
        """How many leave what has so much of the job in one iteration, all of one size."""
        if not self.phases or not 0 < tasks < self.job.tasks:
            return 0
        if not self.phases[0].all_pairs:
            return 1
        if not self.ps:
            return tasks * (self.job.tasks - tasks)
        workers = tasks - servers
        return servers * (self.job.tasks - self.ps - workers) + workers * (self.ps - servers)

    def minimize(self, time_limit_s: float, objective: Objective) -> ExactPlacement:
        network, first = self.network, self.initial_placement()
        scale = TIME_SCALE / first.cost.seconds if first.cost.seconds else 0.0
        if not scale:
            return ExactPlacement(first.nodes, first.node_of_rank, first.cost, True)
        zones = [self.group_variables(np.flatnonzero((network.ancestors == zone).any(axis=1)).tolist())
                 for zone in range(len(network.zones))]
        nodes = [(tasks, servers, self.job.max_tasks_per_node)
                 for tasks, servers in zip(self.tasks, self.servers, strict=True)]
        leaves = [zones[zone] for zone in sorted(set(network.leaf.tolist()))]
        # in no way so many messages go between nodes
        self.model.minimize(self.scaled_seconds(nodes, zones, scale) if objective == "seconds" else
                            (self.job.tasks**2 + 1) * self.total_messages(leaves) + self.total_messages(nodes))
        solver = self.cp_module.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        if status not in (self.cp_module.OPTIMAL, self.cp_module.FEASIBLE):
            return first
        found = self.to_placement([solver.value(tasks) for tasks in self.tasks],
                           [solver.value(servers) for servers in self.servers], status == self.cp_module.OPTIMAL)
        return found if _OBJECTIVE_KEYS[objective](found.cost) <= _OBJECTIVE_KEYS[objective](
            first.cost) else replace(first, proven=found.proven)

    def group_variables(self, nodes: Sequence[int]) -> GroupVariables:
        """What of the job is on these nodes."""
        tasks = self.model.new_int_var(0, self.job.tasks, "")
        self.model.add(tasks == sum(self.tasks[i] for i in nodes))
        servers = self.model.new_int_var(0, self.ps, "")
        self.model.add(servers == sum(self.servers[i] for i in nodes))
        return tasks, servers, self.job.tasks

    def scaled_seconds(self, nodes: Sequence[GroupVariables], zones: Sequence[GroupVariables], scale: float) -> Any:
        """The predicted seconds times `scale`."""
        network = self.network
        busiest = self.model.new_int_var(0, MAX_SCALED_TIME, "busiest")
        levels = sorted(set(network.zone_level.tolist()))
        delays = [self.model.new_int_var(0, MAX_SCALED_TIME, f"delay {level}") for level in (-1, *levels)]
        longest = [delays[0]] * len(nodes)
        longest += [delays[1 + levels.index(level)] for level in network.zone_level.tolist()]
        capacities = [*network.node_capacity.tolist(), *network.zone_capacity.tolist()]
        waits = [*network.node_latency.tolist(), *network.zone_latency.tolist()]
        for part, capacity, delay, most in zip([*nodes, *zones], capacities, waits, longest, strict=True):
            loads = self.load_table(part, self.link_bytes)
            self.require_at_least(busiest, part, loads / capacity * scale)
            self.require_at_least(most, part, np.where(loads > 0, 2 * self.rounds * delay * scale, 0.0))
        return len(self.phases) * busiest + sum(delays)

    def total_messages(self, parts: Sequence[GroupVariables]) -> Any:
        """Messages between these parts of the job."""
        found = []
        for part in parts:
            count = self.model.new_int_var(0, self.job.tasks**2, "")
            self.require_at_least(count, part, self.load_table(part, self.message_count))
            found.append(count)
        return sum(found)

    def load_table(self, part: GroupVariables, entry: Callable[[int, int], float]) -> FloatArray:
        """An entry for each number of tasks (rows) and servers (columns) that the part may hold."""
        return np.array([[entry(tasks, servers) for servers in range(min(self.ps, part[2]) + 1)]
                         for tasks in range(part[2] + 1)], float)

    def require_at_least(self, bound: Any, part: GroupVariables, table: FloatArray) -> None:
        """The bound is no less than the part's entry of the table, rounded."""
        values = np.minimum(np.round(table), MAX_SCALED_TIME).astype(np.int64)
        if values.any():
            entry = self.model.new_int_var(0, MAX_SCALED_TIME, "")
            self.model.add_element(part[0] * values.shape[1] + part[1], values.ravel().tolist(), entry)
            self.model.add(bound >= entry)

    def initial_placement(self) -> ExactPlacement:
        """The first nodes and the first tasks as servers: an upper bound to scale by."""
        wanted = self.job.nodes
        tasks = [self.job.tasks_on_node(i) if i < wanted else 0 for i in range(len(self.network.nodes))]
        before = np.cumsum([0, *tasks])
        return self.to_placement(tasks, [int(min(count, max(0, self.ps - begin)))
                                  for count, begin in zip(tasks, before[:-1], strict=True)], False)

    def to_placement(self, tasks: list[int], servers: list[int], proven: bool) -> ExactPlacement:
        network = self.network
        paths = [tuple(zone for zone in reversed(row) if zone >= 0) for row in network.ancestors.tolist()]
        depth_first = sorted(range(len(tasks)), key=lambda i: paths[i])
        order = np.array([i for i in depth_first for _ in range(servers[i])]
                         + [i for i in depth_first for _ in range(tasks[i] - servers[i])], np.int64)
        return ExactPlacement(tuple(name for name, count in zip(network.nodes, tasks, strict=True) if count),
                     tuple(network.nodes[i] for i in order), predict_cost(self.phases, network, order), proven)
