"""Islands: time and bytes between zones until a language model reaches the loss of allreduce, and when they pay.

`time-to-loss`: two zones of four nodes, links between the zones at 50, 100 and 1,000 Mbit/s. The number of steps to
the loss comes from trainings on virtual ranks, which do not depend on links. The seconds of a step are measured on a
sandbox, with real messages and a computation that sleeps as long as this model's takes on one core. Control: islands
of two nodes of each zone, whose gradients cross zones. Predicted seconds of a step are those of `slurmdl simulate`.

`prediction`: predicted and measured seconds of a step of islands on slower links.

`disturbances`: islands and flat strategies on skewed data, and with a zone at half the speed. `trigger`: the drift
trigger between islands, beside fixed periods with the same bytes. Both on virtual ranks. `lost-island`: a zone is
killed in the middle of a run (needs Open MPI with ULFM).

`when`: simulated step times by the rate between zones and the size of the model, with a chart.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.islands import when
from benchmarks.results import Row
from benchmarks.suite import Suite, draw_beside, module_rows, package_versions

PARTS = {"time-to-loss": "benchmarks.islands.time_to_loss", "prediction": "benchmarks.islands.prediction",
         "disturbances": "benchmarks.islands.disturbances",
         "lost-island": "benchmarks.islands.lost_island",
         "trigger": "benchmarks.islands.trigger", "when": "benchmarks.islands.when"}
_part_rows = module_rows(PARTS)
#: rows of the chart, collected while the part runs
_chart: list[Row] = []


def rows(part: str, seed: int, quick: bool) -> Iterator[Row]:
    """Yield the rows of a part."""
    for row in _part_rows(part, seed, quick):
        if part == "when":
            _chart.append(row)
        yield row


def plot(results_file: str) -> None:
    """Draw the chart next to the results file, if matplotlib is installed."""
    if _chart:
        draw_beside(results_file, lambda path: when.draw(path, _chart))


SUITE = Suite("islands",
              "Time and bytes between zones to a loss: islands and other strategies (needs root); and when islands "
              "pay. Draws a chart next to the results file.", tuple(PARTS), rows,
              package_versions("torch", "numpy"), quick="fewer seeds and one repeat",
              plot=plot)
