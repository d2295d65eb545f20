"""Training strategies compared: bytes, accuracy and time. One part per module, with `rows(seed, quick)`."""

from __future__ import annotations

from benchmarks.suite import Suite, module_rows, package_versions

#: part -> its module or function
PARTS = {"accuracy-vs-bytes": "benchmarks.strategies.accuracy_vs_bytes",
         "accuracy-vs-bytes-async": "benchmarks.strategies.accuracy_vs_bytes:rows_async",
         "time-to-accuracy": "benchmarks.strategies.time_to_accuracy",
         "allreduce-vs-ddp": "benchmarks.strategies.allreduce_vs_ddp",
         "shared-memory-gossip": "benchmarks.strategies.shared_memory_gossip",
         "meter-overhead": "benchmarks.strategies.meter_overhead"}
SUITE = Suite("strategies", "Bytes, accuracy and time of training strategies (allreduce-vs-ddp needs root).",
              tuple(PARTS), module_rows(PARTS), package_versions("torch", "numpy", "scikit-learn"),
              quick="fewer repeats")
