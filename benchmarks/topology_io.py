"""Time and memory to read and query topologies, by size; each read in a fresh process.

The negative controls do the same work naively, on the smallest cluster only: one ClusterShell NodeSet for each node,
pairwise comparison of zone paths, and counting each node up its path. They must be slower.
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
from slurmdl.topology import example, write
from slurmdl.topology.topology import TopologySet

SEED = 1
#: nodes, on leaves of 20 below one root; each ten times the one before
SIZES = (1_000, 10_000, 100_000)
#: nodes -> (seconds, MB) that reading topology.conf may take
TARGETS = {10_000: (0.15, None), 100_000: (1.5, 500)}
FORMS = ("conf", "yaml", "json")
PAIRS = 1_000_000
#: pairs that the naive control compares; its time is scaled to PAIRS
PLAIN_PAIRS = 2_000
PLAIN_NODES = 10_000

_READ = """\
import json, resource, sys, time
import numpy
from slurmdl.topology import read
began = time.perf_counter()
topology = read.read(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
pairs = numpy.random.default_rng(int(sys.argv[2])).integers(0, len(topology.nodes), (2, int(sys.argv[3])))
began = time.perf_counter()
topology.begin, topology.order
offsets = time.perf_counter() - began
began = time.perf_counter()
topology.common(*pairs)
common = time.perf_counter() - began
began = time.perf_counter()
topology.sums(numpy.ones(len(topology.nodes), int))
sums = time.perf_counter() - began
print(json.dumps({"read": seconds, "peak": peak, "offsets": offsets, "common": common, "sums": sums,
                  "nodes": len(topology.nodes)}))
"""

_PLAIN = """\
import json, sys, time
import numpy
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from slurmdl.topology import read
began = time.perf_counter()
leaf = {}
for line in open(sys.argv[1]):
    pairs = dict(word.split("=") for word in line.split())
    for node in NodeSet(pairs.get("Nodes", ""), resolver=RESOLVER_NOGROUP):
        leaf[str(NodeSet(node, resolver=RESOLVER_NOGROUP))] = pairs["SwitchName"]
seconds = time.perf_counter() - began
topology = read.read(sys.argv[1])
assert leaf == {node: topology.leaf_of(node) for node in topology.nodes}
wanted, compared = int(sys.argv[3]), int(sys.argv[4])
one, other = numpy.random.default_rng(int(sys.argv[2])).integers(0, len(topology.nodes), (2, compared))
began = time.perf_counter()
common = []
for i, j in zip(one, other):
    shared = [zone for zone in topology.path(topology.nodes[i]) if zone in topology.path(topology.nodes[j])]
    common.append(topology.zone_index[shared[-1]])
pairs = (time.perf_counter() - began) * wanted / compared
assert common == topology.common(one, other).tolist()
began = time.perf_counter()
count = dict.fromkeys(topology.zones, 0)
for node in topology.nodes:
    for zone in topology.path(node):
        count[zone] += 1
sums = time.perf_counter() - began
assert list(count.values()) == topology.sums(numpy.ones(len(topology.nodes), int)).tolist()
print(json.dumps({"read": seconds, "common": pairs, "sums": sums}))
"""


def run(repeats: int = 5, results_file: str | None = None) -> None:
    """Measure; print the rows and write them to `results_file`."""
    rows: list[Row] = []

    def add(*arguments: Any, **more: Any) -> Row:
        rows.append(make_row(*arguments, **more))
        print(f"{rows[-1].metric}: {rows[-1].value:.4g} {rows[-1].unit}"
              f"{'' if rows[-1].met is None else '  met' if rows[-1].met else '  MISSED'}", flush=True)
        return rows[-1]

    with tempfile.TemporaryDirectory() as folder:
        found = {(nodes, form): _samples(_READ, _file(folder, nodes, form), repeats)
                 for nodes in SIZES for form in FORMS}
        plain = _samples(_PLAIN, _file(folder, PLAIN_NODES, "conf"), repeats)
    for form in FORMS:
        for nodes in SIZES:
            seconds, peak = TARGETS.get(nodes, (None, None)) if form == "conf" else (None, None)
            here = found[nodes, form]
            _evaluate(add, f"read {form}, {nodes} nodes", here["read"], "s", seconds)
            _evaluate(add, f"peak memory, {form}, {nodes} nodes", here["peak"], "MB", peak)
        growth = [np.median(found[SIZES[-1], form]["read"]) / np.median(found[SIZES[-2], form]["read"])]
        add(f"growth of read {form}, {SIZES[-2]} to {SIZES[-1]} nodes", growth, "times", baseline=10.0)
    for key, what in (("offsets", "offsets of members"), ("common", f"lowest common zones of {PAIRS} pairs"),
                      ("sums", "sums over every zone")):
        for nodes in SIZES:
            add(f"{what}, {nodes} nodes", found[nodes, "conf"][key], "s")
    for key, what in (("read", "one NodeSet for each node"), ("common", f"paths compared for {PAIRS} pairs"),
                      ("sums", "each node counted up its path")):
        ours = float(np.median(found[PLAIN_NODES, "conf"][key]))
        value = float(np.median(plain[key]))
        add(f"control: {what}, {PLAIN_NODES} nodes", plain[key], "s", baseline=ours, target="above 2 x ours",
            met=value > 2 * ours)
    if results_file:
        results.write(results_file, rows, seed=SEED, versions={"numpy": np.__version__},
                      command=f"python -m benchmarks.topology_io --repeats {repeats} --results {results_file}")


def _evaluate(add: Callable[..., Row], metric: str, samples: list[float], unit: str, limit: float | None) -> None:
    if limit is None:
        add(metric, samples, unit)
    else:
        add(metric, samples, unit, target=f"at most {limit:g} {unit}", met=float(np.median(samples)) <= limit)


def _file(folder: str, nodes: int, form: str) -> str:
    path = Path(folder) / f"{nodes}.{form}"
    if not path.exists():
        path.write_text(
    write.format_topology(
        TopologySet.single(
            example.tree_topology(
                (1, nodes // 20, nodes))), None, form))
    return str(path)


def _samples(program: str, path: str, repeats: int) -> dict[str, list[float]]:
    """Run the program on a file in fresh processes; return the samples of each metric."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", program, path, str(SEED), str(PAIRS), str(PLAIN_PAIRS)],
                              capture_output=True, text=True, timeout=120, check=True)
        for key, value in json.loads(done.stdout).items():
            found.setdefault(key, []).append(value)
    return found


def main(argv: list[str]) -> None:
    run_repeated("topology_io", "Time and memory to read and query topologies, by size.",
                 run, 5, argv)


if __name__ == "__main__":
    start(main)
