"""The training library beside plain PyTorch: the same models, cost on one rank, allreduce in a node and over gloo."""

from benchmarks.suite import Suite, module_rows, package_versions

SUITE = Suite(
    name="training",
    description="The training library beside plain PyTorch: equality with one process, time and memory on one rank, "
                "allreduce inside a node, and over gloo on shaped links (needs root).",
    parts=("equality", "overhead", "intra-node", "gloo"),
    rows=module_rows({"equality": "benchmarks.training.equality", "overhead": "benchmarks.training.overhead",
                      "intra-node": "benchmarks.training.intra_node", "gloo": "benchmarks.training.gloo"}),
    versions=package_versions("torch", "mpi4py"),
    quick="fewer cases and repeats")
