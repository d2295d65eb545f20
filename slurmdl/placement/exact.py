"""The exact optimum of a small job: every choice of nodes and of servers, by constraint programming.

Independent of the search that `place` makes: one variable per node, the loads of links as tables over what is below
them, and the predicted seconds as the objective, for the solver CP-SAT of OR-tools (Perron and Furnon, OR-tools;
Stuckey, Lazy clause generation, 2010). For ring allreduce, parameter servers and random gossip, whose cost depends
only on the counts below each link; a ring enters and leaves every zone once where its ranks stand depth-first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import PlacementError, UnavailableError
from slurmdl.network.model import LinkScores
from slurmdl.placement.cost import FloatArray, Links, cost, links
from slurmdl.placement.model import Cost
from slurmdl.placement.nodes.eligible import eligible, partitions
from slurmdl.placement.shape import Shape, shape
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.request import JobRequest
from slurmdl.topology.model import Topology

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: the predicted seconds of the first choice, in the solver's integers; what is far above it is cut off
SCALE, MOST = 2 * 10**8, 10**9


@dataclass(frozen=True)
class Exact:
    """The best choice that the solver found.

    Attributes
    ----------
    nodes : names, in the order of the snapshot.
    order : entry i is the node of rank i.
    cost : of these ranks, as `cost` gives it.
    proven : no choice takes less time, but for one part in 10^8.
    """

    nodes: tuple[str, ...]
    order: tuple[str, ...]
    cost: Cost
    proven: bool


def solve(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          limit_s: float = 10.0) -> Exact:
    """The nodes and ranks of the least predicted seconds among the nodes that are free now.

    Parameters
    ----------
    limit_s : seconds after which the best choice so far is returned, not proven.

    Raises
    ------
    PlacementError : no choice is possible, or the traffic depends on more than counts.
    UnavailableError : OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnavailableError("the exact solver needs OR-tools: pip install slurmdl[exact]") from error
    job, traffic = shape(request), Traffic.of(request.dl)
    phases = traffic.phases(job.tasks)
    if any(np.ndim(phase.size) for phase in phases) or not (len(phases) < 2 or all(p.crossed for p in phases)):
        raise PlacementError(f"--dl-traffic={request.dl.traffic}: no exact answer is known for this pattern")
    best: Exact | None = None
    for partition in partitions(request, cluster) or (None,):
        room = eligible(request, cluster, partition).now
        names = [cluster.names[i] for i in np.flatnonzero(room >= job.most_per_node) if _allowed(
            topology, request.dl.zone, cluster.names[i])]
        for root in sorted({topology.path(name)[0] for name in names}):
            nodes = [name for name in names if topology.path(name)[0] == root]
            if len(nodes) < job.nodes:
                continue
            network = links(nodes, topology, scores)
            if network.trunks.names:
                raise PlacementError(f"the way {network.trunks.names[0]} is slower than the links on it: no exact "
                                     "answer is known for that")
            found = _Model(cp_model, job, traffic, phases, network).solve(limit_s)
            if best is None or found.cost.seconds < best.cost.seconds:
                best = found
        if best is not None:
            return best
    raise PlacementError(f"no zone has {job.nodes} fitting nodes")


def _allowed(topology: Topology, zones: tuple[str, ...], node: str) -> bool:
    path = topology.path(node)
    return bool(path) and (not zones or not set(zones).isdisjoint(path))


