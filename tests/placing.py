"""Small clusters and topologies for placement tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import NetworkLinks, network_links, predict_cost
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


def job(nodes: int, options: DlOptions = DlOptions(), **fields: object) -> JobRequest:  # noqa: B008
    """Request of this number of nodes."""
    return JobRequest(options, (nodes, nodes), **fields)  # type: ignore[arg-type]


def matrix(phase: Phase, ranks: int) -> npt.NDArray[np.float64]:
    """Return the bytes sent from each rank to each rank, shape (ranks, ranks)."""
    total = np.zeros((ranks, ranks))
    if phase.all_pairs:
        total[np.ix_(phase.source, phase.target)] += phase.bytes_per_pair
    else:
        np.add.at(total, (phase.source, phase.target), phase.bytes_per_pair)
    np.fill_diagonal(total, 0)
    return total


def cost_of(traffic: Traffic, topology: Topology, order: Sequence[str], scores: LinkScores = SCORES) -> Cost:
    """Predict the cost of an iteration whose rank i runs on node `order[i]`."""
    links = network_links(sorted(set(order)), topology, scores)
    node_of_rank = np.array([links.nodes.index(name) for name in order])
    return predict_cost(traffic.phases(len(order), links.leaf[node_of_rank]), links, node_of_rank)


def sum_messages(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: npt.NDArray[np.int64]) -> Cost:
    """Cost as predict_cost defines it, message by message; with all names of equal bottlenecks."""
    nodes = node_of_rank.tolist()
    zones_of = [[zone for zone in row if zone >= 0] for row in links.ancestors.tolist()]
    levels = range(links.level_group.shape[1])
    by_level, total, inter_node, seconds = [0.0 for _ in levels], 0.0, 0.0, 0.0
    longest: tuple[float, set[str]] = (0.0, set())

    def highest(node: int, level: int) -> int:
        """The highest zone above a node up to this level, at least its leaf; -1 without zones."""
        return max(zones_of[node][:1] + [zone for zone in zones_of[node] if links.zone_level[zone] <= level],
                   key=lambda zone: int(links.zone_level[zone]), default=-1)

    for phase in phases:
        times: defaultdict[tuple[object, ...], float] = defaultdict(float)
        for (sender, receiver), size in np.ndenumerate(matrix(phase, len(nodes))):
            ends = [(sender, "out"), (receiver, "in")]
            here, there = nodes[sender], nodes[receiver]
            total += size
            if here == there or not size:
                continue
            inter_node += size
            leaf, other_leaf = zones_of[here][:1], zones_of[there][:1]
            for (rank, direction), other in zip(ends, (there, here), strict=True):
                node = nodes[rank]
                for zone in set(zones_of[node]) - set(zones_of[other]):
                    times["zone", zone, direction] += size / links.zone_capacity[zone]
                if len(links.leaf_capacity) and leaf == other_leaf != []:
                    times["leaf", node, direction] += size / links.leaf_capacity[node]
                    continue
                own_rail = [nodes[:rank].count(node) % links.rails]
                rails = [*range(links.rails)] if phase.all_pairs else own_rail
                for rail in rails:
                    share = size / len(rails)
                    times["node", node, direction, rail] += share / (links.node_capacity[node] / links.rails)
            for path, pair in enumerate(links.slow_paths.leaf_pairs.tolist()):
                if sorted(pair) == sorted(leaf + other_leaf):
                    times["path", path, leaf == pair[:1]] += size / links.slow_paths.capacity[path]
            for level in levels:
                by_level[level] += size * (highest(here, level) != highest(there, level))
        slowest = max(times.values(), default=0.0)
        names = {"node": links.nodes, "leaf": links.nodes, "zone": links.zones, "path": links.slow_paths.names}
        if slowest > longest[0] * (1 + 1e-9):
            longest = slowest, {names[str(key[0])][int(str(key[1]))] for key, time in times.items()
                                if time > slowest * (1 - 1e-9)}
        loaded = {key[:2] for key in times}
        at_nodes = max((float(links.node_latency[i]) for kind, i in loaded if kind in ("node", "leaf")), default=0.0)
        up = sum(max((float(links.zone_latency[i]) for kind, i in loaded if kind == "zone"
                      and links.zone_level[i] == level), default=0.0) for level in {*links.zone_level.tolist()})
        on_path = max((float(links.slow_paths.latency[i]) for kind, i in loaded if kind == "path"), default=0.0)
        seconds += slowest + phase.rounds * 2 * (at_nodes + max(up, on_path / 2))
    inter_zone = by_level[0] if by_level else 0.0
    inside, in_zone = ((total - part) / total if total else 1.0 for part in (inter_node, inter_zone))
    leaves = {zones_of[node][0] for node in nodes if zones_of[node]}
    return Cost(seconds, inter_node, inter_zone, ",".join(sorted(longest[1])), tuple(by_level), inside, in_zone,
                len(leaves))
