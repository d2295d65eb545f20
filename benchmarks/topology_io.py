"""Time and memory to read and query topologies, by size; each sample in a fresh process.

The negative controls do the same work naively on one cluster, and must be slower: one ClusterShell NodeSet per node,
and a count of each node in every zone of its path.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.results import Row, make_row
from benchmarks.suite import run_repeated, start
from slurmdl.topology import write
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import TopologySet

SEED = 1
#: nodes, on leaves of 20 below one root
SIZES = (1_000, 10_000, 100_000)
#: nodes -> maximum (seconds, MB) to read a topology.conf
TARGETS = {10_000: (0.15, None), 100_000: (1.5, 500)}
FORMATS = ("conf", "yaml", "json")
CONTROL_NODES = 10_000

_READ = """\
import json, resource, sys, time
import numpy
from slurmdl.topology import load
start = time.perf_counter()
topology = load.load_topology(sys.argv[1])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
start = time.perf_counter()
topology.node_begin, topology.node_order
offsets = time.perf_counter() - start
start = time.perf_counter()
topology.sum_below(numpy.ones(len(topology.nodes), int))
sums = time.perf_counter() - start
print(json.dumps({"read": seconds, "peak": peak, "offsets": offsets, "sums": sums}))
"""

_CONTROL = """\
import json, sys, time
import numpy
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from slurmdl.topology import load
start = time.perf_counter()
leaf = {}
for line in open(sys.argv[1]):
    pairs = dict(word.split("=") for word in line.split())
    for node in NodeSet(pairs.get("Nodes", ""), resolver=RESOLVER_NOGROUP):
        leaf[str(NodeSet(node, resolver=RESOLVER_NOGROUP))] = pairs["SwitchName"]
seconds = time.perf_counter() - start
topology = load.load_topology(sys.argv[1])
assert leaf == {node: topology.leaf_of(node) for node in topology.nodes}
start = time.perf_counter()
count = dict.fromkeys(topology.zones, 0)
for node in topology.nodes:
    for zone in topology.path_of(node):
        count[zone] += 1
sums = time.perf_counter() - start
assert list(count.values()) == topology.sum_below(numpy.ones(len(topology.nodes), int)).tolist()
print(json.dumps({"read": seconds, "sums": sums}))
"""


def run(repeats: int = 5, results_file: str | None = None) -> None:
    """Measure; print the rows and write them to `results_file`."""
    rows: list[Row] = []

    def add(*arguments: Any, **options: Any) -> Row:
        rows.append(make_row(*arguments, **options))
        print(f"{rows[-1].metric}: {rows[-1].value:.4g} {rows[-1].unit}"
              f"{'' if rows[-1].met is None else '  met' if rows[-1].met else '  MISSED'}", flush=True)
        return rows[-1]

    with tempfile.TemporaryDirectory() as folder:
        samples = {(nodes, file_format): _samples(_READ, _file(folder, nodes, file_format), repeats)
                   for nodes in SIZES for file_format in FORMATS}
        control = _samples(_CONTROL, _file(folder, CONTROL_NODES, "conf"), repeats)
    for file_format in FORMATS:
        for nodes in SIZES:
            seconds, peak = TARGETS.get(nodes, (None, None)) if file_format == "conf" else (None, None)
            by_metric = samples[nodes, file_format]
            _evaluate(add, f"read {file_format}, {nodes} nodes", by_metric["read"], "s", seconds)
            _evaluate(add, f"peak memory, {file_format}, {nodes} nodes", by_metric["peak"], "MB", peak)
        large, small = (np.median(samples[nodes, file_format]["read"]) for nodes in (SIZES[-1], SIZES[-2]))
        add(f"growth of read {file_format}, {SIZES[-2]} to {SIZES[-1]} nodes", [large / small], "times",
            baseline=10.0)
    for key, metric in (("offsets", "node offsets of zones"), ("sums", "sums over every zone")):
        for nodes in SIZES:
            add(f"{metric}, {nodes} nodes", samples[nodes, "conf"][key], "s")
    for key, metric in (("read", "one NodeSet per node"), ("sums", "each node counted in every zone of its path")):
        baseline, value = (float(np.median(values[key])) for values in (samples[CONTROL_NODES, "conf"], control))
        add(f"control: {metric}, {CONTROL_NODES} nodes", control[key], "s", baseline=baseline,
            target="above 2 x baseline", met=value > 2 * baseline)
    if results_file:
        results.write(results_file, rows, seed=SEED, versions={"numpy": np.__version__},
                      command=f"python -m benchmarks.topology_io --repeats {repeats} --results {results_file}")


def _evaluate(add: Callable[..., Row], metric: str, samples: list[float], unit: str, limit: float | None) -> None:
    if limit is None:
        add(metric, samples, unit)
    else:
        add(metric, samples, unit, target=f"at most {limit:g} {unit}", met=float(np.median(samples)) <= limit)


def _file(folder: str, nodes: int, file_format: str) -> str:
    path = Path(folder) / f"{nodes}.{file_format}"
    if not path.exists():
        topology = tree_topology((1, nodes // 20, nodes))
        path.write_text(write.format_topology(TopologySet.single(topology), None, file_format))
    return str(path)


def _samples(program: str, path: str, repeats: int) -> dict[str, list[float]]:
    """Run the program on a file in fresh processes; return the samples of each metric."""
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        result = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120,
                                check=True)
        for key, value in json.loads(result.stdout).items():
            samples.setdefault(key, []).append(value)
    return samples


def main(argv: list[str]) -> None:
    run_repeated("topology_io", "Time and memory to read and query topologies, by size.",
                 run, 5, argv)


if __name__ == "__main__":
    start(main)
