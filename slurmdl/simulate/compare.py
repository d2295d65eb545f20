"""One job on the same cluster three ways: placed, as Slurm would, and at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.cluster.model import ClusterSnapshot, Node, Partition
from slurmdl.errors import UsageError
from slurmdl.network.model import LinkScores
from slurmdl.placement.cost import IntArray, Links, links
from slurmdl.placement.place import place
from slurmdl.placement.ranks.rankmap import leaf_order, rank_map
from slurmdl.placement.shape import Shape
from slurmdl.request import DlOptions, JobRequest
from slurmdl.simulate.load import busy_nodes, first_fit
from slurmdl.simulate.predict import Prediction, predict
from slurmdl.simulate.training import Training
from slurmdl.topology.model import Topology

#: ways to choose nodes and ranks
WAYS = ("placed", "leaf order", "random")


@dataclass(frozen=True)
class Case:
    """A job and the cluster that it would run on.

    Attributes
    ----------
    nodes, ranks : counts of the job; its nodes have as many ranks each, the first ones take what is left.
    chosen : the nodes of the job; () where each way chooses its own.
    busy : share of the nodes that other jobs hold, 0 to 1.
    seed : of those jobs, and of the random placement.
    """

    training: Training
    topology: Topology
    scores: LinkScores
    nodes: int
    ranks: int
    chosen: tuple[str, ...] = ()
    busy: float = 0.0
    seed: int = 0

    def predictions(self, steps: int = 0, detail: str = "auto", ways: Sequence[str] = WAYS) -> dict[str, Prediction]:
        """What a step takes, by each way; steps and detail as of `predict`."""
        self.training.check(self.ranks)
        free = self._free()
        found = {}
        for way in ways:
            names, order = self._way(way, free)
            network, ranks = self._sorted(names, order)
            found[way] = predict(self.training, network, ranks, steps, detail)
        return found

    def _free(self) -> npt.NDArray[np.bool_]:
        """Which nodes the job can have; shape (nodes of the topology,).

        Raises
        ------
        UsageError : too few, or a node that the topology does not have.
        """
        topology = self.topology
        unknown = [name for name in self.chosen if name not in topology.node_index]
        if unknown:
            raise UsageError(f"--nodes: no node {unknown[0]} in {topology.source}; "
                             f"valid: {', '.join(topology.nodes[:8])}{', ...' * (len(topology.nodes) > 8)}")
        free = ~busy_nodes(topology, self.busy, self.seed) if self.busy else np.ones(len(topology.nodes), bool)
        if free.sum() < self.nodes and not self.chosen:
            rest = f" at --busy {self.busy:g}" if self.busy else ""
            raise UsageError(f"-N {self.nodes}: {topology.source} has {free.sum()} free nodes{rest}; "
                             f"valid: 1 to {free.sum()}")
        return free

    def _way(self, way: str, free: npt.NDArray[np.bool_]) -> tuple[Sequence[str], Sequence[str]]:
        """The nodes of the job, and the node of each rank."""
        topology, tasks = self.topology, [Shape(self.nodes, self.ranks).tasks_of(i) for i in range(self.nodes)]
        if way == "placed":
            return self._placed(free, tasks)
        if way == "leaf order":
            names = self.chosen or tuple(topology.nodes[i] for i in sorted(first_fit(topology, free, self.nodes)))
            order = leaf_order(links(names, topology, self.scores))
            return names, [names[i] for i in order.tolist() for _ in range(tasks[i])]
        random = np.random.default_rng(self.seed)
        names = self.chosen or tuple(topology.nodes[i] for i in random.choice(np.flatnonzero(free), self.nodes,
                                                                              replace=False).tolist())
        slots = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
        return names, [slots[i] for i in random.permutation(self.ranks).tolist()]

    def _placed(self, free: npt.NDArray[np.bool_], tasks: Sequence[int]) -> tuple[Sequence[str], Sequence[str]]:
        traffic = self.training.placed_as
        if self.chosen:
            found = rank_map(list(zip(self.chosen, tasks, strict=True)), self.topology, self.scores, traffic)
            return self.chosen, found.nodes
        options = DlOptions(traffic.strategy, traffic.ps, model_bytes=traffic.model_bytes, traffic=traffic.pattern)
        request = JobRequest(options, (self.nodes, self.nodes), self.ranks, exclusive=True)
        most = max(tasks)
        cluster = ClusterSnapshot.of((Node(name, ("IDLE",) if idle else ("ALLOCATED",), True, most, most * idle,
                                           partitions=("main",))
                                      for name, idle in zip(self.topology.nodes, free.tolist(), strict=True)),
                                     (Partition("main", True),))
        chosen = place(request, cluster, self.topology, self.scores)
        assert chosen.map is not None, "place gives a map or raises"
        return chosen.nodes, chosen.map.nodes

    def _sorted(self, names: Sequence[str], order: Sequence[str]) -> tuple[Links, IntArray]:
        """The links of the nodes, and the place of each rank's node among them."""
        index = {name: i for i, name in enumerate(names)}
        return links(names, self.topology, self.scores), np.array([index[name] for name in order], np.int64)


def table(found: dict[str, Prediction]) -> Iterator[str]:
    """The predictions as lines of text."""
    yield f"{'':12} {'step':>9} {'communication':>14} {'across zones':>13} {'times':>7}"
    least = next(iter(found.values())).seconds
    for way, its in found.items():
        times = f"{its.seconds / least:7.3g}" if least else f"{'':7}"
        yield (f"{way:12} {units.duration(its.seconds):>9} {its.communication:14.1%} "
               f"{units.size(its.bytes_across_zones):>13} {times}")
