"""Time of `place_job` for meshes on 10,000 nodes; the cluster is built before the clock starts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.results import Row, make_row
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

NODES, BLOCK, ROW = 10_000, 18, 16
#: mesh -> maximum seconds
TARGETS = {"dp=16,pp=8,tp=8": 0.1, "dp=16,pp=8,ep=8": 0.1, "dp=125,pp=10,tp=8": 1.0, "dp=25,ep=5,pp=10,tp=8": 1.0}
RANKS_PER_NODE = 8
REPEATS = 5


def make_cluster(seed: int, kind: str, free: float = 0.6) -> tuple[ClusterSnapshot, Topology]:
    """Blocks of 18 nodes, as a tree in rows of 16 blocks; each node is free with this probability."""
    names = [f"n{i:05d}" for i in range(NODES)]
    zones = [ZoneDecl(f"b{i // BLOCK}", nodes=tuple(names[i:i + BLOCK])) for i in range(0, NODES, BLOCK)]
    if kind == "tree":
        blocks = [zone.name for zone in zones]
        rows = [ZoneDecl(f"row{i // ROW}", children=tuple(blocks[i:i + ROW])) for i in range(0, len(blocks), ROW)]
        zones += [*rows, ZoneDecl("root", children=tuple(row.name for row in rows))]
    is_free = np.random.default_rng(seed).random(NODES) < free
    nodes = [Node(name, ("IDLE",) if idle else ("ALLOCATED",), cpus=8, cpus_unallocated=8 * int(idle), memory=8000,
                  memory_unallocated=8000 * int(idle), partitions=("main",))
             for name, idle in zip(names, is_free.tolist(), strict=True)]
    partition = Partition("main", True, memory_per_cpu=1000)
    return ClusterSnapshot.from_nodes(nodes, (partition,)), build_topology(zones, kind=kind, source="benchmark")


def rows(seed: int) -> Iterator[Row]:
    for kind in ("tree", "block"):
        cluster, topology = make_cluster(seed, kind)
        for mesh, limit in TARGETS.items():
            options = DlOptions(mesh=mesh, node_binding="zone")  # on blocks with segments of its own
            ranks = int(np.prod([int(item.split("=")[1]) for item in mesh.split(",")]))
            nodes = ranks // RANKS_PER_NODE
            request = JobRequest(options, nodes=(nodes, nodes), ntasks_per_node=RANKS_PER_NODE)
            samples, cpu = [], []
            for _ in range(REPEATS):
                start, cpu_start = time.perf_counter(), time.process_time()
                place_job(request, cluster, topology, LinkScores())
                samples.append(time.perf_counter() - start)
                cpu.append(time.process_time() - cpu_start)
            yield make_row(f"place_job of {mesh}, {ranks} ranks on {NODES} nodes, {kind}; baseline: CPU time",
                           samples, "s", baseline=float(np.median(cpu)), target=f"at most {limit:g}",
                           met=float(np.median(samples)) <= limit)
