"""The simulation of `slurmdl replay`: its speed, what placement changes in it, and its error against slurmctld.

One part per module.
"""

from __future__ import annotations

import numpy as np

from benchmarks.suite import Suite, module_rows

#: part -> its module, which has `rows(seed)`
PARTS = {name: f"benchmarks.replay.{name}" for name in ("speed", "policies", "calibration")}


def versions() -> dict[str, str]:
    """Return the version of NumPy."""
    return {"numpy": np.__version__}


SUITE = Suite("replay", "Job traces replayed with nodes chosen by Slurm's rule, by slurmdl, by both, and at random: "
              "speed, waiting and run times, and the error against a real slurmctld.",
              tuple(PARTS), module_rows(PARTS), versions, seed=1)
