"""Meshes placed by slurmdl, and by the rules that users have today, on clusters of blocks with random free nodes.

The rules are written from their descriptions: the best-fit choice of Slurm's topology/block with ranks in block
order, contiguous nodes in the order of names, and whole segments with ranks in segment order, as the guides of
NeMo-RL and NeMo-Run ask for. Times are predicted, not measured. The published figure to compare with is that of
Arnold (2025): groups of a dimension are spread over 1.67 times fewer blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.results import Row, make_row
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.mesh import MeshTraffic
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology

BLOCK, RANKS_PER_NODE = 18, 4
#: nodes with 4 GPUs and NVLink inside a block (1,800 GB/s of a GPU in both directions), 400 Gbit/s of network each
SCORES = LinkScores(default_node_bandwidth=4 * 5e10, default_leaf_bandwidth=4 * 9e11, default_rails=4,
                    default_zone_bandwidth=(BLOCK * 4 * 5e10,), default_latency=2e-6)
#: job -> (nodes of the cluster, mesh, model)
JOBS = {
    "7B, small": (180, "dp=16,tp=4", "params=7B,hidden=4096,layers=32,seq=4096"),
    "70B": (900, "dp=8,pp=8,tp=8", "params=70B,hidden=8192,layers=80,seq=8192,micro-batches=16"),
    "MoE, 32 experts": (900, "dp=4,pp=4,ep=32", "params=200B,hidden=6144,layers=64,seq=4096,micro-batches=8,"
                                               "expert-params=190B"),
    "405B": (5000, "dp=16,pp=16,tp=8", "params=405B,hidden=16384,layers=128,seq=8192,micro-batches=32"),
    "long context": (900, "dp=4,cp=16,tp=8", "params=8B,hidden=4096,layers=32,seq=131072")}
CLUSTERS = 5
FREE = 0.7

Rule = Callable[[IntArray, int, IntArray], IntArray | None]
"""(block of each node, nodes wanted, free nodes) -> nodes in rank order, or None."""


def best_fit(block: IntArray, wanted: int, free: IntArray) -> IntArray | None:
    """The largest blocks first, the last one best-fit; ranks in block order."""
    left = np.bincount(block[free], minlength=int(block.max()) + 1)
    take = np.zeros_like(left)
    while wanted:
        fitting = np.flatnonzero(left >= wanted)
        chosen = int(fitting[left[fitting].argmin()]) if len(fitting) else int(left.argmax())
        if not left[chosen]:
            return None
        take[chosen] = min(wanted, int(left[chosen]))
        wanted -= int(take[chosen])
        left[chosen] = 0
    return np.concatenate([free[block[free] == i][:take[i]] for i in np.flatnonzero(take)])


def contiguous(block: IntArray, wanted: int, free: IntArray) -> IntArray | None:
    """The free nodes next to each other in the order of names: the shortest span."""
    if len(free) < wanted:
        return None
    spans = free[wanted - 1:] - free[:len(free) - wanted + 1]
    first = int(spans.argmin())
    return free[first:first + wanted]


def segments(block: IntArray, wanted: int, free: IntArray) -> IntArray | None:
    """Whole segments of the largest size for which enough are free; ranks in segment order."""
    usable = [free[block[free] == i] for i in range(int(block.max()) + 1)]
    for size in (size for size in range(BLOCK, 1, -1) if wanted % size == 0):
        found = np.concatenate([nodes[:len(nodes) // size * size] for nodes in usable])
        if len(found) >= wanted:
            return found[:wanted]
    return None


RULES: dict[str, Rule] = {"best fit by block": best_fit, "contiguous nodes": contiguous, "segments": segments}


def rows(seed: int) -> Iterator[Row]:
    for job, (count, mesh, model) in JOBS.items():
        options = DlOptions(mesh=mesh, model=model, node_binding="zone")  # with segments of its own
        traffic = options.traffic
        assert isinstance(traffic, MeshTraffic)
        ranks = traffic.mesh.ranks
        wanted = ranks // RANKS_PER_NODE
        ratios: dict[str, list[float]] = {name: [] for name in RULES}
        spreads: dict[str, list[float]] = {name: [] for name in RULES}
        shuffled = []
        for number in range(CLUSTERS):
            generator = np.random.default_rng([seed, number])
            names = [f"n{i:05d}" for i in range(count)]
            block = np.arange(count) // BLOCK
            free = np.flatnonzero(generator.random(count) < FREE)
            topology = build_topology([ZoneDecl(f"b{i}", nodes=tuple(names[i * BLOCK:(i + 1) * BLOCK]))
                                       for i in range(int(block.max()) + 1)], kind="block", source="benchmark")
            is_free = np.isin(np.arange(count), free).tolist()
            cluster = ClusterSnapshot.from_nodes(
                [Node(name, ("IDLE",) if idle else ("ALLOCATED",), cpus=4, cpus_unallocated=4 * int(idle),
                      memory=4000, memory_unallocated=4000 * int(idle), partitions=("main",))
                 for name, idle in zip(names, is_free, strict=True)], (Partition("main", True, memory_per_cpu=1000),))
            request = JobRequest(options, nodes=(wanted, wanted), ntasks_per_node=RANKS_PER_NODE)
            try:
                placement = place_job(request, cluster, topology, SCORES)
            except PlacementError:
                continue
            assert placement.rank_map
            network = network_links(names, topology, SCORES)
            index = {name: i for i, name in enumerate(names)}
            placed = np.array([index[name] for name in placement.rank_map.nodes])
            phases = traffic.phases(ranks)
            seconds = predict_cost(phases, network, placed).seconds
            for name, rule in RULES.items():
                nodes = rule(block, wanted, free)
                if nodes is not None:
                    order = np.repeat(nodes, RANKS_PER_NODE)
                    ratios[name].append(predict_cost(phases, network, order).seconds / seconds)
                    spreads[name].append(mean_zones_per_group(traffic, block[order])
                                         / mean_zones_per_group(traffic, block[placed]))
            shuffled.append(predict_cost(phases, network, generator.permutation(placed)).seconds / seconds)
        for name in RULES:
            if ratios[name]:
                yield make_row(f"{job} ({mesh}): predicted communication of {name} / slurmdl", ratios[name], "x",
                               target="at least 1", met=min(ratios[name]) >= 1 - 1e-9)
                yield make_row(f"{job} ({mesh}): blocks per group of {name} / slurmdl", spreads[name], "x")
        yield make_row(f"{job} ({mesh}): control, the placed nodes with shuffled ranks / slurmdl", shuffled, "x",
                       target="above 1", met=min(shuffled) > 1)


def mean_zones_per_group(traffic: MeshTraffic, block_of_rank: IntArray) -> float:
    """Mean number of blocks of a group, weighted by the bytes that a rank sends along its dimension."""
    total = weight = 0.0
    for dimension in traffic.dimensions:
        blocks = block_of_rank[traffic.groups(dimension.dims)]
        ordered = np.sort(blocks, axis=1)
        count = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
        size = dimension.bytes_per_message * (dimension.size - 1 if dimension.pairs == "all" else 1)
        total += size * float(count.mean())
        weight += size
    return total / weight
