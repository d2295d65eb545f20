"""Overhead of `slurmdl sbatch` over `sbatch`: paired runs on a real controller, as an ordinary user.

The time ends at the line with the job ID, because scripts wait for it. The later check of a pinned job is
reported separately. CPU time, also reported, is the cost on a machine without other load.
"""

from __future__ import annotations

import compileall
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import slurmdl
from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle as sandbox_cluster
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.topology.source import tree_topology

REPEATS = 15
#: nodes of the large clusters, and their numbers of leaves; the nodes are cloud nodes, so jobs never end
LARGE, LEAVES = 10_000, (10, 200)
CHECK_TARGET = 1.0


@dataclass(frozen=True)
class Case:
    """One kind of submission; `options` go to both commands, `slurmdl_options` only to `slurmdl sbatch`.

    `slow_links`: every second node of each leaf has a slow link, so that Slurm's own choice is worse and jobs are
    bound.
    """

    name: str
    target: float
    options: tuple[str, ...]
    slurmdl_options: tuple[str, ...] = ()
    pinned: bool = False
    slow_links: bool = False


SMALL_CASES = (
    Case("nothing placed, --dl-node-binding=off", 0.060, ("-N2",), ("--dl-node-binding=off",)),
    Case("nothing placed, a job array", 0.060, ("-N2", "--array=1-2")),
    Case("placed on 8 nodes, Slurm's choice suffices", 0.250, ("-N2",)),
    Case("placed on 8 nodes, zone preferred", 0.250, ("-N2",), slow_links=True),
)
PINNED_CASES = (Case("placed on 8 nodes, pinned", 0.250, ("-N2", "--no-requeue"), pinned=True, slow_links=True),)
LARGE_TARGET = 0.270


def rows(seed: int = 0) -> Iterator[Row]:
    """Yield the rows of all cases; `seed` has no effect. Print one line if there is no cluster."""
    # pip compiles an installed package; ordinary users cannot write bytecode into a source tree, and compilation
    # would add 60 to 100 ms to each submission
    compileall.compile_dir(str(Path(slurmdl.__file__).parent), quiet=1)
    name = f"overhead-{os.getpid()}"
    for spec, cases in ((SandboxSpec(name, round_robin_topology(8, 2)), SMALL_CASES),
                        (SandboxSpec(name, round_robin_topology(8, 2), zone_features=False), PINNED_CASES),
                        *(_large(name, leaves, features) for leaves in LEAVES for features in (False, True))):
        try:
            sandbox = sandbox_cluster.sandbox_up(spec)
        except SandboxError as error:
            print(f"overhead: {len(spec.topology.nodes)} nodes skipped: {error}", file=sys.stderr, flush=True)
            continue
        try:
            for case in cases:
                print(f"overhead: {case.name}", file=sys.stderr, flush=True)
                yield from _measured(sandbox, case)
        finally:
            sandbox_cluster.sandbox_down(name)


def _large(name: str, leaves: int, features: bool) -> tuple[SandboxSpec, tuple[Case, ...]]:
    """Return a large cluster and its case; with zone features the zone is preferred, else pinned."""
    label = f"placed at {LARGE} nodes in {leaves} zones"
    case = Case(f"{label}, zone preferred", LARGE_TARGET, ("-N8",), slow_links=True) if features else \
        Case(f"{label}, pinned", LARGE_TARGET, ("-N8", "--no-requeue"), pinned=True, slow_links=True)
    return SandboxSpec(name, tree_topology((1, leaves, LARGE)),
                       zone_features=features, cloud_nodes=True), (case,)


def _measured(sandbox: Sandbox, case: Case) -> Iterator[Row]:
    plain, overhead, checks, plain_works, work = [], [], [], [], []
    arguments = ["-o", "/dev/null", *case.options, "--wrap=true"]
    slurmdl_options = list(case.slurmdl_options)
    if case.slow_links:
        topology, file = sandbox.spec.topology, sandbox.shared / "scores.json"
        slow = [name for zone in dict.fromkeys(topology.leaf.tolist())
                for name in np.array(topology.nodes)[topology.leaf == zone][::2].tolist()]
        file.write_text(json.dumps({"nodes": {name: {"throughput": 1e6} for name in slow}}))
        slurmdl_options.append(f"--dl-link-scores={file}")
    for command in (["sbatch"], ["slurmdl", "sbatch"]):  # warm-up: load all files into memory
        _submit(sandbox, [*command, *arguments])
    for number in range(REPEATS):
        # alternate the order: the second submission finds the controller busy with the first
        pair = {}
        for is_slurmdl in (False, True) if number % 2 else (True, False):
            command = ["slurmdl", "sbatch", *slurmdl_options] if is_slurmdl else ["sbatch"]
            pair[is_slurmdl] = _submit(sandbox, [*command, *arguments])
        (plain_seconds, _, plain_work), (seconds, check, slurmdl_work) = pair[False], pair[True]
        plain.append(plain_seconds)
        overhead.append(seconds - plain_seconds)
        checks.append(check)
        plain_works.append(plain_work)
        work.append(slurmdl_work - plain_work)
    yield make_row(f"time added by slurmdl sbatch, {case.name}", overhead, "s", baseline=float(np.median(plain)),
                   target=f"at most {case.target:g} s more", met=float(np.median(overhead)) <= case.target)
    yield make_row(f"CPU time added by slurmdl sbatch, {case.name}", work, "s",
                   baseline=float(np.median(plain_works)))
    if case.pinned:
        yield make_row(f"from the job ID to the end of slurmdl sbatch, {case.name}", checks, "s",
                       target=f"at most {CHECK_TARGET:g} s", met=float(np.median(checks)) <= CHECK_TARGET)


def _submit(sandbox: Sandbox, argv: Sequence[str]) -> tuple[float, float, float]:
    """Return seconds to the first line of stdout, then to the end, and CPU seconds; SandboxError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    child = subprocess.Popen(sandbox.command(argv, directory=str(sandbox.shared)), stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.readline()
    submitted = time.perf_counter()
    _, errors = child.communicate(timeout=60)
    if child.returncode or not first:
        raise SandboxError(f"{' '.join(argv)}: {' '.join(errors.split())[-300:]}")
    remaining, after = time.perf_counter() - submitted, resource.getrusage(resource.RUSAGE_CHILDREN)
    return submitted - start, remaining, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
