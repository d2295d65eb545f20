"""Islands: time and bytes between zones until a language model reaches the loss of allreduce.

`time-to-loss`: two zones of four nodes, links between the zones at 50, 100 and 1,000 Mbit/s. The number of steps to
the loss comes from trainings on virtual ranks, which do not depend on links. The seconds of a step are measured on a
sandbox, with real messages and a computation that sleeps as long as this model's takes on one core. Control: islands
of two nodes of each zone, whose gradients cross zones. Predicted seconds of a step are those of `slurmdl simulate`.
"""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows, package_versions

PARTS = {"time-to-loss": "benchmarks.islands.time_to_loss"}
SUITE = Suite("islands", "Time and bytes between zones to a loss: islands and other strategies (needs root).",
              tuple(PARTS), module_rows(PARTS), package_versions("torch", "numpy"),
              quick="two seeds and one repeat instead of five and three")
