"""Time and memory of `slurmdl audit` for a million records, and a check of its finding.

The records are of a simulated cluster: jobs start at once on free nodes, the lowest numbers first, and are dropped if
there are too few. Most run on one node, the others on 2 to 256. The negative control places the same jobs on the best
nodes: the audit must find nothing to gain.
"""

from __future__ import annotations

import heapq
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import results
from benchmarks.results import Row, make_row
from benchmarks.suite import run_repeated, start
from slurmdl.history.best_nodes import BestNodes, CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.links.link_scores import LinkScores
from slurmdl.slurm.hostlist import ranged_string
from slurmdl.topology import write
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import TopologySet

SEED = 1
#: zones per level and nodes: 5,000 nodes on leaves of 20
SHAPE = (1, 10, 250, 5_000)
RECORDS, CONTROL_RECORDS = 1_000_000, 20_000
MAX_SECONDS, MAX_MB = 60, 1000
MEAN_RUN_S, INTERVAL_S = 7200, 11  # of the jobs: the cluster is about 85 % busy
ONE_NODE_SHARE = 0.6

_AUDIT = """\
import json, resource, sys, time
start = time.perf_counter()
from slurmdl.cli.main import main
status = main(["audit", sys.argv[1], "--topology", sys.argv[2], "--html", sys.argv[3] + "/report.html", "--json"])
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_SELF)
peak = used.ru_maxrss * 1024 / 1e6
print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak_mb": peak, "status": status}))
"""


def write_records(path: str, records: int, strategy: str = "") -> None:
    """Write the output of sacct for a simulated cluster; with a strategy the jobs get the best nodes for it."""
    random = np.random.default_rng(SEED)
    leaves = Leaves.from_topology(tree_topology(SHAPE))
    names = leaves.node_names
    best = BestNodes(CommCosts(leaves, LinkScores(), [strategy or "gossip"], 100e6), is_quick=True)
    is_free = np.ones(len(names), bool)
    running: list[tuple[int, int, list[int]]] = []
    sizes = np.where(random.random(2 * records) < ONE_NODE_SHARE, 1, 2 ** random.integers(1, 9, 2 * records))
    sizes = np.where(sizes > 16, random.choice([1, 2, 4, 32, 64, 128, 256], 2 * records,
                                               p=[.3, .2, .2, .15, .09, .04, .02]), sizes)
    runs = np.maximum(60, random.exponential(MEAN_RUN_S, 2 * records)).astype(int)
    when, written, job = 1_700_000_000, 0, 0
    with open(path, "w", encoding="utf-8") as file:
        file.write("JobID|User|Partition|State|Submit|Start|End|Timelimit|NNodes|NCPUS|NodeList\n")
        while written < records:
            size, run = int(sizes[job]), int(runs[job])
            job, when = (job + 1) % len(sizes), when + int(random.integers(0, 2 * INTERVAL_S))
            while running and running[0][0] <= when:
                is_free[heapq.heappop(running)[2]] = True
            free = np.flatnonzero(is_free)
            if len(free) < size:
                continue
            chosen = free[:size]
            if strategy:
                leaf = leaves.leaf_of_node[free]
                counts = np.bincount(leaf, minlength=len(leaves.size))
                # any free nodes in several zones stand for nodes of the job
                spread = np.bincount(np.append(leaf[:size - 1], leaf[-1]), minlength=len(leaves.size))
                quota = best.compare(spread, counts)[2]
                chosen = np.concatenate([free[leaf == zone][:quota[zone]] for zone in np.flatnonzero(quota)])
            is_free[chosen] = False
            heapq.heappush(running, (when + run, written, chosen.tolist()))
            nodes = ranged_string(names[i] for i in chosen.tolist())
            file.write(f"{written}|user{job % 300}|main|COMPLETED|{_iso(when)}|{_iso(when)}|{_iso(when + run)}|"
                       f"1-00:00:00|{size}|{64 * size}|{nodes}\n")
            written += 1


def _iso(seconds: int) -> str:
    return str(np.datetime64(seconds, "s"))


def run(repeats: int = 3, results_file: str | None = None) -> None:
    """Measure; print the rows and write them to `results_file`."""
    rows: list[Row] = []

    def add(metric: str, samples: list[float], unit: str, target: str = "", met: bool | None = None,
            baseline: float | None = None) -> None:
        rows.append(make_row(metric, samples, unit, target=target, met=met, baseline=baseline))
        verdict = "" if met is None else "  met" if met else "  MISSED"
        print(f"{metric}: {rows[-1].value:.4g} {unit}{verdict}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        topology = f"{folder}/topology.conf"
        zones = TopologySet.single(tree_topology(SHAPE))
        Path(topology).write_text(write.format_topology(zones, None, "conf"))
        write_records(f"{folder}/all.txt", RECORDS)
        write_records(f"{folder}/plain.txt", CONTROL_RECORDS)
        for strategy in ("allreduce", "gossip"):
            write_records(f"{folder}/{strategy}.txt", CONTROL_RECORDS, strategy)
        samples = [_audit(f"{folder}/all.txt", topology, folder) for _ in range(repeats)]
        plain, packed, best = (_audit(f"{folder}/{name}.txt", topology, folder)
                               for name in ("plain", "allreduce", "gossip"))
    seconds, peak = ([sample[key] for sample in samples] for key in ("seconds", "peak_mb"))
    add(f"audit of {RECORDS:,} records", seconds, "s", f"at most {MAX_SECONDS} s", max(seconds) <= MAX_SECONDS)
    add(f"processor time, {RECORDS:,} records", [sample["cpu"] for sample in samples], "s")
    add(f"peak memory, {RECORDS:,} records", peak, "MB", f"at most {MAX_MB} MB", max(peak) <= MAX_MB)
    add("jobs on several nodes", [samples[0]["jobs"]], "jobs")
    add("jobs in several leaf zones", [samples[0]["spread"]], "jobs")
    add(f"factor of dense traffic, {CONTROL_RECORDS:,} records, lowest node numbers", [plain["factor"]], "times",
        "above 1.05", plain["factor"] > 1.05)
    add("control: the same jobs on the best nodes for it", [best["factor"]], "times", "1.00",
        round(best["factor"], 2) == 1)
    # dense traffic is fastest in more leaf zones than necessary; a ring needs the fewest
    add("control: leaf zones above the fewest possible, per job, on the best nodes for a ring", [packed["extra"]],
        "zones", "below 1/5 of baseline", packed["extra"] < plain["extra"] / 5, plain["extra"])
    if results_file:
        results.write(results_file, rows, seed=SEED, versions={"numpy": np.__version__},
                      command=f"python -m benchmarks.audit --repeats {repeats} --results {results_file}")


def _audit(records: str, topology: str, folder: str) -> dict[str, float]:
    """Audit in a fresh process: seconds, peak memory, and what the audit found."""
    output = subprocess.run([sys.executable, "-c", _AUDIT, records, topology, folder], capture_output=True, text=True,
                            timeout=600, check=True).stdout
    report, measured = output.rsplit("\n", 2)[:2]
    found = json.loads(report)["total"]
    return {**json.loads(measured), "jobs": found["jobs"], "spread": found["jobs_in_several_zones"],
            "factor": found["strategies"]["gossip"]["mean_factor"],
            "extra": (found["used_zones"] - found["fewest_zones"]) / found["jobs"]}


def main(argv: list[str]) -> None:
    run_repeated("audit", "Time and memory of an audit of a million records, and a check of its finding.", run, 3,
                 argv)


if __name__ == "__main__":
    start(main)
