"""Time and memory of `place`, by cluster size; each call in a fresh process.

The inputs are built before the clock starts, as the readers build them: arrays of the cluster, and the topology
without cached lookups. The repeats alternate between all cases, so that load on the machine affects all cases alike.
Targets apply to wall time; CPU time is shown next to it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.results import Row, make_row

#: nodes of the cluster, on leaves of 20 below one root; two of five are busy
SIZES = (1_000, 10_000, 100_000)
#: nodes of the cluster -> maximum seconds for a job of 1,024 ranks (256 nodes)
TARGETS = {1_000: 0.010, 10_000: 0.050, 100_000: 0.500}
#: nodes of the cluster and ranks of the largest job, which uses all nodes with one rank each
LARGEST = 10_000
LARGEST_TARGET = 1.0
MEMORY_TARGET = 500.0
RANKS, PER_NODE = 1_024, 4
STRATEGIES = ("allreduce", "gossip", "ps")
REPEATS = 5
#: time limit of a call in seconds; a call that exceeds it counts as this long
LIMIT = 20.0

_PROGRAM = """\
import json, resource, sys, time
import numpy
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.topology.source import tree_topology
nodes, leaves, ranks, per_node, share, strategy, seed = json.loads(sys.argv[1])
topology = tree_topology((1, leaves, nodes))
busy = numpy.random.default_rng(seed).random(nodes) < share
idle, allocated = ("IDLE",), ("ALLOCATED",)
cluster = ClusterSnapshot.from_nodes(
    (Node(name, allocated if is_busy else idle, True, 4, 0 if is_busy else 4, 4000, 0 if is_busy else 4000,
          partitions=("main",)) for name, is_busy in zip(topology.nodes, busy.tolist())), (Partition("main", True),))
servers = ranks // 16 if strategy == "ps" else 0
job = JobRequest(DlOptions(strategy=strategy, ps=servers), (ranks // per_node,) * 2, ntasks_per_node=per_node,
                 exclusive=True)
start, cpu_start = time.perf_counter(), time.process_time()
placement = place_job(job, cluster, topology, LinkScores())
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
assert placement.rank_map is not None and len(placement.rank_map.nodes) == ranks
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": peak}))
"""


@dataclass(frozen=True)
class Case:
    """One job on one cluster; `share` of the nodes is busy."""

    strategy: str
    nodes: int
    ranks: int
    per_node: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.ranks} ranks, {self.nodes} nodes"


@dataclass(frozen=True)
class Sample:
    """One call: wall seconds, CPU seconds, and peak MB of its process."""

    seconds: float
    cpu_seconds: float
    peak: float


def rows(seed: int = 0) -> Iterator[Row]:
    """Yield times by strategy and size, their growth, the largest job, and peak memory of the largest cluster."""
    plain = {(strategy, nodes): Case(strategy, nodes, RANKS, PER_NODE, 0.4)
             for strategy in STRATEGIES for nodes in SIZES}
    largest = {strategy: Case(strategy, LARGEST, LARGEST, 1, 0.0) for strategy in STRATEGIES}
    samples: dict[Case, list[Sample]] = defaultdict(list)
    for number in range(REPEATS):
        print(f"speed: repeat {number + 1} of {REPEATS}", file=sys.stderr, flush=True)
        for case in (*plain.values(), *largest.values()):
            samples[case].append(_sample(case, seed))
    for strategy in STRATEGIES:
        for nodes in SIZES:
            yield from _times(plain[strategy, nodes], samples[plain[strategy, nodes]], TARGETS.get(nodes))
        for smaller, larger in itertools.pairwise(SIZES):
            # relative to the best time of the smaller size, so that load cannot hide growth
            best = min(sample.seconds for sample in samples[plain[strategy, smaller]])
            growth = [sample.seconds / best for sample in samples[plain[strategy, larger]]]
            yield make_row(f"growth of place, {strategy}, {smaller} to {larger} nodes", growth, "times",
                           baseline=larger / smaller, target=f"at most {larger / smaller:g}",
                           met=float(np.median(growth)) <= larger / smaller)
        peak = [sample.peak for sample in samples[plain[strategy, SIZES[-1]]]]
        yield make_row(f"peak memory, {strategy}, {SIZES[-1]} nodes", peak, "MB",
                       target=f"under {MEMORY_TARGET:g} MB", met=max(peak) < MEMORY_TARGET)
        yield from _times(largest[strategy], samples[largest[strategy]], LARGEST_TARGET)


def _times(case: Case, samples: Sequence[Sample], target: float | None) -> Iterator[Row]:
    seconds = [sample.seconds for sample in samples]
    yield make_row(f"place, {case.name}", seconds, "s", target=f"at most {target:g} s" if target else "",
                   met=float(np.median(seconds)) <= target if target else None)
    yield make_row(f"CPU time of place, {case.name}", [sample.cpu_seconds for sample in samples], "s")


def _sample(case: Case, seed: int) -> Sample:
    """Run one call in its own process."""
    job = json.dumps([case.nodes, case.nodes // 20, case.ranks, case.per_node, case.share, case.strategy, seed])
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM, job], capture_output=True, text=True, timeout=LIMIT,
                              check=False)
    except subprocess.TimeoutExpired:
        print(f"speed: {case.name}: time limit of {LIMIT:g} s exceeded", file=sys.stderr, flush=True)
        # the memory is unknown; a value at the target counts as missed
        return Sample(LIMIT, LIMIT, MEMORY_TARGET)
    if done.returncode:
        raise RuntimeError(f"place of {job}: {done.stderr.strip().splitlines()[-1]}")
    return Sample(**json.loads(done.stdout))
