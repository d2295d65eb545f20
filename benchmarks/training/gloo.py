"""Allreduce of the library over torch.distributed, beside DistributedDataParallel over gloo, on shaped links.

Two zones of four nodes on a sandbox; the computation sleeps, the messages are real, and the methods alternate in one
run (benchmarks/strategies/allreduce_vs_ddp_worker.py). The control is the same library with ranks that alternate
between the zones, so that each message of its ring crosses them.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping

from benchmarks.results import Row, cpu_bound_note, make_row
from benchmarks.strategies.allreduce_vs_ddp import RANKS, SIZES, Job, measure_links, node_orders

#: links between the zones in bit/s
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
PATTERNS = ("hierarchical", "ring")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rates of the library relative to those of DistributedDataParallel. `seed` is not used."""
    def make_jobs(zones: Mapping[str, str], rate: float) -> list[Job]:
        return _jobs(zones, 1 if quick else 3, rate)

    for link, jobs, measurements in measure_links(f"gloo-{os.getpid()}", LINKS, make_jobs):
        for job, measured in zip(jobs, measurements, strict=True):
            seconds = {name: values["seconds"] for name, values in measured.items()}
            yield from compare(f"{len(job.nodes)} ranks, {job.size // 1_000_000}M parameters, {link}"
                               f"{cpu_bound_note(measured['ddp']['idle'])}", seconds, job.alternating)
        print(f"{link}: measured", file=sys.stderr, flush=True)


def _jobs(zones: Mapping[str, str], repeats: int, rate: float) -> list[Job]:
    """Jobs for one rate: each size and number of ranks, and the control with ranks in alternating zones."""
    jobs = []
    for ranks in RANKS:
        in_order, alternating = node_orders(zones, ranks)
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
