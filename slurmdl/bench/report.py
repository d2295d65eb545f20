"""Tables and plots of the results of `slurmdl bench run`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from slurmdl.bench import submit
from slurmdl.bench.host_meters import CPU_BOUND_IDLE, bytes_by_locality
from slurmdl.bench.spec import Cell, Spec
from slurmdl.bench.submit import CellResult
from slurmdl.errors import UnavailableError
from slurmdl.text import pluralize
from slurmdl.train.meters import LOCALITY_LEVELS, PHASES

#: largest relative difference between the sum of the phases and the step time
PHASE_SUM_TOLERANCE = 0.03
MAX_BARS = 40  # of a plot
#: locality of messages -> column
BYTES_COLUMNS = dict(zip(LOCALITY_LEVELS, ("intra-node bytes", "intra-zone bytes", "inter-zone bytes"), strict=True))
COLUMNS = ("framework", "strategy", "model", "nodes", "placement", "status", "repeats", "images/s", "spread",
           "efficiency", "s/step", *PHASES, "overlapped comm", *BYTES_COLUMNS.values(), "memory", "CPU idle",
           "time to accuracy (s)")


@dataclass(frozen=True)
class JobFigures:
    """Metrics of one job.

    Attributes:
        images: images per second, all workers together.
        seconds: median step time of the slowest worker.
        phases: seconds of a step by phase, mean over workers and steps; communication is the exposed part only.
        overlapped_comm: seconds of communication in a step that overlap with computation; None if unknown.
        phase_sum_ratio: sum of the phases over the step time.
        bytes: bytes that all ranks send in a step, by locality, from the framework's own meter or else from TCP.
        memory: peak bytes of the worker that used most.
        cpu_idle: idle share of the CPUs on the busiest node.
        seconds_to_accuracy: training seconds to the target accuracy; None without a target, or if it is not reached.
    """

    images: float
    seconds: float
    phases: Mapping[str, float]
    overlapped_comm: float | None
    phase_sum_ratio: float
    bytes: Mapping[str, float]
    memory: int
    cpu_idle: float
    seconds_to_accuracy: float | None


def job_figures(result: CellResult, spec: Spec) -> JobFigures:
    """Combine the measurements of all ranks of a job.

    If the framework does not measure how long a worker waits for the others, the waiting time is the difference to
    the computation time of the slowest worker in the same step, at most the worker's communication time.
    """
    steps = [rank["steps"] for rank in result.ranks]
    walls = [max(step["wall"] for step in same) for same in zip(*steps, strict=True)]
    metered = result.ranks[0]["communication"] is None
    phases = {phase: fmean(step[phase] for rank_steps in steps for step in rank_steps) for phase in PHASES}
    overlapped_comm = None if result.ranks[0]["overlapped_comm"] is None else fmean(
        rank["overlapped_comm"] for rank in result.ranks)
    if not metered:
        waited = []
        for same in zip(*steps, strict=True):
            computed = [step["data"] + step["forward"] + step["backward"] for step in same]
            waited += [min(step["communication"], max(computed) - own)
                       for step, own in zip(same, computed, strict=True)]
        overlapped_comm = max(0.0, fmean(rank["communication"] for rank in result.ranks) - phases["communication"])
        phases["peer_wait"] += fmean(waited)
        phases["communication"] -= fmean(waited)
    counted = next((rank["bytes_sent"] for rank in result.ranks if rank["bytes_sent"]), None)
    sent, step_count = (counted, spec.warmup_steps + spec.steps) if counted else \
        (bytes_by_locality(result.ranks), spec.steps)
    seconds_to_accuracy = [
        next((seconds for seconds, accuracy in rank["accuracy_curve"] if accuracy >= spec.target_accuracy), None)
        for rank in result.ranks if rank["accuracy_curve"]]
    return JobFigures(
        len(steps) * spec.batch_size / median(walls), median(walls), phases, overlapped_comm,
        sum(phases.values()) / fmean(step["wall"] for rank_steps in steps for step in rank_steps),
        {level: sent[level] / step_count for level in LOCALITY_LEVELS},
        max(rank["memory"] for rank in result.ranks), min(rank["cpu_idle"] for rank in result.ranks),
        seconds_to_accuracy[0] if seconds_to_accuracy and spec.target_accuracy else None)


@dataclass(frozen=True)
class ReportRow:
    """One row of the table: a cell with the metrics of all repeats that succeeded."""

    cell: Cell
    status: str
    jobs: tuple[JobFigures, ...] = ()
    efficiency: float | None = None

    @property
    def images(self) -> float:
        return median(job.images for job in self.jobs)

    @property
    def median_job(self) -> JobFigures:
        """The job with the median images per second."""
        return sorted(self.jobs, key=lambda job: job.images)[len(self.jobs) // 2]


def report_rows(folder: Path) -> list[ReportRow]:
    """Return one row for each cell of a results directory, in the order of the spec."""
    spec = submit.read_spec(folder)
    by_cell: dict[Cell, list[CellResult]] = {}
    for result in submit.cell_results(folder):
        by_cell.setdefault(result.cell, []).append(result)
    lines = [_make_row(cell, by_cell.get(cell, []), spec) for cell in spec.cells()]
    return [replace(line, efficiency=_efficiency(line, lines)) for line in lines]


def _make_row(cell: Cell, cell_results: Sequence[CellResult], spec: Spec) -> ReportRow:
    done = tuple(job_figures(result, spec) for result in cell_results if result.status == "done")
    failures = [f"{result.status}: {result.reason}" if result.reason else result.status for result in cell_results
                if result.status != "done"]
    if not done:
        return ReportRow(cell, failures[0] if failures else "not run yet")
    status = f"{len(failures)} of {len(cell_results)} {failures[0]}" if failures else "done"
    if median(job.cpu_idle for job in done) < CPU_BOUND_IDLE:
        status += "; CPU-bound"
    ratio = median(job.phase_sum_ratio for job in done)
    if abs(ratio - 1) > PHASE_SUM_TOLERANCE:
        status += f"; phases sum to {ratio:.0%} of the step"
    return ReportRow(cell, status, done)


def _efficiency(line: ReportRow, others: Sequence[ReportRow]) -> float | None:
    """Return images/s per node relative to the fewest nodes; None if there is nothing to compare."""
    same = [other for other in others if other.jobs and replace(other.cell, nodes=0) == replace(line.cell, nodes=0)]
    if not line.jobs or len(same) < 2:
        return None
    least = min(same, key=lambda other: other.cell.nodes)
    return line.images / line.cell.nodes / (least.images / least.cell.nodes)


def rows(lines: Sequence[ReportRow]) -> Iterator[dict[str, Any]]:
    """Yield the values of each row by column; None for no value."""
    for line in lines:
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS), **vars(line.cell), "repeats": len(line.jobs),
                               "status": line.status}
        if line.jobs:
            job, rates = line.median_job, [repeat.images for repeat in line.jobs]
            row |= {"images/s": line.images, "spread": max(rates) - min(rates), "efficiency": line.efficiency,
                    "s/step": job.seconds, **job.phases, "overlapped comm": job.overlapped_comm, "memory": job.memory,
                    "CPU idle": job.cpu_idle, "time to accuracy (s)": job.seconds_to_accuracy,
                    **{BYTES_COLUMNS[level]: value for level, value in job.bytes.items()}}
        yield row


def markdown(lines: Sequence[ReportRow], spec: Spec) -> str:
    """Format the table, its settings, and the meaning of its columns."""
    shown = [column for column in COLUMNS if any(row[column] is not None for row in rows(lines))]
    text = [f"# {' / '.join(spec.models)}: {' / '.join(spec.frameworks)}", "",
            f"{spec.tasks_per_node} task{'s' * (spec.tasks_per_node > 1)} on each node, "
            f"batch size {spec.batch_size}, {pluralize(spec.steps, 'step')} after {spec.warmup_steps}, "
            f"repeats {spec.repeats}, seed {spec.seed}"
            + (f", computation {spec.emulate_compute}" if spec.emulate_compute else "") + ".", "",
            "| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
    text += ["| " + " | ".join(_shown(column, row[column]) for column in shown) + " |" for row in rows(lines)]
    text += ["",
             "images/s: median of the repeats; spread: largest minus smallest. All other columns are of the median "
             "repeat. efficiency: images/s per node, relative to the fewest nodes. The phases are seconds of a step, "
             "mean over the workers; communication and peer wait are exposed, overlapped comm overlaps with "
             "computation. Bytes are those of all ranks in a step; TCP bytes only, if the framework has no meter of "
             "its own.", ""]
    return "\n".join(text)


def _shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if column in ("efficiency", "CPU idle"):
        return f"{value:.0%}"
    if column == "memory":
        return f"{value / 1e6:,.0f} MB"
    if column.endswith("bytes"):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(folder: Path) -> list[Path]:
    """Write the table as Markdown and CSV; return the files."""
    lines, spec = report_rows(folder), submit.read_spec(folder)
    table, values = folder / "report.md", folder / "report.csv"
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(lines))
    try:
        table.write_text(markdown(lines, spec))
        values.write_text(text.getvalue())
        return [table, values]
    except OSError as error:
        raise UnavailableError(f"{folder}: not writable ({error.strerror})") from error


def draw_plots(folder: Path, lines: Sequence[ReportRow]) -> Iterator[Path]:
    """Write the plots that have data: scaling, phases, bytes by locality, time to accuracy; yield their files.

    Raises ImportError without matplotlib.
    """
    lines = [line for line in lines if line.jobs]
    if scaling := [line for line in lines if line.efficiency is not None]:
        yield _plot_scaling(folder / "scaling.svg", scaling)
    yield from _plot_bars(folder / "phases.svg", lines, PHASES, lambda job, phase: job.phases[phase],
                          "seconds per step")
    yield from _plot_bars(folder / "bytes.svg", lines, LOCALITY_LEVELS, lambda job, level: job.bytes[level] / 1e6,
                          "MB per step, all ranks")
    yield from _plot_bars(folder / "accuracy.svg", lines, ("training",),
                          lambda job, _: job.seconds_to_accuracy or 0.0, "time to accuracy (s)")


def _plot_scaling(file: Path, lines: Sequence[ReportRow]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    series: dict[Any, list[ReportRow]] = {}
    for line in lines:
        series.setdefault(replace(line.cell, nodes=0), []).append(line)
    for cell, selected in series.items():
        selected = sorted(selected, key=lambda line: line.cell.nodes)
        axes.plot([line.cell.nodes for line in selected], [line.images for line in selected], marker="o", linewidth=1,
                  label=f"{cell.framework} {cell.strategy}, {cell.model}, {cell.placement}")
    axes.set(xlabel="nodes", ylabel="images/s", xscale="log", yscale="log")
    nodes = sorted({line.cell.nodes for line in lines})
    axes.xaxis.minorticks_off()
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(file)
    return file


def _plot_bars(file: Path, lines: Sequence[ReportRow], parts: Sequence[str],
               value: Callable[[JobFigures, str], float], label: str) -> Iterator[Path]:
    """Draw a stacked bar for each row with a value that is not 0, the first row at the top; yield the file if any."""
    lines = [line for line in lines if any(value(line.median_job, part) for part in parts)][:MAX_BARS]
    if not lines:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.3 * len(lines)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(lines))
    for part in parts:
        width = [value(line.median_job, part) for line in lines]
        axes.barh(range(len(lines)), width, left=left, label=part, height=0.7)
        left += width
    axes.set_yticks(range(len(lines)), [str(line.cell) for line in lines], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    if len(parts) > 1:
        axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(parts))
    figure.savefig(file)
    yield file
