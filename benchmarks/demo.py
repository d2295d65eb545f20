"""Two training jobs submitted three ways on a sandbox: plain Slurm, Slurm in leaf order, and slurmdl.

All runs use Slurm's topology/tree and the same free nodes, and alternate. They differ in submission and start:

- plain: `sbatch` and `srun`; ranks in alphabetical order of the nodes, as in Slurm up to 25.11.
- leaf order: Slurm's choice of nodes, ranks ordered by leaf switch, as in Slurm 26.05.
- slurmdl: `slurmdl sbatch` and `slurmdl srun`.
- control (with --results only): the worst of 30 random rank orders in the cost model; it must be slower.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import make_row
from benchmarks.suite import run_repeated, start
from slurmdl.errors import SandboxError
from slurmdl.plan import COMM_PATTERNS
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.slurm import hostlist

MODEL = "mlp:256,128"
PARAMETERS = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
RANKS, SERVERS, SEED = 6, 2, 1
#: nodes that another job occupies; the free nodes are in both zones
BUSY = ("n2", "n7")
TRAIN = "python -m slurmdl.train"
VARIANTS = ("plain", "leaf order", "slurmdl")
NEGATIVE_CONTROL = "control"


@dataclass(frozen=True)
class Job:
    """One of the two training jobs; `arguments` go to the trainer.

    Allreduce uses a ring, as in most libraries; its time depends on the rank order.
    """

    strategy: str
    ps: int
    steps: int
    title: str

    @property
    def arguments(self) -> str:
        return (f"--strategy {self.strategy} --comm-pattern {COMM_PATTERNS[self.strategy][0]} --ps {self.ps} "
                f"--model {MODEL} --steps {self.steps} --seed {SEED} --log-every {self.steps // 2}")


@dataclass
class Outcome:
    """Results of the runs of one job with one method.

    `inter_zone_bytes` : bytes between zones, counted by the routers. `metered_bytes` : the same, counted by the
    trainer.
    """

    nodes: str = ""
    zones: int = 0
    accuracy: float = 0.0
    metered_bytes: float = 0.0
    inter_zone_bytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


JOBS = (Job("ps", SERVERS, 40, "parameter server (2 PS, 4 workers)"),
        Job("allreduce", 0, 40, "allreduce (6 workers)"))

_HEADER = f"#!/bin/sh\n#SBATCH -N {RANKS} --ntasks-per-node=1 -J {{name}} -o {{name}}.log -t 5\n"
_ORDERED = """\
python - {order} > hosts.$SLURM_JOB_ID <<'END'
{program}
END
SLURM_HOSTFILE=hosts.$SLURM_JOB_ID exec srun --mpi=pmix -n {ranks} -m arbitrary {train}
"""
_ORDER_PROGRAM = """\
import os, random, sys
import numpy
from slurmdl import config
from slurmdl.launch.cluster_state import load_link_scores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.ranks.rank_orders import leaf_order
from slurmdl.placement.traffic import Traffic
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.load import load_topology
network = network_links(expand_hostlist(os.environ["SLURM_JOB_NODELIST"]), load_topology(),
                        load_link_scores(config.load_config(), "off"))
orders = [list(leaf_order(network))]
if sys.argv[1] != "leaf":
    strategy, ps = sys.argv[1].split(",")
    shuffle = random.Random(1)
    orders = [shuffle.sample(orders[0], len(orders[0])) for _ in range(30)]
    traffic = Traffic(strategy, 1e6, int(ps)).phases(len(orders[0]))
    orders.sort(key=lambda order: -predict_cost(traffic, network, numpy.array(order)).seconds)