class _Model:
    """One job on given nodes of one tree."""

    def __init__(self, solver: Any, job: Shape, traffic: Traffic, phases: list[Phase], network: Links) -> None:
        self.cp, self.job, self.ps, self.phases, self.network = solver, job, traffic.ps, phases, network
        self.model: cp_model.CpModel = solver.CpModel()
        self.rounds = sum(phase.rounds for phase in phases)
        each, more = divmod(job.tasks, job.nodes)
        count = len(network.nodes)
        self.chosen = [self.model.new_bool_var(f"chosen {i}") for i in range(count)]
        self.model.add(sum(self.chosen) == job.nodes)
        self.tasks = [self.model.new_int_var(0, job.most_per_node, f"tasks {i}") for i in range(count)]
        # the first nodes that are chosen get one task more
        before: Any = 0
        for chosen, tasks in zip(self.chosen, self.tasks, strict=True):
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
        self.servers = [self.model.new_int_var(0, min(self.ps, job.most_per_node), f"servers {i}")
                        for i in range(count)]
        for servers, tasks in zip(self.servers, self.tasks, strict=True):
            self.model.add(servers <= tasks)
        self.model.add(sum(self.servers) == self.ps)

    def load(self, tasks: int, servers: int) -> float:
        """Bytes in one phase over a link with so much on one side."""
        if not self.phases or not 0 < tasks < self.job.tasks:
            return 0.0
        size = float(self.phases[0].size)
        if not self.phases[0].crossed:
            return size
        if not self.ps:
            return size * tasks * (self.job.tasks - tasks)
        workers, others = tasks - servers, self.job.tasks - self.ps
        return size * max(servers * (others - workers), workers * (self.ps - servers))

    def solve(self, limit_s: float) -> Exact:
        network, first = self.network, self.first()
        scale = SCALE / first.cost.seconds if first.cost.seconds else 0.0
        if not scale:
            return Exact(first.nodes, first.order, first.cost, True)
        busiest = self.model.new_int_var(0, MOST, "busiest")
        levels = sorted(set(network.zone_level.tolist()))
        delays = [self.model.new_int_var(0, MOST, f"delay {level}") for level in (-1, *levels)]
        every = [(self.tasks[i], self.servers[i], self.job.most_per_node, float(network.node_capacity[i]),
                  float(network.node_delay[i]), delays[0]) for i in range(len(network.nodes))]
        for zone in range(len(network.zones)):
            below = np.flatnonzero((network.above == zone).any(axis=1)).tolist()
            tasks = self.model.new_int_var(0, self.job.tasks, "")
            self.model.add(tasks == sum(self.tasks[i] for i in below))
            servers = self.model.new_int_var(0, self.ps, "")
            self.model.add(servers == sum(self.servers[i] for i in below))
            every.append((tasks, servers, self.job.tasks, float(network.zone_capacity[zone]),
                          float(network.zone_delay[zone]), delays[1 + levels.index(int(network.zone_level[zone]))]))
        for tasks, servers, most, capacity, delay, longest in every:
            loads = np.array([[self.load(t, s) for s in range(min(self.ps, most) + 1)] for t in range(most + 1)])
            self.at_least(busiest, tasks, servers, loads / capacity * scale)
            self.at_least(longest, tasks, servers, np.where(loads > 0, 2 * self.rounds * delay * scale, 0.0))
        self.model.minimize(len(self.phases) * busiest + sum(delays))
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return first
        found = self.exact([solver.value(tasks) for tasks in self.tasks],
                           [solver.value(servers) for servers in self.servers], status == self.cp.OPTIMAL)
        return found if found.cost.seconds <= first.cost.seconds else \
            Exact(first.nodes, first.order, first.cost, found.proven)

    def at_least(self, bound: Any, tasks: Any, servers: Any, table: FloatArray) -> None:
        """The bound is no less than the entry of the table for so many tasks (rows) and servers (columns)."""
        values = np.minimum(np.round(table), MOST).astype(np.int64)
        if values.any():
            entry = self.model.new_int_var(0, MOST, "")
            self.model.add_element(tasks * values.shape[1] + servers, values.ravel().tolist(), entry)
            self.model.add(bound >= entry)

    def first(self) -> Exact:
        """The first nodes and the first tasks as servers: an upper bound to scale by."""
        wanted = self.job.nodes
        tasks = [self.job.tasks_of(i) if i < wanted else 0 for i in range(len(self.network.nodes))]
        before = np.cumsum([0, *tasks])
        return self.exact(tasks, [int(min(count, max(0, self.ps - begin)))
                                  for count, begin in zip(tasks, before[:-1], strict=True)], False)

    def exact(self, tasks: list[int], servers: list[int], proven: bool) -> Exact:
        network = self.network
        paths = [tuple(zone for zone in reversed(row) if zone >= 0) for row in network.above.tolist()]
        depth_first = sorted(range(len(tasks)), key=lambda i: paths[i])
        order = np.array([i for i in depth_first for _ in range(servers[i])]
                         + [i for i in depth_first for _ in range(tasks[i] - servers[i])], np.int64)
        return Exact(tuple(name for name, count in zip(network.nodes, tasks, strict=True) if count),
                     tuple(network.nodes[i] for i in order), cost(self.phases, network, order), proven)
