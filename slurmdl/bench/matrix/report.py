"""Tables and pictures of what `slurmdl bench run` has measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slurmdl.bench import sockets
from slurmdl.bench.machine import IDLE
from slurmdl.bench.matrix import jobs
from slurmdl.bench.matrix.jobs import Outcome
from slurmdl.bench.matrix.spec import Cell, Spec
from slurmdl.errors import UnavailableError
from slurmdl.train.messages import LEVELS
from slurmdl.train.report.meters import PHASES

#: what the sum of the phases may differ from the time of the steps
SUMS = 0.03
COLUMNS = ("framework", "strategy", "model", "nodes", "placement", "status", "repeats", "images/s", "spread",
           "efficiency", "s/step", *PHASES, "hidden", *(f"bytes {level}" for level in LEVELS), "memory", "idle",
           "s to accuracy")


@dataclass(frozen=True)
class Figures:
    """Of one job.

    Attributes
    ----------
    images : per second, of all workers.
    seconds : of a step, the slowest worker's, median.
    phases : seconds of a step by phase, mean over workers and steps; communication is what computation did not hide.
    hidden : seconds of communication in a step that computation hid; None where nobody knows.
    sums : sum of the phases, as a share of the time of the steps.
    bytes : that all ranks sent in a step, by level: as the framework meters them, else over TCP.
    memory : bytes, of the worker that had most.
    idle : share of the processors' time, least of all nodes.
    reached : seconds of training until the accuracy asked for, None where it was not reached or not asked for.
    """

    images: float
    seconds: float
    phases: Mapping[str, float]
    hidden: float | None
    sums: float
    bytes: Mapping[str, float]
    memory: int
    idle: float
    reached: float | None


def figures(outcome: Outcome, spec: Spec) -> Figures:
    """What the ranks of a job have measured, as one.

    Where a framework does not tell how long a worker waited for others, it is how much longer the slowest one
    computed in the same step, as far as the worker stood still in communication.
    """
    steps = [its["steps"] for its in outcome.ranks]
    walls = [max(its["wall"] for its in same) for same in zip(*steps, strict=True)]
    metered = outcome.ranks[0]["communication"] is None
    phases = {phase: fmean(its[phase] for of in steps for its in of) for phase in PHASES}
    hidden = None if outcome.ranks[0]["hidden"] is None else fmean(its["hidden"] for its in outcome.ranks)
    if not metered:
        stood = []
        for same in zip(*steps, strict=True):
            computed = [its["data"] + its["forward"] + its["backward"] for its in same]
            stood += [min(its["communication"], max(computed) - own) for its, own in zip(same, computed, strict=True)]
        hidden = max(0.0, fmean(its["communication"] for its in outcome.ranks) - phases["communication"])
        phases["waiting"] += fmean(stood)
        phases["communication"] -= fmean(stood)
    counted = next((its["bytes"] for its in outcome.ranks if its["bytes"]), None)
    sent, made = (counted, spec.warm_up + spec.steps) if counted else (sockets.by_level(outcome.ranks), spec.steps)
    reached = [next((seconds for seconds, accuracy in its["course"] if accuracy >= spec.accuracy), None)
               for its in outcome.ranks if its["course"]]
    return Figures(
        len(steps) * spec.batch / median(walls), median(walls), phases, hidden,
        sum(phases.values()) / fmean(its["wall"] for of in steps for its in of),
        {level: sent[level] / made for level in LEVELS},
        max(its["memory"] for its in outcome.ranks), min(its["idle"] for its in outcome.ranks),
        reached[0] if reached and spec.accuracy else None)


@dataclass(frozen=True)
class Line:
    """A cell in the table, of all its repeats; the figures of a repeat that failed are left out."""

    cell: Cell
    status: str
    jobs: tuple[Figures, ...] = ()
    efficiency: float | None = None
    marks: tuple[str, ...] = field(default=())

    @property
    def images(self) -> float:
        return median(its.images for its in self.jobs)

    @property
    def usual(self) -> Figures:
        """The job in the middle."""
        return sorted(self.jobs, key=lambda its: its.images)[len(self.jobs) // 2]


def lines(folder: Path) -> list[Line]:
    """A line for each cell of a folder, in the spec's order."""
    spec = jobs.read_spec(folder)
    found: dict[Cell, list[Outcome]] = {}
    for outcome in jobs.outcomes(folder):
        found.setdefault(outcome.cell, []).append(outcome)
    made = [_line(cell, found.get(cell, []), spec) for cell in spec.cells()]
    return [replace(line, efficiency=_efficiency(line, made)) for line in made]


