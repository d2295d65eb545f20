"""ResNet-50 with several frameworks on one and more nodes: images per second, scaling, and phases of a step.

Wang et al. 2019, the evaluation of frameworks on ResNet-50. doi:10.5281/zenodo.3455641. Its values are not quoted,
because they belong to its GPUs and its network. The same comparison is made here with other frameworks, by `slurmdl
bench run` on a sandbox. The network has its real size, 25,557,032 parameters. Its computation uses small images and
sleeps for the remaining time, because the ranks outnumber the cores; waiting threads sleep for the same reason. Links
have 1 Gbit/s. Weak scaling keeps the batch size per node, strong scaling the total batch size.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.heterogeneous.trainer_jobs import SETTINGS
from benchmarks.results import Row, cpu_bound_note, make_row
from slurmdl.bench import report
from slurmdl.bench.report import PHASE_SUM_TOLERANCE, ReportRow
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.train.meters import PHASES

FRAMEWORKS = ("slurmdl", "ddp", "post-local")
NODES, CPUS = (1, 2, 4), 2
#: bits/s of the links of nodes and zones
RATE = 1e9
#: batch size of a node, and its computation in seconds
BATCH, COMPUTE_S = 8, 0.8
REPEATS, STEPS, WARM_UP = 2, 8, 3
#: images of the data set
IMAGES = 1000
#: time limit of a matrix in seconds
TIMEOUT_S = 2400.0


def rows(seed: int) -> Iterator[Row]:
    """Yield images per second and shares of the phases, weak scaling first."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"frameworks-{os.getpid()}", round_robin_topology(NODES[-1], 2),
                                               node_rate=RATE, zone_rate=RATE, cpus=CPUS, zone_features=False,
                                               slurm_conf_lines=SETTINGS))
    try:
        weak = measure(sandbox, "weak", NODES, BATCH, COMPUTE_S, seed)
        strong = [report_row for nodes in NODES for report_row in (
            [row for row in weak if row.cell.nodes == nodes] if nodes == 1 else
            measure(sandbox, f"strong{nodes}", (nodes,), BATCH // nodes, COMPUTE_S / nodes, seed))]
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from evaluate("weak scaling", weak)
    yield from evaluate("strong scaling", strong)


def measure(sandbox: Sandbox, name: str, nodes: Sequence[int], batch: int, seconds: float,
            seed: int) -> list[ReportRow]:
    """Run a matrix of all frameworks as the ordinary user; return its rows."""
    spec = sandbox.shared / f"{name}.yaml"
    spec.write_text(matrix(nodes, batch, seconds, seed))
    done = subprocess.run(sandbox.command(["env", "OMP_WAIT_POLICY=passive", "slurmdl", "bench", "run", str(spec)],
                                          directory=str(sandbox.shared)),
                          stdout=subprocess.DEVNULL, stderr=sys.stderr, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SandboxError(f"slurmdl bench run {spec}: exit status {done.returncode}")
    report_rows = report.report_rows(Path(spec).with_suffix(""))
    if not any(report_row.jobs for report_row in report_rows):
        raise SandboxError(f"slurmdl bench run {spec}: no cell completed; the first one: {report_rows[0].status}")
    return report_rows


def matrix(nodes: Sequence[int], batch: int, seconds: float, seed: int) -> str:
    """Return the SPEC.yaml of `slurmdl bench run`."""
    return f"""\
frameworks: [{', '.join(FRAMEWORKS)}]
models: {{resnet50: "synthetic:3x32x32:1000:{IMAGES}"}}
nodes: [{', '.join(map(str, nodes))}]
placements: [slurm]
batch_size: {batch}
emulate_compute: {seconds:g}
warmup_steps: {WARM_UP}
steps: {STEPS}
repeats: {REPEATS}
seed: {seed}
"""


def evaluate(scaling: str, report_rows: Sequence[ReportRow]) -> Iterator[Row]:
    """Yield the rows of one kind of scaling; control: one node is equally fast with all frameworks."""
    measured = [report_row for report_row in report_rows if report_row.jobs]
    for report_row in report_rows:
        if report_row.jobs:
            continue
        if not report_row.status.startswith("missing"):
            yield make_row(f"{scaling}: {report_row.cell}: {report_row.status}", [0.0], "images/s", target="a result",
                           met=False)
        elif report_row.cell.nodes == NODES[0]:
            yield make_row(f"{scaling}: {report_row.cell.framework}: {report_row.status}", [0.0], "images/s")
    by_framework = {(report_row.cell.framework, report_row.cell.nodes): report_row for report_row in measured}
    for report_row in measured:
        cell = report_row.cell
        label = f"{scaling}, emulated computation: {cell.framework} {cell.strategy}, {cell.nodes} " \
                f"node{'s' * (cell.nodes > 1)}{cpu_bound_note([job.cpu_idle for job in report_row.jobs])}"
        rates = [job.images for job in report_row.jobs]
        ddp = by_framework.get(("ddp", cell.nodes))
        judged = cell.framework == "slurmdl" and cell.nodes > 1 and ddp is not None
        yield make_row(f"{label}: images/s", rates, "1/s", baseline=ddp.images if ddp else None,
                       target="at least DistributedDataParallel's" if judged else "",
                       met=report_row.images >= ddp.images if judged and ddp else None)
        if report_row.efficiency is not None and cell.nodes > 1:
            yield make_row(f"{label}: scaling efficiency",
                           [rate / report_row.images * report_row.efficiency for rate in rates], "share",
                           baseline=1.0)
        if cell.nodes > 1:
            yield make_row(f"{label}: bytes between nodes per step", _sent(report_row), "B",
                           baseline=statistics.median(_sent(ddp)) if ddp else None)
        for phase in PHASES:
            yield make_row(f"{label}: {phase}, share of a step",
                           [job.phases[phase] / sum(job.phases.values()) for job in report_row.jobs], "share")
        sums = statistics.median(job.phase_sum_ratio for job in report_row.jobs)
        yield make_row(f"{label}: sum of the phases over the step time",
                       [job.phase_sum_ratio for job in report_row.jobs], "share", baseline=1.0,
                       target=f"within {PHASE_SUM_TOLERANCE:.0%}", met=abs(sums - 1) <= PHASE_SUM_TOLERANCE)
    single_node_rates = [report_row.images for report_row in measured if report_row.cell.nodes == NODES[0]]
    if len(single_node_rates) > 1:
        yield make_row(f"{scaling}: images/s on one node, slowest framework over fastest (control)",
                       [min(single_node_rates) / max(single_node_rates)], "share", baseline=1.0,
                       target="at least 0.9", met=min(single_node_rates) >= 0.9 * max(single_node_rates))


def _sent(report_row: ReportRow) -> list[float]:
    """Return the bytes between nodes per step of each job."""
    return [job.bytes["intra_zone"] + job.bytes["inter_zone"] for job in report_row.jobs]
