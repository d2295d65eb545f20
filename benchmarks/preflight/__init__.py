"""Preflight: share of injected faults that it finds, false alarms, and its duration; trainings with a slow node.

`detection`: eight nodes on a sandbox with a real Slurm, and a budget of 10 s. In each run one node, drawn by the
seed, has one fault; clean and busy runs have none. Control: the verdicts with shuffled node names.

`scale`: 1,000 nodes that a simulated srun answers for; the code that reads and judges the answers is the real one.

`slow_node`: trainings of two nodes on a sandbox with a real Slurm. One node becomes slow; the job stays, or leaves
it. Control: no node becomes slow.
"""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows

PARTS = {part: f"benchmarks.preflight.{part}" for part in ("detection", "scale", "slow_node")}
SUITE = Suite("preflight", "Faults found, false alarms and duration of `slurmdl preflight`; step times of trainings "
              "that leave a slow node (detection and slow_node need root).", tuple(PARTS), module_rows(PARTS), dict,
              quick="10 seeds per fault instead of 20, 1 training per case instead of 3")
