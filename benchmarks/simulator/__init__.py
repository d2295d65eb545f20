"""Simulated step times: validation against measured ones, and scaling from 8 to 10,000 nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.results import Row
from benchmarks.simulator import scaling, validation
from benchmarks.suite import Suite, draw_beside
from slurmdl.simulate.predict import SIMGRID_PYTHON
from slurmdl.slurm import process

#: points of the scaling plot, collected while the part runs
_points: list[scaling.Point] = []


def rows(part: str, seed: int, quick: bool) -> Iterator[Row]:
    """Yield the rows of a part; `validation` needs root, for a sandbox."""
    if part == "validation":
        yield from validation.rows(quick)
    else:
        _points.clear()
        yield from scaling.rows(seed, quick, _points)


def plot(results_file: str) -> None:
    """Draw the scaling plot next to the results file, if matplotlib is installed."""
    if _points:
        draw_beside(results_file, lambda path: scaling.draw(path, _points))


def simgrid_version() -> str:
    """Version of SimGrid; UnavailableError if it is missing."""
    return process.check_output(
        [SIMGRID_PYTHON, "-I", "-c", "import simgrid; print(simgrid.simgrid_version)"], timeout=60).strip()


SUITE = Suite("simulator",
              "Simulated step times compared with measured ones (needs root), and the value of placement "
              "from 8 to 10,000 nodes. Draws a plot next to the results file.",
              ("validation", "scaling"), rows,
              lambda: {"numpy": np.__version__, "simgrid": simgrid_version()},
              quick="fewer placements, at most 512 nodes", plot=plot)
