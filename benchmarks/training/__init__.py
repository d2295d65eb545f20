"""The training library beside plain PyTorch: the same models, and what it costs on one rank."""

from benchmarks.suite import Suite, module_rows, package_versions

SUITE = Suite(
    name="training",
    description="The training library beside plain PyTorch: equality with one process, time and memory on one rank.",
    parts=("equality", "overhead"),
    rows=module_rows({"equality": "benchmarks.training.equality", "overhead": "benchmarks.training.overhead"}),
    versions=package_versions("torch", "mpi4py"),
    quick="fewer cases and repeats")
