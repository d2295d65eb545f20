"""Compare the placement policies for one job beside others: placed by slurmdl, Slurm's leaf order, random."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.errors import UsageError
from slurmdl.job_request import JobRequest, JobSize
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map, leaf_order
from slurmdl.simulate.predict import Prediction, predict_step
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.topology.topology import Indices, Topology

PLACEMENT_POLICIES = ("placed", "leaf order", "random")
WARMUP_TURNOVER = 3.0  # times that the jobs of the trace have filled the whole cluster
#: bounds of log-uniform job sizes in nodes (at most a twentieth of the cluster) and durations in any unit
JOB_SIZES = (1, 256)
JOB_DURATIONS = (1.0, 100.0)


@dataclass(frozen=True)
class SimulatedJob:
    """A job and its cluster.

    Attributes:
        node_count, rank_count: of the job; ranks are spread evenly over the nodes, the first nodes get the remainder.
        fixed_nodes: nodes of the job; () to let each policy choose.
        busy_share: share of the nodes that other jobs hold, 0 to 1.
        seed: of the other jobs and of the random placement.
    """

    workload: TrainingWorkload
    topology: Topology
    scores: LinkScores
    node_count: int
    rank_count: int
    fixed_nodes: tuple[str, ...] = ()
    busy_share: float = 0.0
    seed: int = 0

    def predict_policies(self, steps: int = 0, granularity: str = "auto") -> dict[str, Prediction]:
        """Predict the step of each policy; steps and granularity as in `predict_step`."""
        self.workload.check_supported(self.rank_count)
        free = self._free_nodes()
        predictions = {}
        for policy in PLACEMENT_POLICIES:
            names, nodes_by_rank = self._place(policy, free)
            index = {name: i for i, name in enumerate(names)}
            node_of_rank = np.array([index[name] for name in nodes_by_rank], np.int64)
            links = network_links(names, self.topology, self.scores)
            predictions[policy] = predict_step(self.workload, links, node_of_rank, steps, granularity)
        return predictions

    def _free_nodes(self) -> npt.NDArray[np.bool_]:
        """Mask of the topology's nodes that the job can use; UsageError if too few are free, or one is unknown."""
        topology = self.topology
        unknown = [name for name in self.fixed_nodes if name not in topology.node_index]
        if unknown:
            raise UsageError(f"--nodes: {unknown[0]} is not in {topology.source}; expected "
                             f"{', '.join(topology.nodes[:8])}{', ...' * (len(topology.nodes) > 8)}")
        free = ~occupied_nodes(topology, self.busy_share, self.seed) if self.busy_share \
            else np.ones(len(topology.nodes), bool)
        if free.sum() < self.node_count and not self.fixed_nodes:
            condition = f" at --busy-share {self.busy_share:g}" if self.busy_share else ""
            raise UsageError(f"-N {self.node_count}: {topology.source} has {free.sum()} free nodes{condition}; "
                             f"expected 1 to {free.sum()}")
        return free

    def _place(self, policy: str, free: npt.NDArray[np.bool_]) -> tuple[Sequence[str], Sequence[str]]:
        """Nodes of the job, and the node of each rank."""
        job_size = JobSize(self.node_count, self.rank_count)
        tasks = [job_size.tasks_on_node(i) for i in range(self.node_count)]
        if policy == "placed":
            return self._place_best(free, tasks)
        all_names = self.topology.nodes
        if policy == "leaf order":
            names = self.fixed_nodes or tuple(
                all_names[i] for i in sorted(best_fit_nodes(self.topology, free, self.node_count)))
            order = leaf_order(network_links(names, self.topology, self.scores)).tolist()
            return names, [names[i] for i in order for _ in range(tasks[i])]
        random = np.random.default_rng(self.seed)
        names = self.fixed_nodes or tuple(
            all_names[i] for i in random.choice(np.flatnonzero(free), self.node_count, replace=False).tolist())
        slots = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
        return names, [slots[i] for i in random.permutation(self.rank_count).tolist()]

    def _place_best(self, free: npt.NDArray[np.bool_], tasks: Sequence[int]) -> tuple[Sequence[str], Sequence[str]]:
        traffic = self.workload.sent_traffic
        if self.fixed_nodes:
            slots = list(zip(self.fixed_nodes, tasks, strict=True))
            rank_map = best_rank_map(slots, self.topology, self.scores, traffic)
            return self.fixed_nodes, rank_map.nodes
        request = JobRequest(nodes=(self.node_count, self.node_count), ntasks=self.rank_count, exclusive=True)
        cpus = max(tasks)
        nodes = (Node(name, ("IDLE",) if idle else ("ALLOCATED",), True, cpus, cpus * idle, partitions=("main",))
                 for name, idle in zip(self.topology.nodes, free.tolist(), strict=True))
        cluster = ClusterSnapshot.from_nodes(nodes, (Partition("main", True),))
        placement = place_job(request, cluster, self.topology, self.scores, traffic)
        assert placement.rank_map is not None, "place_job returns a rank map or raises"
        return placement.nodes, placement.rank_map.nodes


def format_predictions(predictions: dict[str, Prediction]) -> Iterator[str]:
    """Yield the lines of a text table."""
    yield f"{'':12} {'step':>9} {'exposed comm':>14} {'inter-zone':>13} {'ratio':>7}"
    baseline = next(iter(predictions.values())).step_seconds
    for policy, prediction in predictions.items():
        ratio = f"{prediction.step_seconds / baseline:7.3g}" if baseline else f"{'':7}"
        inter_zone = units.format_bytes(prediction.inter_zone_bytes)
        yield (f"{policy:12} {units.format_duration(prediction.step_seconds):>9} "
               f"{prediction.exposed_comm_fraction:14.1%} {inter_zone:>13} {ratio}")


def occupied_nodes(topology: Topology, busy_share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Nodes that other jobs hold, about `busy_share` of all; shape (nodes,).

    Jobs are placed by `best_fit_nodes`; the first one to finish is removed whenever more nodes would be busy.
    """
    generator = np.random.default_rng(seed)
    total = len(topology.nodes)
    largest = max(1, min(JOB_SIZES[1], total // 20))
    free = np.ones(total, bool)
    running: list[tuple[float, int, Indices]] = []  # end time, tie-breaker, nodes
    now, job_id, started = 0.0, 0, 0
    while started < WARMUP_TURNOVER * total:
        size = int(np.exp(generator.uniform(np.log(JOB_SIZES[0]), np.log(largest + 1))))
        while free.sum() - size < (1 - busy_share) * total:
            now, _, released = heapq.heappop(running)
            free[released] = True
        nodes = best_fit_nodes(topology, free, size)
        free[nodes] = False
        duration = float(np.exp(generator.uniform(np.log(JOB_DURATIONS[0]), np.log(JOB_DURATIONS[1]))))
        heapq.heappush(running, (now + duration, job_id, nodes))
        job_id, started = job_id + 1, started + size
    return ~free


def best_fit_nodes(topology: Topology, free: npt.NDArray[np.bool_], node_count: int) -> Indices:
    """Select nodes as Slurm's tree plugin does: the tightest of the lowest zones that fit, fullest leaves first."""
    free_below = topology.sum_below(free.astype(np.int64))
    fits = np.flatnonzero(free_below >= node_count)
    if len(fits):
        zone = int(fits[np.lexsort((free_below[fits], topology.level[fits]))[0]])
        candidates = topology.indices_below(zone)
    else:
        candidates = topology.node_order
    candidates = candidates[free[candidates]]
    return candidates[np.argsort(-free_below[topology.leaf[candidates]], kind="stable")][:node_count]
