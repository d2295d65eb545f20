"""The papers behind slurmdl: one experiment for each, with published and measured values.

    python -m benchmarks.papers dltap adaptive-gossip

A new paper is one module with `rows(seed)` and one line in PAPERS.
"""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows, package_versions

#: paper -> its module; all but `adaptive-gossip` need root, for a sandbox
PAPERS = {"dltap": "benchmarks.papers.dltap", "zones": "benchmarks.papers.zones",
          "adaptive-gossip": "benchmarks.papers.adaptive_gossip",
          "heterogeneous": "benchmarks.heterogeneous.gossip_variants",
          "frameworks": "benchmarks.papers.frameworks"}
SUITE = Suite("papers", "One experiment for each paper behind slurmdl, with published and measured values "
              "(all but adaptive-gossip need root).",
              tuple(PAPERS), module_rows(PAPERS), package_versions("torch", "numpy", "scikit-learn", "ortools"),
              positional=True)
