"""Placement of meshes: compared with the exact optimum and with other rules, and its speed. One part per module."""

from __future__ import annotations

import numpy as np

from benchmarks.suite import Suite, module_rows

#: part -> its module, which has `rows(seed)`
PARTS = {name.replace("_", "-"): f"benchmarks.mesh.{name}"
         for name in ("optimality", "groups", "rules", "slurmctld", "speed", "step_time")}


def versions() -> dict[str, str]:
    """Return the versions of NumPy and of the exact solver."""
    from importlib.metadata import version

    return {"numpy": np.__version__, "ortools": version("ortools")}


SUITE = Suite("mesh", "Nodes and ranks of parallel meshes compared with the exact optimum, with Slurm's leaf order, "
              "contiguous nodes and fixed segments; speed of placement.",
              tuple(PARTS), module_rows(PARTS), versions, seed=0)
