"""Plots of a matrix: scaling, phases of a step, bytes by locality, and time to accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from slurmdl.bench.matrix.report import JobFigures, ReportRow
from slurmdl.train.meters import PHASES
from slurmdl.train.p2p import LOCALITY_LEVELS

MAX_BARS = 40


def draw(folder: Path, lines: Sequence[ReportRow]) -> Iterator[Path]:
    """Write the plots that have data; yield their files."""
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
