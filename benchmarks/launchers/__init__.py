"""Launchers: seconds per step of their jobs on shaped links, and the time that `slurmdl srun` adds to a step.

`step-time`: six nodes in two zones with uplinks of 50 Mbit/s. For each launch line the same program measures an
all-reduce of 2 MB (one step of data parallelism) and a shift by one rank in a chain (one step of a pipeline), under
plain srun, under `slurmdl srun` with --dl-launcher=none, and under `slurmdl srun`. Control: a launch line whose order
slurmdl cannot change must not become faster.

`srun-overhead`: time of a step of `hostname` on eight nodes.
"""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows, package_versions

PARTS = {"step-time": "benchmarks.launchers.step_time", "srun-overhead": "benchmarks.launchers.srun_overhead"}
SUITE = Suite("launchers",
              "Seconds per step by launcher, and the overhead of `slurmdl srun`, on a sandbox (needs root).",
              tuple(PARTS), module_rows(PARTS), package_versions("torch"))
