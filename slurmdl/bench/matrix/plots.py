"""Plots of a matrix: scaling, phases of a step, bytes by locality, and time to accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slurmdl.bench.matrix.report import ReportRow
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.report.meters import PHASES

#: largest number of bars in a plot
MAX_BARS = 40


def draw(folder: Path, lines: Sequence[ReportRow]) -> Iterator[Path]:
    """Write the plots that have data; yield their files."""
    lines = [line for line in lines if line.jobs]
    for name, draw_lines, selected in (
            ("scaling", _scaling, [line for line in lines if line.efficiency is not None]),
            ("phases", _phases, lines[:MAX_BARS]),
            ("bytes", _bytes, [line for line in lines if any(line.median_job.bytes.values())][:MAX_BARS]),
            ("accuracy", _accuracy,
             [line for line in lines if line.median_job.seconds_to_accuracy is not None][:MAX_BARS])):
        if selected:
            figure = Figure(figsize=(9, 4 if name == "scaling" else 1.5 + 0.3 * len(selected)), layout="constrained")
            draw_lines(figure.subplots(), selected)
            file = folder / f"{name}.svg"
            figure.savefig(file)
            yield file


def _scaling(axes: Any, lines: Sequence[ReportRow]) -> None:
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


def _phases(axes: Any, lines: Sequence[ReportRow]) -> None:
    _stacked(axes, lines, PHASES, lambda line, phase: line.median_job.phases[phase], "seconds per step")


def _bytes(axes: Any, lines: Sequence[ReportRow]) -> None:
    _stacked(axes, lines, LOCALITY_LEVELS, lambda line, level: line.median_job.bytes[level] / 1e6,
             "MB per step, all ranks")


def _accuracy(axes: Any, lines: Sequence[ReportRow]) -> None:
    _stacked(axes, lines, ("training",), lambda line, _: line.median_job.seconds_to_accuracy or 0.0,
             "time to accuracy (s)")


def _stacked(axes: Any, lines: Sequence[ReportRow], parts: Sequence[str], value: Callable[[ReportRow, str], float],
             label: str) -> None:
    """Draw a stacked bar for each row, the first row at the top."""
    left = [0.0] * len(lines)
    for part in parts:
        width = [value(line, part) for line in lines]
        axes.barh(range(len(lines)), width, left=left, label=part, height=0.7)
        left = [begin + more for begin, more in zip(left, width, strict=True)]
    axes.set_yticks(range(len(lines)), [str(line.cell) for line in lines], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    if len(parts) > 1:
        axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(parts))
