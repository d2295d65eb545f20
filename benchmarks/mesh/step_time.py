"""Seconds per step of a program with a real device mesh on a sandbox, for random and planned maps of its ranks.

Eight nodes in four zones with shaped links. One process per node stays up; for each map the process group is built
again with other ranks, then torch's init_device_mesh, and gloo carries the collectives of each dimension.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import sandbox_mpi
from benchmarks.results import Row, make_row
from slurmdl.dl_options import DlOptions
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.ranks.rank_orders import best_rank_map
from slurmdl.placement.traffic import Traffic
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, ZONES = 8, 4
NODE_RATE, ZONE_RATE = 3e8, 6e7
#: mesh -> bytes of each dimension
MESHES = {"pp=2,dp=4": {"pp": 2_000_000, "dp": 4_000_000}, "dp=4,tp=2": {"dp": 1_000_000, "tp": 4_000_000}}
RANDOM_MAPS = 40
TARGET = 0.9
#: median of three steps after a warm-up step, for each map
PROGRAM = '''
import json, os, socket, statistics, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

work = json.load(open(sys.argv[1]))
node, first = os.environ["SLURMD_NODENAME"], work["nodes"][0]
store = dist.TCPStore(first, 29517, len(work["nodes"]), is_master=node == first, wait_for_workers=True)
results = []
for number, job in enumerate(work["jobs"]):
    names, sizes, volumes = job["names"], job["sizes"], job["bytes"]
    rank = job["nodes"].index(node)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=len(job["nodes"]))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    buffers = {name: torch.ones(volumes[name] // 4) for name in names}

    def step():
        for name in names:
            group, at = mesh.get_group(name), mesh.get_local_rank(name)
            if name != "pp":
                dist.all_reduce(buffers[name], group=group)
                continue
            ranks = dist.get_process_group_ranks(group)
            for forward in (True, False):
                there, here = (at + 1, at - 1) if forward else (at - 1, at + 1)
                sent = [dist.isend(buffers[name], ranks[there])] if 0 <= there < len(ranks) else []
                if 0 <= here < len(ranks):
                    sent.append(dist.irecv(torch.empty_like(buffers[name]), ranks[here]))
                for request in sent:
                    request.wait()

    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    results.append(statistics.median(seconds[1:]))
    dist.destroy_process_group()
if node == first:
    json.dump(results, open(sys.argv[2], "w"))
store.set(f"done {node}", "")
if node == first:
    store.wait([f"done {each}" for each in work["nodes"]])
os._exit(0)
'''


def rows(seed: int) -> Iterator[Row]:
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"mesh-{os.getpid()}", round_robin_topology(NODES, ZONES),
                                               node_rate=NODE_RATE, zone_rate=ZONE_RATE))
    try:
        yield from _measured_rows(sandbox, seed)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def _measured_rows(sandbox: lifecycle.Sandbox, seed: int) -> Iterator[Row]:
    topology, generator = sandbox.spec.topology, np.random.default_rng(seed)
    scores = LinkScores(default_node_bandwidth=NODE_RATE / 8, default_zone_bandwidth=(ZONE_RATE / 8,))
    network = network_links(topology.nodes, topology, scores)
    for mesh, volumes in MESHES.items():
        dl = DlOptions(mesh=mesh, mesh_bytes=",".join(f"{name}={size}" for name, size in volumes.items()))
        traffic = Traffic.from_options(dl)
        assert traffic.mesh
        placed = best_rank_map([(name, 1) for name in topology.nodes], topology, scores, traffic).nodes
        by_leaf = np.argsort(topology.leaf, kind="stable")
        maps = {"placed": np.array([topology.nodes.index(name) for name in placed]), "leaf order": by_leaf,
                "plain srun": np.arange(NODES)}
        drawn = [generator.permutation(NODES) for _ in range(RANDOM_MAPS)]
        seconds = _measure(sandbox, traffic, [*maps.values(), *drawn])
        for name, value in zip(maps, seconds, strict=False):
            predicted = predict_cost(traffic.phases(NODES), network, maps[name]).seconds
            yield make_row(f"{mesh}: measured seconds per step, {name}; baseline: predicted", [value], "s",
                           baseline=predicted, target="" if name != "placed" else "no slower than the other two",
                           met=value <= 1.05 * min(seconds[:3]) if name == "placed" else None)
        predicted_all = np.array([predict_cost(traffic.phases(NODES), network, order).seconds for order in drawn])
        measured = np.array(seconds[len(maps):])
        correlation = rank_correlation(predicted_all, measured)
        yield make_row(f"{mesh}: rank correlation of predicted and measured seconds, {RANDOM_MAPS} random maps",
                       [correlation], "", target=f"at least {TARGET}", met=correlation >= TARGET)
        control = rank_correlation(generator.permutation(predicted_all), measured)
        yield make_row(f"{mesh}: control, shuffled predictions", [control], "", target="below 0.5", met=control < 0.5)


def _measure(sandbox: lifecycle.Sandbox, traffic: Traffic, maps: Sequence[IntArray]) -> list[float]:
    """Median seconds per step of each map, the node of each rank."""
    assert traffic.mesh
    mesh, nodes = traffic.mesh.mesh, sandbox.spec.topology.nodes
    volumes = {name: int(traffic.mesh.volumes[name].bytes) for name in mesh.names}
    jobs = [{"names": mesh.names, "sizes": mesh.sizes, "bytes": volumes, "nodes": [nodes[i] for i in order.tolist()]}
            for order in maps]
    folder = sandbox.shared / "mesh"
    sandbox_mpi.call(sandbox, ["mkdir", "-p", str(folder)])
    (folder / "work.json").write_text(json.dumps({"nodes": nodes, "jobs": jobs}))
    (folder / "program.py").write_text(PROGRAM)
    sandbox_mpi.call(sandbox, ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0", "salloc", "-Q", "-N", str(NODES),
                               "srun", "-n", str(NODES), "python", f"{folder}/program.py", f"{folder}/work.json",
                               f"{folder}/result.json"])
    result: list[float] = json.loads((folder / "result.json").read_text())
    return result


def rank_correlation(first: FloatArray, second: FloatArray) -> float:
    """Spearman's correlation; equal values have their mean rank."""
    def ranks(values: FloatArray) -> FloatArray:
        return np.array([((values < value).sum() + (values <= value).sum() - 1) / 2 for value in values])

    return float(np.corrcoef(ranks(np.round(first, 9)), ranks(second))[0, 1])
