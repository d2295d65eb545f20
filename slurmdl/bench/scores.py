"""Link scores: what probes recover of real links, what they are worth to training, and how they scale."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import import_module

import numpy as np

from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row

#: part -> its module, which has `rows(seed)`; the first two need root, for a sandbox
PARTS = {"links": "slurmdl.bench.scores_links", "training": "slurmdl.bench.scores_training",
         "scale": "slurmdl.bench.scores_scale", "collect": "slurmdl.bench.scores_collect"}
SEED = 0


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure the parts in `only` (all by default), as `Bench.run` says."""
    Bench("scores", tuple(PARTS), _rows, lambda: {"numpy": np.__version__, "kernel": platform.release()}).run(
        only, results_file, seed)


def _rows(part: str, seed: int) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed=seed)
