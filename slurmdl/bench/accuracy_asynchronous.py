"""What sending less costs in accuracy where nobody waits and one rank is slow, as bench.accuracy has it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from slurmdl.bench.accuracy import SGD, SKEWED, measure, seldom
from slurmdl.bench.results import Row

SITUATION = "skewed data, SGD, nobody waits, one rank 4 x slower"
OPTIONS = (*SGD, *SKEWED, "--async", "--compute", "replay:0.005", "--slow", "0=4")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Figures of one situation."""
    # a model that is pushed to one that does not wait for it goes whole
    yield from measure(SITUATION, seldom("fp32"), OPTIONS, seed, quick)
