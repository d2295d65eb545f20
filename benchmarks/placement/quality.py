"""Predicted cost of placements compared with other methods to choose nodes and map ranks, for the same jobs.

On each cluster a trace of other jobs runs until the free nodes are scattered. Then ring, gossip and parameter-server
jobs are placed one by one, each on the same free nodes:

- Slurm: the nodes that a real slurmctld with topology/tree assigns (a cloud sandbox), with ranks in order of node
  names (Slurm with one task per node) and by leaf (Slurm 26.05 with block distribution).
- depth-first: the first free nodes in depth-first order over the tree, ranks in the same order.
- gmap, KaHIP: slurmdl's nodes, ranks mapped by Scotch or KaHIP.
- least bytes, parameter servers only: the nodes and ranks that send the fewest bytes between leaves, regardless of
  time. It is the reference for the savings.
- random: random free nodes, and random ranks on slurmdl's nodes; the negative controls.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import cloud_nodes
from benchmarks.placement import graph_mappers
from benchmarks.results import Row, make_row
from slurmdl.cluster import reader
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, SandboxError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import Cost
from slurmdl.sandbox import lifecycle as sandbox_cluster
from slurmdl.sandbox import namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec
from slurmdl.simulate import compare
from slurmdl.slurm import hostlist
from slurmdl.topology.source import block_topology, tree_topology
from slurmdl.topology.topology import Indices, Topology
from slurmdl.traffic import Traffic

CPUS = 4
MODEL_BYTES = 100e6
#: number of nodes of the jobs
SIZES = (8, 16, 32, 64, 128, 256, 512)
#: share of busy nodes, and seed of the background trace
LOADS = ((0.7, 1), (0.85, 2))
#: Two kinds of network. Default uplinks have half the total rate of the nodes below: the nodes' own links bound most
#: jobs, so times are often equal and bytes across zones decide. Thin uplinks have half the rate of one node's link
#: and bound almost all jobs.
LINKS = {"2:1 uplinks": LinkScores(), "thin uplinks": LinkScores(default_zone_bandwidth=(6.25e8,))}
#: Network with a target for savings of bytes. With thin uplinks the fewest bytes (all servers in the leaves with the
#: most nodes) and the shortest time (equally loaded uplinks) are different choices, and time is the objective.
BYTES_JUDGED = "2:1 uplinks"
SAVED_TARGET = 0.95
#: Number of timings of a mapping, and duration in seconds above which it is timed once. The median of slurmdl is
#: compared with the minimum of the others, so noise cannot favor slurmdl.
TIMINGS, SLOW_MAPPING_S = 3, 1.0
PLACED, LEAST = "slurmdl", "least bytes"
#: replaces a ratio to zero: JSON has no infinity
INFINITE = 1e9
#: tolerance of comparisons of predictions, for rounding
SLACK = 1e-6
#: methods whose predicted time slurmdl must not exceed
VARIANTS = ("Slurm, names", "Slurm, leaves", "depth-first", "gmap", "KaHIP")
CONTROLS = ("random nodes", "random ranks")


@dataclass(frozen=True)
class Pattern:
    """Communication pattern of a job, and its tasks per node."""

    name: str
    strategy: str
    per_node: int = 1
    nodes_per_server: int = 0

    def request(self, nodes: int) -> JobRequest:
        servers = nodes // self.nodes_per_server if self.nodes_per_server else 0
        # the other mappers do not constrain the node of rank 0
        options = DlOptions(strategy=self.strategy, ps=servers, bytes=str(MODEL_BYTES), rank0="any",
                       node_binding="zone")  # on blocks with segments of its own
        return JobRequest(options, (nodes, nodes), ntasks_per_node=self.per_node, exclusive=True, requeue=False)


PATTERNS = (Pattern("ring", "allreduce"), Pattern("gossip", "gossip"), Pattern("PS", "ps", 2, 4))


@dataclass(frozen=True)
class Shape:
    """One cluster; slurmctld can load it if it is a tree."""

    name: str
    topology: Topology


def shapes() -> tuple[Shape, ...]:
    """Return the clusters: a wide tree, two shapes of real networks with synthetic nodes, and blocks."""
    return (Shape("500 leaves of 20", tree_topology((1, 500, 10_000))),
            Shape("Leonardo's shape", tree_topology((1, 23, 394, 4_992))),
            Shape("JUPITER's shape", tree_topology((1, 25, 368, 5_888))),
            Shape("blocks of 18", block_topology((192, 3_456), (18, 72, 576))))


@dataclass
class JobResult:
    """Results of one job: variant -> cost, and variant -> seconds of the mapping."""

    pattern: str
    links: str
    nodes: int
    costs: dict[str, Cost] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class LoadedCluster:
    """One cluster with one load."""

    def __init__(self, shape: Shape, share: float, seed: int) -> None:
        self.topology = shape.topology
        self.busy = compare.occupied_nodes(self.topology, share, seed)
        self.generator = np.random.default_rng(seed)

    def modelled(self) -> ClusterSnapshot:
        """Return a snapshot of the cluster without a controller."""
        whole = (CPUS, CPUS * 1000)
        return ClusterSnapshot.from_nodes(
            [Node(name, ("ALLOCATED",) if busy else ("IDLE",), True, whole[0], 0 if busy else whole[0], whole[1],
                  0 if busy else whole[1], partitions=("main",))
             for name, busy in zip(self.topology.nodes, self.busy.tolist(), strict=True)],
            (Partition("main", True),))

    def run(self, pattern: Pattern, network: str, nodes: int, cluster: ClusterSnapshot,
            slurm: Sequence[str]) -> JobResult:
        """Place one job with all methods.

        Args:
            network: one of LINKS.
            slurm: nodes that Slurm assigned to such a job; () without Slurm.

        Raises:
            PlacementError: `place` finds no nodes.
        """
        request = pattern.request(nodes)
        scores = LINKS[network]
        placed = place_job(request, cluster, self.topology, scores)
        assert placed.rank_map is not None
        traffic = Traffic(pattern.strategy, MODEL_BYTES, request.options.ps)
        result = JobResult(pattern.name, network, nodes, {PLACED: placed.rank_map.cost})

        def add(variant: str, names: Sequence[str]) -> None:
            """Add the cost of ranks on these nodes in this order."""
            result.costs[variant] = self.cost(traffic, names, scores)

        if slurm:
            add("Slurm, names", np.repeat(slurm, pattern.per_node).tolist())
            add("Slurm, leaves", np.repeat(self.by_leaf(slurm), pattern.per_node).tolist())
        free = self.topology.node_order[~self.busy[self.topology.node_order]]
        add("depth-first", np.repeat(self.names(free[:nodes]), pattern.per_node).tolist())
        drawn = self.generator.permutation(np.repeat(self.generator.choice(free, nodes, False), pattern.per_node))
        add("random nodes", self.names(drawn))
        add("random ranks", self.generator.permutation(np.array(placed.rank_map.nodes)).tolist())
        if traffic.ps:
            add(LEAST, self.least_bytes(nodes, pattern.per_node, traffic.ps))
        self.map(result, traffic, placed.nodes, pattern.per_node, scores)
        return result

    def names(self, nodes: Indices) -> list[str]:
        return [self.topology.nodes[i] for i in nodes.tolist()]

    def by_leaf(self, nodes: Sequence[str]) -> list[str]:
        """Sort nodes by leaf, stably: the block distribution of Slurm 26.05."""
        return sorted(nodes, key=lambda name: int(self.topology.leaf[self.topology.node_index[name]]))

    def cost(self, traffic: Traffic, order: Sequence[str], scores: LinkScores) -> Cost:
        names = sorted(set(order))
        index = {name: i for i, name in enumerate(names)}
        return predict_cost(traffic.phases(len(order)), network_links(names, self.topology, scores),
                            np.array([index[name] for name in order]))

    def map(self, result: JobResult, traffic: Traffic, nodes: Sequence[str], per_node: int,
            scores: LinkScores) -> None:
        """Map the ranks over the same nodes with slurmdl and with the installed mappers."""
        slots = [(name, per_node) for name in nodes]
        timings = [_timed(lambda: best_rank_map(slots, self.topology, scores, traffic, "any"))
                   for _ in range(TIMINGS)]
        result.seconds[PLACED] = float(np.median(timings))
        network = network_links(nodes, self.topology, scores)
        path = graph_mappers.paths(network)
        slot = np.repeat(np.lexsort(path.T[::-1]), per_node)
        volume = graph_mappers.volumes(traffic.phases(len(slot)), len(slot))
        far = graph_mappers.distances(network, slot)
        variants: dict[str, Callable[[], tuple[Indices, float]]] = {
            "gmap": lambda: graph_mappers.gmap(volume, far), "KaHIP": lambda: graph_mappers.kahip(volume, path[slot])}
        for variant in variants.keys() - graph_mappers.missing().keys():
            mapped, seconds = variants[variant]()
            for _ in range(TIMINGS - 1 if seconds < SLOW_MAPPING_S else 0):
                seconds = min(seconds, variants[variant]()[1])
            result.seconds[variant] = seconds
            result.costs[variant] = self.cost(traffic, [nodes[i] for i in slot[mapped].tolist()], scores)

    def least_bytes(self, nodes: int, per_node: int, servers: int) -> list[str]:
        """Return the nodes of servers, then workers, that send the fewest bytes between leaves."""
        free = self.topology.node_order[~self.busy[self.topology.node_order]]
        leaf = self.topology.leaf[free]
        free_nodes = np.bincount(leaf, minlength=len(self.topology.zones))
        servers_tasks: list[str] = []
        workers_tasks: list[str] = []
        for zone, taken, count in assign_servers(free_nodes, nodes, per_node, servers):
            # one server on each node, then a second one on each, so that servers are spread
            tasks = self.names(np.tile(free[leaf == zone][:taken], per_node))
            servers_tasks += tasks[:count]
            workers_tasks += tasks[count:]
        return servers_tasks + workers_tasks


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def assign_servers(free_nodes: Indices, nodes: int, per_node: int, servers: int) -> list[tuple[int, int, int]]:
    """Return (leaf, nodes, servers) with the fewest bytes between leaves, over all choices of nodes and servers.

    A leaf with p servers among its t tasks keeps p (t - p) server-worker pairs inside. The maximum over p is a
    symmetric, convex function of the t, so it is largest for the least even t: fill the largest leaves one by one.
    Then assign each server to the leaf with the largest gain, t - 2 p - 1, which decreases with p.

    Args:
        free_nodes: number of free nodes of each leaf.
    """
    leaves = np.argsort(-free_nodes, kind="stable")
    taken = np.diff(np.minimum(np.cumsum(free_nodes[leaves]), nodes), prepend=0)
    leaves, taken = leaves[taken > 0], taken[taken > 0]
    tasks = taken * per_node
    count = np.zeros_like(tasks)
    for _ in range(servers):
        count[np.where(count < tasks, tasks - 2 * count - 1, -10**9).argmax()] += 1
    return list(zip(leaves.tolist(), taken.tolist(), count.tolist(), strict=True))


def rows(seed: int = 0) -> Iterator[Row]:
    """Yield the rows of all clusters and loads; `seed` is added to the seeds of the traces."""
    for reason in graph_mappers.missing().values():
        print(f"quality: mapper skipped: {reason}", file=sys.stderr, flush=True)
    for shape in shapes():
        results: list[JobResult] = []
        rejected = 0
        for share, number in LOADS:
            loaded = LoadedCluster(shape, share, seed + number)
            sizes = [size for size in SIZES if size <= (~loaded.busy).sum()]
            print(f"quality: {shape.name}, {share:.0%} busy", file=sys.stderr, flush=True)
            for size, cluster, slurm in slurm_choices(shape, loaded, sizes):
                for pattern, network in itertools.product(PATTERNS, LINKS):
                    try:
                        results.append(loaded.run(pattern, network, size, cluster, slurm))
                    except PlacementError:
                        rejected += 1
        yield make_row(f"{shape.name}: jobs without a zone that fits, of {len(results) + rejected}", [rejected],
                       "jobs")
        for network in LINKS:
            on_network = [f for f in results if f.links == network]
            yield from evaluate(f"{shape.name}, {network}", on_network)
            yield from saving_rows(f"{shape.name}, {network}", on_network, network == BYTES_JUDGED)


def slurm_choices(shape: Shape, loaded: LoadedCluster,
                  sizes: Sequence[int]) -> Iterator[tuple[int, ClusterSnapshot, tuple[str, ...]]]:
    """Yield (size of a job, snapshot before it, nodes that Slurm assigns); the nodes are () without Slurm."""
    reason = "Slurm 22.05 has no block topology" if shape.topology.kind != "tree" else \
        "a controller needs root" if os.geteuid() else ""
    sandbox = None
    if not reason:
        try:
            sandbox = sandbox_cluster.sandbox_up(SandboxSpec(
                f"quality-{os.getpid()}", shape.topology, cpus=CPUS, cloud_nodes=True, zone_features=False,
                slurm_conf_lines=cloud_nodes.SLURM_CONF_LINES))
        except SandboxError as error:
            reason = str(error)
    if sandbox is None:
        print(f"quality: {shape.name}: comparison with Slurm skipped: {reason}", file=sys.stderr, flush=True)
        modelled = loaded.modelled()
        yield from ((size, modelled, ()) for size in sizes)
        return
    try:
        yield from _measure_slurm_choices(sandbox, loaded, sizes)
    finally:
        sandbox_cluster.sandbox_down(sandbox.spec.name)


def _measure_slurm_choices(sandbox: sandbox_cluster.Sandbox, loaded: LoadedCluster,
                           sizes: Sequence[int]) -> Iterator[tuple[int, ClusterSnapshot, tuple[str, ...]]]:
    busy_nodes = loaded.names(np.flatnonzero(loaded.busy))
    others = cloud_nodes.submit_job(sandbox, ["-N", str(len(busy_nodes)), "--exclusive",
                                              "-w", hostlist.fold_hostlist(busy_nodes)])
    assert len(cloud_nodes.wait_for_nodes(sandbox, others)) == len(busy_nodes)
    for size in sizes:
        text = namespaces.run_on_host(sandbox.pids[LOGIN], ["scontrol", "-o", "-d"],
                                      stdin="show nodes\nshow partitions\nshow config\n")
        job = cloud_nodes.submit_job(sandbox, ["-N", str(size), "--exclusive"])
        assigned = cloud_nodes.wait_for_nodes(sandbox, job)
        cloud_nodes.power_down_job(sandbox, job, assigned)
        yield size, reader.parse_snapshot(text), assigned
        cloud_nodes.wait_for_idle_nodes(sandbox, assigned)


def evaluate(name: str, results: Sequence[JobResult]) -> Iterator[Row]:
    """Yield the rows of one cluster: ratios of slurmdl to each other method, and the negative controls."""
    for pattern in PATTERNS:
        of_pattern = [f for f in results if f.pattern == pattern.name]
        for variant in VARIANTS:
            pairs = [(f.costs[PLACED], f.costs[variant]) for f in of_pattern if variant in f.costs]
            if pairs:
                seconds = [_ratio(placed.seconds, reference.seconds) for placed, reference in pairs]
                worst = max(seconds)
                yield make_row(f"{name}, {pattern.name}: predicted seconds over those of {variant}", seconds, "times",
                               baseline=1.0, target=f"at most 1 for each job (worst {worst:.4g})",
                               met=worst <= 1 + SLACK)
                yield make_row(f"{name}, {pattern.name}: bytes across leaves over those of {variant}",
                               [_ratio(o.inter_zone_bytes, p.inter_zone_bytes) for o, p in pairs], "times",
                               baseline=1.0)
        for variant in ("gmap", "KaHIP"):
            times = [f.seconds[PLACED] / f.seconds[variant] for f in of_pattern if variant in f.seconds]
            if times:
                slower = sum(time > 1 for time in times)
                yield make_row(f"{name}, {pattern.name}: seconds to map over those of {variant}", times, "times",
                               baseline=1.0, target=f"median at most 1 (above for {slower} of {len(times)} jobs)",
                               met=float(np.median(times)) <= 1)
        for control in CONTROLS:
            # all ranks of uniform gossip are equivalent
            if not (control == "random ranks" and pattern.strategy == "gossip"):
                lost = [_excess(f.costs[control], f.costs[PLACED]) for f in of_pattern]
                metric = (f"control: {name}, {pattern.name}: {control}, predicted seconds over those of slurmdl, "
                          "or bytes if the seconds are equal")
                yield make_row(metric, lost, "times", baseline=1.0, target="above 1",
                               met=float(np.median(lost)) > 1 + SLACK)


def saving_rows(name: str, results: Sequence[JobResult], is_judged: bool) -> Iterator[Row]:
    """Yield the achieved share of the possible byte savings of parameter servers, relative to Slurm's nodes by leaf.

    The share means little if time and bytes conflict; hence the last row, the predicted time of the least bytes.
    """
    costs = [(f.costs[PLACED], f.costs["Slurm, leaves"], f.costs[LEAST]) for f in results
             if LEAST in f.costs and "Slurm, leaves" in f.costs]
    achieved = [slurm.inter_zone_bytes - placed.inter_zone_bytes for placed, slurm, _ in costs]
    possible = [slurm.inter_zone_bytes - least.inter_zone_bytes for _, slurm, least in costs]
    if sum(possible) <= 0:
        return
    share = sum(achieved) / sum(possible)
    yield make_row(f"{name}, PS: bytes across leaves saved relative to Slurm, leaves, as a share of the largest "
                   "possible saving, all jobs", [share], "share", baseline=1.0,
                   target=f"at least {SAVED_TARGET:g}" if is_judged else "",
                   met=share >= SAVED_TARGET if is_judged else None)
    yield make_row(f"{name}, PS: the same share, per job",
                   [d / c for d, c in zip(achieved, possible, strict=True) if c > 0], "share", baseline=1.0)
    yield make_row(f"{name}, PS: GB across leaves saved per iteration (baseline: largest possible saving)", [
        sum(achieved) / 1e9], "GB", baseline=sum(possible) / 1e9)
    yield make_row(f"{name}, PS: ms saved per iteration (baseline: duration with Slurm, leaves)",
                   [1e3 * (slurm.seconds - placed.seconds) for placed, slurm, _ in costs], "ms",
                   baseline=1e3 * float(np.median([slurm.seconds for _, slurm, _ in costs])))
    yield make_row(f"{name}, PS: predicted seconds of the placement with the fewest bytes over those of slurmdl",
                   [_ratio(least.seconds, placed.seconds) for placed, _, least in costs], "times", baseline=1.0)


def _excess(control: Cost, placed: Cost) -> float:
    seconds = _ratio(control.seconds, placed.seconds)
    return seconds if abs(seconds - 1) > SLACK else _ratio(control.inter_zone_bytes, placed.inter_zone_bytes)


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference else 1.0 if value <= 0 else INFINITE
