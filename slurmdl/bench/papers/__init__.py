"""The papers behind slurmdl: for each the experiment that stands for it, with its published figures beside ours.

    slurmdl bench paper dltap adaptive-gossip

A new one is one file here, with `rows(seed)`, and one line in PAPERS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version

from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row

#: name -> its module; all but `adaptive-gossip` need root, for a sandbox
PAPERS = {name: f"slurmdl.bench.papers.{module}" for name, module in (
    ("dltap", "dltap"), ("zones", "zones"), ("adaptive-gossip", "adaptive_gossip"),
    ("heterogeneous", "heterogeneous"), ("frameworks", "frameworks"))}
SEED = 1


def run(names: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure what stands for these papers (all by default), as `Bench.run` says."""
    Bench("paper", tuple(PAPERS), _rows, lambda: {
        package: version(package) for package in ("torch", "numpy", "scikit-learn", "ortools")}, positional=True).run(
            names, results_file, seed)


def _rows(name: str, seed: int) -> Iterator[Row]:
    yield from import_module(PAPERS[name]).rows(seed)
