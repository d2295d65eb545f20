"""How long `place` takes, by nodes of the cluster, and how much memory; every call in a fresh process.

What is placed from is made before the clock starts, as the readers make it: arrays of the cluster, the topology as
it was read, with nothing looked up in it yet.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from slurmdl.bench import results
from slurmdl.bench.results import Row

#: nodes of the cluster, on leaves of 20 below one root, two of five busy
SIZES = (1_000, 10_000, 100_000)
#: nodes of the cluster -> seconds that a job of 1,024 ranks (256 nodes) may take
TARGETS = {1_000: 0.010, 10_000: 0.050, 100_000: 0.500}
#: nodes of the cluster and ranks of the largest job, one to a node: it takes them all
LARGEST = 10_000
LARGEST_TARGET = 1.0
MEMORY_TARGET = 500.0
RANKS, PER_NODE = 1_024, 4
STRATEGIES = ("allreduce", "gossip", "ps")
REPEATS = 5
#: seconds after which a call is given up; it then counts as this long
LIMIT = 20.0

_PROGRAM = """\
import json, resource, sys, time
import numpy
from slurmdl.cluster.model import ClusterSnapshot, Node, Partition
from slurmdl.network.model import LinkScores
from slurmdl.placement.place import place
from slurmdl.request import DlOptions, JobRequest
from slurmdl.topology import example
nodes, leaves, ranks, per_node, share, strategy, seed = json.loads(sys.argv[1])
topology = example.tree((1, leaves, nodes))
busy = numpy.random.default_rng(seed).random(nodes) < share
idle, held = ("IDLE",), ("ALLOCATED",)
cluster = ClusterSnapshot.of(
    (Node(name, held if taken else idle, True, 4, 0 if taken else 4, 4000, 0 if taken else 4000, partitions=("main",))
     for name, taken in zip(topology.nodes, busy.tolist())), (Partition("main", True),))
servers = ranks // 16 if strategy == "ps" else 0
job = JobRequest(DlOptions(strategy=strategy, ps=servers), (ranks // per_node,) * 2, ntasks_per_node=per_node,
                 exclusive=True)
began, worked = time.perf_counter(), time.process_time()
found = place(job, cluster, topology, LinkScores())
seconds, work = time.perf_counter() - began, time.process_time() - worked
assert found.map is not None and len(found.map.nodes) == ranks
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(json.dumps({"seconds": seconds, "work": work, "peak": peak}))
"""


def rows(seed: int = 0) -> Iterator[Row]:
    """Times by strategy and size, their growth, the largest job, and the peak memory of the largest cluster."""
    median: dict[tuple[str, int], float] = {}
    peak: list[float] = []
    for strategy in STRATEGIES:
        for nodes in SIZES:
            seconds, work, memory = _samples(nodes, RANKS, PER_NODE, 0.4, strategy, seed)
            median[strategy, nodes] = float(np.median(seconds))
            peak = memory if nodes == SIZES[-1] else peak
            target = TARGETS.get(nodes)
            yield results.row(f"place, {strategy}, {RANKS} ranks, {nodes} nodes", seconds, "s",
                              target=f"at most {target:g} s" if target else "",
                              met=median[strategy, nodes] <= target if target else None)
            yield results.row(f"processor time of place, {strategy}, {RANKS} ranks, {nodes} nodes", work, "s")
        for less, more in itertools.pairwise(SIZES):
            growth, linear = median[strategy, more] / median[strategy, less], more / less
            yield results.row(f"growth of place, {strategy}, {less} to {more} nodes", [growth], "times",
                              baseline=linear, target=f"at most {linear:g}", met=growth <= linear)
        yield results.row(f"peak memory, {strategy}, {SIZES[-1]} nodes", peak, "MB",
                          target=f"under {MEMORY_TARGET:g} MB", met=max(peak) < MEMORY_TARGET)
        seconds, *_ = _samples(LARGEST, LARGEST, 1, 0.0, strategy, seed)
        yield results.row(f"place, {strategy}, {LARGEST} ranks, {LARGEST} nodes", seconds, "s",
                          target=f"at most {LARGEST_TARGET:g} s", met=float(np.median(seconds)) <= LARGEST_TARGET)


def _samples(nodes: int, ranks: int, per_node: int, share: float, strategy: str,
             seed: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds, seconds of processors and peak MB of calls in processes of their own."""
    job = json.dumps([nodes, nodes // 20, ranks, per_node, share, strategy, seed])
    found = []
    for _ in range(REPEATS):
        try:
            done = subprocess.run([sys.executable, "-c", _PROGRAM, job], capture_output=True, text=True,
                                  timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            print(f"{strategy}, {ranks} ranks, {nodes} nodes: given up after {LIMIT:g} s", flush=True)
            return [LIMIT], [LIMIT], [0.0]
        if done.returncode:
            raise RuntimeError(f"place of {job}: {done.stderr.strip().splitlines()[-1]}")
        found.append(json.loads(done.stdout))
    return [f["seconds"] for f in found], [f["work"] for f in found], [f["peak"] for f in found]
