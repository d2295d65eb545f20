"""Meshes placed by slurmdl, and on the nodes that a real slurmctld chooses, on busy clusters of leaves of 18 nodes.

The controller is that of the installed Slurm with virtual nodes and topology/tree; leaf switches stand for blocks,
which Slurm has since 23.11. Its ranks are numbered by leaf, which is also the order of the node names here. Times are
predicted, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.mesh.rules import BLOCK, JOBS, RANKS_PER_NODE, SCORES, mean_zones_per_group
from benchmarks.placement.quality import LoadedCluster, Shape, slurm_choices
from benchmarks.results import Row, make_row
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.mesh import MeshTraffic
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.topology.source import tree_topology
from slurmdl.traffic import Traffic

LEAVES = (50, 278)
#: share of busy nodes, and whether they are drawn one by one, or left by a trace of other jobs
LOADS = ((0.5, False), (0.3, True), (0.3, True))


def rows(seed: int) -> Iterator[Row]:
    for leaves in LEAVES:
        shape = Shape(f"{leaves * BLOCK} nodes", tree_topology((1, leaves, leaves * BLOCK)))
        ratios: dict[tuple[str, str], list[float]] = {}
        spreads: dict[tuple[str, str], list[float]] = {}
        for number, (share, is_drawn) in enumerate(LOADS):
            loaded = LoadedCluster(shape, share, seed + number)
            if is_drawn:
                loaded.busy = loaded.generator.random(len(shape.topology.nodes)) < share
            jobs = {options.traffic: (job, options) for job, (_, mesh, model) in JOBS.items()
                    for options in [DlOptions(mesh=mesh, model=model, rank0="any")]}
            sizes = {traffic.mesh.ranks // RANKS_PER_NODE: None for traffic in jobs
                     if isinstance(traffic, MeshTraffic)}
            fitting = [size for size in sizes if size <= (~loaded.busy).sum()]
            for size, cluster, assigned in slurm_choices(shape, loaded, fitting):
                if not assigned:
                    return
                for traffic, (job, options) in jobs.items():
                    assert isinstance(traffic, MeshTraffic)
                    if traffic.mesh.ranks != size * RANKS_PER_NODE:
                        continue
                    request = JobRequest(options, (size, size), ntasks_per_node=RANKS_PER_NODE, exclusive=True)
                    rank_map = place_job(request, cluster, shape.topology, SCORES).rank_map
                    assert rank_map
                    placed = np.array(rank_map.nodes)
                    orders = {"slurmctld's nodes in leaf order": np.repeat(loaded.by_leaf(assigned), RANKS_PER_NODE),
                              "control, shuffled ranks": loaded.generator.permutation(placed)}
                    for name, order in orders.items():
                        ratios.setdefault((job, name), []).append(
                            _seconds(shape, traffic, order) / _seconds(shape, traffic, placed))
                        spreads.setdefault((job, name), []).append(
                            _zones(shape, traffic, order) / _zones(shape, traffic, placed))
        for (job, name), values in ratios.items():
            yield make_row(f"{shape.name}, {job}: predicted communication of {name} / slurmdl", values, "x",
                           target="above 1" if "control" in name else "at least 1",
                           met=min(values) > 1 if "control" in name else min(values) >= 1 - 1e-9)
            yield make_row(f"{shape.name}, {job}: leaves per group of {name} / slurmdl", spreads[job, name], "x")


def _seconds(shape: Shape, traffic: Traffic, order: np.ndarray) -> float:
    names, node_of_rank = np.unique(order, return_inverse=True)
    return predict_cost(traffic.phases(len(order)), network_links(names.tolist(), shape.topology, SCORES),
                        node_of_rank).seconds


def _zones(shape: Shape, traffic: MeshTraffic, order: np.ndarray) -> float:
    index = [shape.topology.node_index[name] for name in order.tolist()]
    return mean_zones_per_group(traffic, shape.topology.leaf[index].astype(np.int64))
