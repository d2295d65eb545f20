"""Simulated step times: against real ones, and from 8 to 10,000 nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl.bench import simulate_scaling, simulate_validation
from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row
from slurmdl.simulate import predict

#: the first needs root, for a sandbox
PARTS = ("validation", "scaling")
SEED = 1


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED, quick: bool = False) -> None:
    """Measure the parts in `only` (all by default), as `Bench.run` says; `quick` fewer placements and smaller jobs.

    Beside the file of results a picture of the scaling is drawn, where matplotlib is installed.
    """
    points: list[simulate_scaling.Point] = []

    def rows(part: str, its: int) -> Iterator[Row]:
        if part == "validation":
            yield from simulate_validation.rows(quick)
        else:
            yield from simulate_scaling.rows(its, quick, points)

    Bench("simulate", PARTS, rows, lambda: {"numpy": np.__version__, "simgrid": predict.version()},
          "--quick" if quick else "").run(only, results_file, seed)
    if results_file and points:
        try:
            simulate_scaling.draw(f"{os.path.splitext(results_file)[0]}.svg", points)
        except ImportError:
            print("no picture: pip install 'slurmdl[plot]'", file=sys.stderr)
