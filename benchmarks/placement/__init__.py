"""Placement: speed, quality, concurrent submitters, and the cost of a submission. One part per module."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from benchmarks.suite import Suite, module_rows

#: part -> its module, which has `rows(seed)`
PARTS = {name.replace("_", "-"): f"benchmarks.placement.{name}" for name in (
    "speed", "sbatch_overhead", "quality", "optimality_gap", "concurrent_submitters")}


def versions() -> dict[str, str]:
    """Return the versions of NumPy, libc, and the installed solver, graph mapper and Slurm."""
    installed = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    for package in ("ortools", "kahip"):
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    if shutil.which("sbatch"):
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=10, check=False)
        installed["slurm"] = done.stdout.strip()
    return installed


SUITE = Suite("placement", "Speed and quality of placement compared with Slurm's choice, graph mappers and the exact "
              "optimum; concurrent submitters; overhead of a submission (some parts need root).",
              tuple(PARTS), module_rows(PARTS), versions, seed=0)