print(*(network.nodes[i] for i in orders[0]), sep="\\n")
"""


def run(repeats: int = 1, results_file: str | None = None, name: str = "demo") -> None:
    """Run the jobs on a sandbox, and print progress and the table."""
    start = time.monotonic()
    variants = (*VARIANTS, NEGATIVE_CONTROL) if results_file else VARIANTS
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(8, 2)))
    try:
        demo = Demo(sandbox)
        outcomes, version = demo.run(variants, repeats), demo.version()
    finally:
        lifecycle.sandbox_down(name)
    print(f"cluster stopped and removed; total time {time.monotonic() - start:.0f} s\n")
    print(table(outcomes, variants))
    if results_file:
        _write(results_file, outcomes, repeats, version)


class Demo:
    """The demo on a running sandbox."""

    def __init__(self, sandbox: lifecycle.Sandbox) -> None:
        self.sandbox = sandbox
        self.folder = sandbox.shared / "demo"
        self._call(["mkdir", "-p", str(self.folder)], directory=str(sandbox.shared))

    def run(self, variants: Sequence[str], repeats: int) -> dict[tuple[str, str], Outcome]:
        """Run each job with each method, alternating; return (strategy, method) -> outcome."""
        spec = self.sandbox.spec
        print(f"Slurm cluster of 8 nodes on this machine: {self.version()}; links of "
              f"{spec.node_rate / 1e9:g} Gbit/s inside a zone, {spec.zone_rate / 1e6:g} Mbit/s between zones")
        self._call(["sbatch", "-J", "other", "-o", "/dev/null", "-N", str(len(BUSY)), "-w", ",".join(BUSY),
                    "--exclusive", "--wrap", "sleep 86400"])
        self._wait_for(lambda: self._call(["squeue", "-h", "-t", "R", "-o", "%j"]).split() == ["other"],
                       "the other user's job")
        print("\nzones, with another user's job on " + " and ".join(BUSY) + ":")
        print(_indent(self._call(["slurmdl", "topology", "show"])))
        print(_indent(self._call(["sinfo", "-o", "%6t %N"])))
        outcomes: dict[tuple[str, str], Outcome] = {}
        for repeat in range(repeats):
            for job in JOBS:
                if not repeat:
                    print(f"--- {job.title}, {PARAMETERS * 4:,} bytes of parameters: choice of nodes and ranks")
                    print(_indent(self._call(["slurmdl", "place", "--explain", self._script(job, "slurmdl")])))
                for variant in variants:
                    outcome = outcomes.setdefault((job.strategy, variant), Outcome())
                    self._run_job(job, variant, outcome, verbose=not repeat)
        return outcomes

    def _run_job(self, job: Job, variant: str, outcome: Outcome, *, verbose: bool) -> None:
        """Submit one job with one method, wait until it ends, and add its measurements."""
        script = self._script(job, variant)
        before = self.sandbox.inter_zone_bytes()
        if verbose:
            print(f"--- {job.strategy}, {variant}")
        submit = ["slurmdl", "sbatch"] if variant == "slurmdl" else ["sbatch"]
        summary_file = Path(script).with_suffix(".json")
        summary_file.unlink(missing_ok=True)  # summary of an earlier repeat
        submit_output = self._call([*submit, script], verbose=verbose)
        number = submit_output.split()[-1]
        self._wait_for(lambda: not self._call(["squeue", "-h", "-j", number]).strip(), f"{job.strategy}, {variant}",
                       240)
        log = (self.folder / Path(script).with_suffix(".log").name).read_text()
        try:
            summary: dict[str, Any] = json.loads(summary_file.read_text())
        except OSError as error:
            log_tail = " ".join(log.split())[-400:]
            raise SandboxError(f"job {number} ({job.strategy}, {variant}) failed: {log_tail}") from error
        outcome.inter_zone_bytes.append(self.sandbox.inter_zone_bytes() - before)
        outcome.metered_bytes = summary["bytes_sent"]["inter_zone"]
        outcome.seconds.append(summary["seconds_per_step"])
        outcome.accuracy = summary["test_accuracy"]
        outcome.nodes = hostlist.fold_hostlist(sorted({place["node"] for place in summary["rank_map"]}))
        outcome.zones = summary["num_zones"]
        if verbose:
            print(_indent(submit_output))
            # print the whole log of the placed run, and the lines of the other logs that differ
            shown_log = log if variant == "slurmdl" else "\n".join(
                line for line in log.splitlines() if line.startswith(("ranks:", "step ", "seconds/step")))
            print(_indent(shown_log))

    def _script(self, job: Job, variant: str) -> str:
        """Write the job script of a method; return its path."""
        name = f"{job.strategy}-{variant.replace(' ', '-')}"
        train = f"{TRAIN} {job.arguments} --summary {name}.json"
        text = _HEADER.format(name=name)
        if variant == "slurmdl":
            text += f"#DL --dl-strategy={job.strategy} --dl-model-bytes={PARAMETERS * 4}\n"
            text += f"#DL --dl-ps={job.ps}\n" if job.ps else ""
            text += f"slurmdl srun {train}\n"
        elif variant == "plain":
            text += f"exec srun --mpi=pmix {train}\n"
        else:
            order = "leaf" if variant == "leaf order" else f"{job.strategy},{job.ps}"
            text += _ORDERED.format(order=order, program=_ORDER_PROGRAM, ranks=RANKS, train=train)
        path = self.folder / f"{name}.sh"
        path.write_text(text)
        return str(path)

    def version(self) -> str:
        """Return Slurm's name and release."""
        return self._call(["sbatch", "--version"]).strip()

    def _wait_for(self, done: Callable[[], bool], condition: str, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise SandboxError(f"{condition}: not done within {timeout:g} s")
            time.sleep(0.2)

    def _call(self, argv: Sequence[str], *, directory: str | None = None, verbose: bool = True) -> str:
        """Run a command on the login host as the ordinary user; return its stdout, print its stderr."""
        line = self.sandbox.command(argv, directory=directory or str(self.folder))
        sys.stdout.flush()
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SandboxError(f"{' '.join(argv[:3])}: exit status {done.returncode}: "
                               f"{' '.join(done.stderr.split())[-300:]}")
        if done.stderr and verbose:
            print(_indent(done.stderr))
        return done.stdout


def table(outcomes: dict[tuple[str, str], Outcome], variants: Sequence[str]) -> str:
    """Format the final table; the margin is relative to leaf order, in step time and in bytes."""
    header = ("job", "placement", "nodes", "zones", "MB across zones", "s/step", "accuracy", "margin over leaf order")
    rows = [header]
    for job in JOBS:
        leaf = outcomes[job.strategy, "leaf order"]
        for variant in variants:
            outcome = outcomes[job.strategy, variant]
            time_margin = 1 - statistics.median(outcome.seconds) / statistics.median(leaf.seconds)
            byte_margin = 1 - statistics.median(outcome.inter_zone_bytes) / statistics.median(leaf.inter_zone_bytes)
            margin = "" if variant == "leaf order" else f"{_percent(time_margin)} time, {_percent(byte_margin)} bytes"
            rows.append((job.strategy, variant, outcome.nodes, str(outcome.zones),
                         f"{statistics.median(outcome.inter_zone_bytes) / 1e6:.1f}",
                         f"{statistics.median(outcome.seconds):.3f}", f"{outcome.accuracy:.1%}", margin))
    widths = [max(len(r[i]) for r in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    worst = max(abs(statistics.median(outcome.inter_zone_bytes) / outcome.metered_bytes - 1)
                for outcome in outcomes.values() if outcome.metered_bytes)
    return "\n".join([*lines, f"bytes: counted by the zones' routers; the trainer's own meter differs by "
                      f"at most {worst:.1%}"])


def _write(path: str, outcomes: dict[tuple[str, str], Outcome], repeats: int, version: str) -> None:
    rows = []
    for job in JOBS:
        leaf, plain = outcomes[job.strategy, "leaf order"], outcomes[job.strategy, "plain"]
        for metric, unit, field_name, slack in (("seconds per step", "s", "seconds", 1.05),
                                                ("bytes across zones", "B", "inter_zone_bytes", 1.01)):
            placed = outcomes[job.strategy, "slurmdl"]
            leaf_median, plain_median, placed_median = (
                statistics.median(getattr(outcome, field_name)) for outcome in (leaf, plain, placed))
            for variant in (*VARIANTS, NEGATIVE_CONTROL):
                samples = getattr(outcomes[job.strategy, variant], field_name)
                value, target, met = statistics.median(samples), "", None
                if variant == "slurmdl" and job.ps:
                    target, met = "below leaf order and plain", slack * value < min(leaf_median, plain_median)
                elif variant == "slurmdl":
                    target, met = f"at most {slack} x leaf order", value <= slack * leaf_median
                elif variant == NEGATIVE_CONTROL:
                    target, met = f"above {slack} x slurmdl", value > slack * placed_median
                rows.append(make_row(f"{job.strategy}: {metric}, {variant}", samples, unit, baseline=leaf_median,
                                     target=target, met=met))
    results.write(path, rows, seed=SEED, versions={"slurm": version},
                  command=f"python -m benchmarks.demo --repeats {repeats} --results {path}")


def _percent(share: float) -> str:
    return f"{share:+.0%}" if abs(share) >= 0.005 else "0%"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines())


def main(argv: list[str]) -> None:
    run_repeated("demo", "Two training jobs submitted three ways on a sandbox of 8 nodes (needs root).",
                 run, 1, argv)


if __name__ == "__main__":
    start(main)