def _line(cell: Cell, outcomes: Sequence[Outcome], spec: Spec) -> Line:
    done = tuple(figures(outcome, spec) for outcome in outcomes if outcome.status == "done")
    others = [f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status for outcome in outcomes
              if outcome.status != "done"]
    status = "done" if done else "not run yet"
    if others:
        status = others[0] if not done else f"{len(others)} of {len(outcomes)} {others[0]}"
    marks = [word for word, true in (
        ("CPU-bound", done and median(its.idle for its in done) < IDLE),
        (f"phases sum to {median(its.sums for its in done):.0%} of the step" if done else "",
         done and abs(median(its.sums for its in done) - 1) > SUMS)) if true]
    return Line(cell, status, done, marks=tuple(marks))


def _efficiency(line: Line, others: Sequence[Line]) -> float | None:
    """Images/s per node, of those on the fewest nodes; None where there is nothing to compare."""
    same = [other for other in others if other.jobs and replace(other.cell, nodes=0) == replace(line.cell, nodes=0)]
    if not line.jobs or len(same) < 2:
        return None
    least = min(same, key=lambda other: other.cell.nodes)
    return line.images / line.cell.nodes / (least.images / least.cell.nodes)


def rows(made: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Values by COLUMNS; None where there is none."""
    for line in made:
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "framework": line.cell.framework,
                               "strategy": line.cell.strategy, "model": line.cell.model, "nodes": line.cell.nodes,
                               "placement": line.cell.placement, "repeats": len(line.jobs),
                               "status": "; ".join([line.status, *line.marks])}
        if line.jobs:
            its, rates = line.usual, [job.images for job in line.jobs]
            row |= {"images/s": line.images, "spread": max(rates) - min(rates), "efficiency": line.efficiency,
                    "s/step": its.seconds, **its.phases, "hidden": its.hidden, "memory": its.memory,
                    "idle": its.idle, "s to accuracy": its.reached,
                    **{f"bytes {level}": value for level, value in its.bytes.items()}}
        yield row


def markdown(made: Sequence[Line], spec: Spec) -> str:
    """The table, what it is of, and what the columns mean."""
    shown = [column for column in COLUMNS if any(row[column] is not None for row in rows(made))]
    text = [f"# {' / '.join(spec.models)}: {' / '.join(spec.frameworks)}", "",
            f"{spec.tasks_per_node} task{'s' * (spec.tasks_per_node > 1)} on each node, batches of {spec.batch}, "
            f"{spec.steps} steps after {spec.warm_up}, repeats {spec.repeats}, seed {spec.seed}"
            + (f", computation {spec.compute}" if spec.compute else "") + ".", "",
            "| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
    text += ["| " + " | ".join(_shown(column, row[column]) for column in shown) + " |" for row in rows(made)]
    text += ["", "images/s is the median of the repeats, spread largest minus smallest; all else is of the repeat in "
             "the middle. efficiency: images/s per node, of those on the fewest nodes. The phases are seconds of a "
             "step, mean over the workers; communication and waiting are what computation did not hide, hidden is "
             "what it did. bytes are those of all ranks in a step, by how far they went; of frameworks that do not "
             "meter them those that went over TCP.", ""]
    return "\n".join(text)


def _shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if column in ("efficiency", "idle"):
        return f"{value:.0%}"
    if column == "memory":
        return f"{value / 1e6:,.0f} MB"
    if column.startswith("bytes"):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(folder: Path) -> list[Path]:
    """Write the table as Markdown and CSV; returns the files."""
    made, spec = lines(folder), jobs.read_spec(folder)
    table, values = folder / "report.md", folder / "report.csv"
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(made))
    try:
        table.write_text(markdown(made, spec))
        values.write_text(text.getvalue())
        return [table, values]
    except OSError as error:
        raise UnavailableError(f"{folder}: cannot be written ({error.strerror})") from error
