"""Heterogeneous ranks: load balance, gossip variants, rank failures, and savings of placement in training."""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows, package_versions

#: part -> its module, which has `rows(seed)`; all but `accuracy` need root, for a sandbox
PARTS = {name.replace("_", "-"): f"benchmarks.heterogeneous.{name}" for name in (
    "throughput", "accuracy", "gossip_variants", "placement_savings", "no_bottleneck_control", "rank_failure")}
SUITE = Suite("heterogeneous",
              "Throughput and accuracy of ranks of different speeds, recovery from rank failures, and "
              "bytes and time that placement saves jobs with several tasks per node (needs root).",
              tuple(PARTS), module_rows(PARTS), package_versions("torch", "numpy", "scikit-learn", "ortools"))
