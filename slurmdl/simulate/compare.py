"""One job on the same cluster three ways: placed, as Slurm would, and at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import UsageError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import NetworkLinks, network_links
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.place import place_job
from slurmdl.placement.ranks.rank_orders import best_rank_map, leaf_order
from slurmdl.simulate.background_load import best_fit_nodes, occupied_nodes
from slurmdl.simulate.predict import Prediction, predict_step
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.topology.topology import Topology

#: ways to choose nodes and ranks
PLACEMENT_POLICIES = ("placed", "leaf order", "random")


@dataclass(frozen=True)
class SimulatedJob:
    """A job and the cluster that it would run on.

    Attributes
    ----------
    nodes, ranks : counts of the job; its nodes have as many ranks each, the first ones take what is left.
    chosen : the nodes of the job; () where each way chooses its own.
    busy : share of the nodes that other jobs hold, 0 to 1.
    seed : of those jobs, and of the random placement.
    """

    workload: TrainingWorkload
    topology: Topology
    scores: LinkScores
    node_count: int
    rank_count: int
    fixed_nodes: tuple[str, ...] = ()
    busy_share: float = 0.0
    seed: int = 0

    def predict_policies(self, steps: int = 0, granularity: str = "auto",
                         policies: Sequence[str] = PLACEMENT_POLICIES) -> dict[str, Prediction]:
        """What a step takes, by each way; steps and detail as of `predict`."""
        self.workload.check_supported(self.rank_count)
        free = self._free_nodes()
        found = {}
        for way in policies:
            names, order = self._place(way, free)
            network, ranks = self._links_and_rank_nodes(names, order)
            found[way] = predict_step(self.workload, network, ranks, steps, granularity)
        return found

    def _free_nodes(self) -> npt.NDArray[np.bool_]:
        """Which nodes the job can have; shape (nodes of the topology,).

        Raises
        ------
        UsageError : too few, or a node that the topology does not have.
        """
        topology = self.topology
        unknown = [name for name in self.fixed_nodes if name not in topology.node_index]
        if unknown:
            raise UsageError(f"--nodes: no node {unknown[0]} in {topology.source}; "
                             f"valid: {', '.join(topology.nodes[:8])}{', ...' * (len(topology.nodes) > 8)}")
        free = ~occupied_nodes(topology, self.busy_share,
                               self.seed) if self.busy_share else np.ones(len(topology.nodes), bool)
        if free.sum() < self.node_count and not self.fixed_nodes:
            rest = f" at --busy {self.busy_share:g}" if self.busy_share else ""
            raise UsageError(f"-N {self.node_count}: {topology.source} has {free.sum()} free nodes{rest}; "
                             f"valid: 1 to {free.sum()}")
        return free

    def _place(self, policy: str, free: npt.NDArray[np.bool_]) -> tuple[Sequence[str], Sequence[str]]:
        """The nodes of the job, and the node of each rank."""
        topology, tasks = self.topology, [
    JobSize(
        self.node_count, self.rank_count).tasks_on_node(i) for i in range(
            self.node_count)]
        if policy == "placed":
            return self._place_best(free, tasks)
        if policy == "leaf order":
            names = self.fixed_nodes or tuple(
    topology.nodes[i] for i in sorted(
        best_fit_nodes(
            topology, free, self.node_count)))
            order = leaf_order(network_links(names, topology, self.scores))
            return names, [names[i] for i in order.tolist() for _ in range(tasks[i])]
        random = np.random.default_rng(self.seed)
        names = self.fixed_nodes or tuple(topology.nodes[i] for i in random.choice(np.flatnonzero(free), self.node_count,
                                                                              replace=False).tolist())
        slots = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
        return names, [slots[i] for i in random.permutation(self.rank_count).tolist()]

    def _place_best(self, free: npt.NDArray[np.bool_], tasks: Sequence[int]) -> tuple[Sequence[str], Sequence[str]]:
        traffic = self.workload.placement_traffic
        if self.fixed_nodes:
            found = best_rank_map(list(zip(self.fixed_nodes, tasks, strict=True)),
                                  self.topology, self.scores, traffic)
            return self.fixed_nodes, found.nodes
        options = DlOptions(
    traffic.strategy,
    traffic.ps,
    model_bytes=traffic.model_bytes,
     comm_pattern=traffic.pattern)
        request = JobRequest(options, (self.node_count, self.node_count), self.rank_count, exclusive=True)
        most = max(tasks)
        cluster = ClusterSnapshot.from_nodes((Node(name, ("IDLE",) if idle else ("ALLOCATED",), True, most, most * idle,
                                           partitions=("main",))
                                      for name, idle in zip(self.topology.nodes, free.tolist(), strict=True)),
                                     (Partition("main", True),))
        chosen = place_job(request, cluster, self.topology, self.scores)
        assert chosen.rank_map is not None, "place gives a map or raises"
        return chosen.nodes, chosen.rank_map.nodes

    def _links_and_rank_nodes(self, names: Sequence[str],
                              nodes_by_rank: Sequence[str]) -> tuple[NetworkLinks, IntArray]:
        """The links of the nodes, and the place of each rank's node among them."""
        index = {name: i for i, name in enumerate(names)}
        return network_links(names, self.topology, self.scores), np.array(
            [index[name] for name in nodes_by_rank], np.int64)


def format_predictions(predictions: dict[str, Prediction]) -> Iterator[str]:
    """The predictions as lines of text."""
    yield f"{'':12} {'step':>9} {'communication':>14} {'across zones':>13} {'times':>7}"
    least = next(iter(predictions.values())).step_seconds
    for way, its in predictions.items():
        times = f"{its.step_seconds / least:7.3g}" if least else f"{'':7}"
        yield (f"{way:12} {units.format_duration(its.step_seconds):>9} {its.exposed_comm_fraction:14.1%} "
               f"{units.format_bytes(its.inter_zone_bytes):>13} {times}")
