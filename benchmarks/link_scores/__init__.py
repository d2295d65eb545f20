"""Link scores: accuracy of probes on real links, value for training, scale, and cost of collection."""

from __future__ import annotations

import platform

import numpy as np

from benchmarks.suite import Suite, module_rows

#: part -> its module, which has `rows(seed)`; the first two need root, for a sandbox
PARTS = {name.replace("_", "-"): f"benchmarks.link_scores.{name}" for name in (
    "probe_recovery", "training_value", "scale", "collector_cost")}
SUITE = Suite("link_scores",
              "Accuracy of probes on shaped links, value of link scores for training (both need root), "
              "detection of bad links among 10,000 nodes, and cost of collection.",
              tuple(PARTS), module_rows(PARTS),
              lambda: {"numpy": np.__version__, "kernel": platform.release()}, seed=0)
