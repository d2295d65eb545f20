"""Small clusters for the tests of placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.result import Cost
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

#: links between zones 20 times slower than inside, no delay, round numbers
SCORES = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,), default_latency=0.0)


def two_level(*leaves: Sequence[str]) -> Topology:
    """A root over leaves z0, z1, ... with these nodes."""
    names = [f"z{i}" for i in range(len(leaves))]
    return build_topology([*(ZoneDecl(name, nodes=tuple(nodes)) for name, nodes in zip(names, leaves, strict=True)),
                  ZoneDecl("root", children=tuple(names))], kind="tree", source="test")


def three_level(rows: int, leaves: int, nodes: int) -> Topology:
    """So many rows of so many leaves of so many nodes; the names of the nodes are dealt to the leaves in turn."""
    count = rows * leaves
    names = [[f"n{i:03d}" for i in range(leaf, count * nodes, count)] for leaf in range(count)]
    below = [tuple(f"z{row * leaves + i}" for i in range(leaves)) for row in range(rows)]
    return build_topology([*(ZoneDecl(f"z{leaf}", nodes=tuple(own)) for leaf, own in enumerate(names)),
                  *(ZoneDecl(f"row{row}", children=children) for row, children in enumerate(below)),
                  ZoneDecl("root", children=tuple(f"row{row}" for row in range(rows)))], kind="tree", source="test")


def cluster(*nodes: Node) -> ClusterSnapshot:
    return ClusterSnapshot.from_nodes(nodes, (Partition("main", True),))


def node(name: str, state: str = "IDLE", **more: object) -> Node:
    given: dict[str, object] = {"cpus": 4, "cpus_unallocated": 4, "memory": 1000, "memory_unallocated": 1000,
                                "partitions": ("main",), **more}
    return Node(name, tuple(state.split("+")), **given)  # type: ignore[arg-type]


def matrix(phase: Phase, ranks: int) -> npt.NDArray[np.float64]:
    """Bytes from rank to rank, message by message; shape (ranks, ranks)."""
    total = np.zeros((ranks, ranks))
    if phase.all_pairs:
        total[np.ix_(phase.source, phase.target)] += phase.bytes_per_pair
    else:
        np.add.at(total, (phase.source, phase.target), phase.bytes_per_pair)
    np.fill_diagonal(total, 0)
    return total


def cost_of(order: Sequence[str], topology: Topology, scores: LinkScores, strategy: str, model_bytes: float,
            ps: int = 0) -> Cost:
    """The cost of ranks on these nodes in this order."""
    names = sorted(set(order))
    place = np.array([names.index(name) for name in order])
    return predict_cost(Traffic(strategy, model_bytes, ps).phases(
        len(order)), network_links(names, topology, scores), place)
