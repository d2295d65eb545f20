"""Small clusters and topologies for placement tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.result import Cost
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Phase, Traffic

#: uplinks 20 times slower than node links, no latency, round numbers
SCORES = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,), default_latency=0.0)


def two_level(*leaves: Sequence[str]) -> Topology:
    """Build a root over leaf zones z0, z1, ... with the given nodes."""
    names = [f"z{i}" for i in range(len(leaves))]
    zones = [ZoneDecl(name, nodes=tuple(nodes)) for name, nodes in zip(names, leaves, strict=True)]
    return build_topology([*zones, ZoneDecl("root", children=tuple(names))], kind="tree", source="test")


def three_level(rows: int, leaves: int, nodes: int) -> Topology:
    """Build a root over rows of leaf zones; consecutive node names are in different leaves."""
    count = rows * leaves
    zones = [ZoneDecl(f"z{leaf}", nodes=tuple(f"n{i:03d}" for i in range(leaf, count * nodes, count)))
             for leaf in range(count)]
    zones += [ZoneDecl(f"row{row}", children=tuple(f"z{row * leaves + i}" for i in range(leaves)))
              for row in range(rows)]
    root = ZoneDecl("root", children=tuple(f"row{row}" for row in range(rows)))
    return build_topology([*zones, root], kind="tree", source="test")


def cluster(*nodes: Node) -> ClusterSnapshot:
    return ClusterSnapshot.from_nodes(nodes, (Partition("main", True),))


def idle(topology: Topology, *busy: str) -> ClusterSnapshot:
    """All nodes of a topology, idle except for these."""
    return cluster(*(node(name, "ALLOCATED", cpus_unallocated=0, memory_unallocated=0) if name in busy else node(name)
                     for name in sorted(topology.nodes)))


def node(name: str, state: str = "IDLE", **fields: object) -> Node:
    defaults: dict[str, object] = {"cpus": 4, "cpus_unallocated": 4, "memory": 1000, "memory_unallocated": 1000,
                                   "partitions": ("main",)}
    return Node(name, tuple(state.split("+")), **{**defaults, **fields})  # type: ignore[arg-type]


def job(nodes: int, dl: DlOptions = DlOptions(), **fields: object) -> JobRequest:  # noqa: B008
    """Request of this number of nodes."""
    return JobRequest(dl, (nodes, nodes), **fields)  # type: ignore[arg-type]


def matrix(phase: Phase, ranks: int) -> npt.NDArray[np.float64]:
    """Return the bytes sent from each rank to each rank, shape (ranks, ranks)."""
    total = np.zeros((ranks, ranks))
    if phase.all_pairs:
        total[np.ix_(phase.source, phase.target)] += phase.bytes_per_pair
    else:
        np.add.at(total, (phase.source, phase.target), phase.bytes_per_pair)
    np.fill_diagonal(total, 0)
    return total


def cost_of(order: Sequence[str], topology: Topology, scores: LinkScores, strategy: str, model_bytes: float,
            ps: int = 0) -> Cost:
    """Predict the cost of an iteration whose rank i runs on node `order[i]`."""
    names = sorted(set(order))
    node_of_rank = np.array([names.index(name) for name in order])
    phases = Traffic(strategy, model_bytes, ps).phases(len(order))
    return predict_cost(phases, network_links(names, topology, scores), node_of_rank)
