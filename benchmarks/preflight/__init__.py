"""Preflight: share of injected faults that it finds, false alarms, and its duration.

`detection`: eight nodes on a sandbox with a real Slurm, and a budget of 10 s. In each run one node, drawn by the
seed, has one fault; clean and busy runs have none. Control: the verdicts with shuffled node names.

`scale`: 1,000 nodes that a simulated srun answers for; the code that reads and judges the answers is the real one.
"""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows

PARTS = {"detection": "benchmarks.preflight.detection", "scale": "benchmarks.preflight.scale"}
SUITE = Suite("preflight", "Faults found, false alarms and duration of `slurmdl preflight` (detection needs root).",
              tuple(PARTS), module_rows(PARTS), dict, quick="10 seeds per fault instead of 20")
