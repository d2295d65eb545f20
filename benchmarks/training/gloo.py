"""Allreduce of the library over torch.distributed, beside DistributedDataParallel over gloo, on shaped links.

Two zones of four nodes on a sandbox; the computation sleeps, the messages are real, and the methods alternate in one
run (strategies/allreduce_vs_ddp_worker.py). The control is the same library with ranks that alternate between the
zones, so that each message of its ring crosses them.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator

from benchmarks.results import Row, cpu_bound_note, make_row
from benchmarks.strategies.allreduce_vs_ddp import SIZES, Job, measure
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, RANKS = 8, (4, 8)
#: links between the zones in bit/s
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
PATTERNS = ("hierarchical", "ring")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rates of the library relative to those of DistributedDataParallel. `seed` is not used."""
    topology = round_robin_topology(NODES, 2)
    zones = {node: topology.zones[leaf] for node, leaf in zip(topology.nodes, topology.leaf, strict=True)}
    name = f"gloo-{os.getpid()}"
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, topology))
    try:
        for node in topology.nodes:
            sandbox.shape_link(node, rate=0)
        for link, rate in LINKS.items():
            for zone in sorted(set(zones.values())):
                sandbox.shape_link(zone, rate=rate)
            jobs = _jobs(zones, 1 if quick else 3, rate)
            for job, measured in zip(jobs, measure(sandbox, jobs, zones), strict=True):
                seconds = {name: values["seconds"] for name, values in measured.items()}
                yield from compare(f"{len(job.nodes)} ranks, {job.size // 1_000_000}M parameters, {link}"
                                   f"{cpu_bound_note(measured['ddp']['idle'])}", seconds, job.alternating)
            print(f"{link}: measured", file=sys.stderr, flush=True)
    finally:
        lifecycle.sandbox_down(name)


def _jobs(zones: dict[str, str], repeats: int, rate: float) -> list[Job]:
    """Jobs for one rate: each size and number of ranks, and the control with ranks in alternating zones."""
    jobs = []
    for ranks in RANKS:
        alternating = tuple(sorted(zones))[:ranks]
        in_order = tuple(sorted(alternating, key=lambda node: zones[node]))
        jobs += [Job(in_order, size, ("ddp", *(f"gloo-{pattern}" for pattern in PATTERNS)), repeats,
                     1 if size > 1e7 and rate < 1e9 else 5) for size in SIZES]
        jobs.append(Job(alternating, min(SIZES), ("ddp", "gloo-ring"), repeats, 5, alternating=True))
    return jobs


def compare(label: str, seconds: dict[str, list[float]], is_control: bool) -> Iterator[Row]:
    """Yield the rows of one job, from the seconds of a step of each method in each repeat."""
    if not is_control:
        yield make_row(f"{label}: steps per second, DistributedDataParallel", [1 / each for each in seconds["ddp"]],
                       "1/s")
    for pattern in PATTERNS:
        if f"gloo-{pattern}" not in seconds:
            continue
        ratios = [ddp / own for ddp, own in zip(seconds["ddp"], seconds[f"gloo-{pattern}"], strict=True)]
        judged = pattern == "hierarchical"  # the default where zones are known
        yield make_row(f"{'control: ranks in alternating zones, ' * is_control}{label}: rate, slurmdl over gloo, "
                       f"{pattern}, to DistributedDataParallel", ratios, "times", baseline=1.0,
                       target="at least 1" if judged else "", met=statistics.median(ratios) >= 1 if judged else None)
