"""Allreduce compared with PyTorch's DistributedDataParallel and post-local SGD, on a sandbox of two zones.

All use the same ranks on the same nodes, zone after zone, and the same emulated computation; they alternate in one
run for each rate of the links between the zones. The negative control is the ring with ranks that alternate between
the zones, so that each message crosses zones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import sandbox_mpi
from benchmarks.results import Row, cpu_bound_note, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, NAME = 8, "allreduce"
RANKS = (4, 8)
#: links between zones -> bits/s, 0 for unshaped
LINKS = {"unshaped": 0.0, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
#: elements of a model -> emulated computation of a step in seconds
SIZES = {1_000_000: 0.1, 25_000_000: 0.4}
#: variants for all rates and sizes; the ring is added if its steps are short enough
VARIANTS = ("none", "barrier", "ddp", "post-local", "hierarchical")
#: minimum ratios to DDP and to no communication; the smaller rate is the target
OF_DDP, OF_NONE = 1.3, 0.9
#: variant -> "seconds" and "idle" -> one value for each repeat
Measurements = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True)
class Job:
    """One set of ranks and its variants.

    `nodes` : entry i is the node of rank i. `alternating` : ranks alternate between the zones.
    """

    nodes: tuple[str, ...]
    size: int
    variants: tuple[str, ...]
    repeats: int
    steps: int
    alternating: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "parameters": self.size, "seconds": SIZES[self.size], "variants": self.variants,
                "repeats": self.repeats, "steps": self.steps}


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield steps per second and their targets for each number of ranks, model size and link rate."""
    def make_jobs(zones: Mapping[str, str], rate: float) -> list[Job]:
        return jobs(zones, slow=0 < rate < 1e9, repeats=1 if quick else 3)

    for link, link_jobs, measured in measure_links(NAME, LINKS, make_jobs):
        yield from evaluate(link, link_jobs, measured, shaped=LINKS[link] > 0)


def measure_links(name: str, links: Mapping[str, float], make_jobs: Callable[[Mapping[str, str], float], list[Job]],
                  ) -> Iterator[tuple[str, list[Job], list[Measurements]]]:
    """Measure jobs on a sandbox of this name, for each rate of the links between its two zones.

    `make_jobs` gets the zone of each node, and the rate in bit/s.
    """
    topology = round_robin_topology(NODES, 2)
    zones = {node: topology.zones[leaf] for node, leaf in zip(topology.nodes, topology.leaf, strict=True)}
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, topology))
    try:
        for node in topology.nodes:
            sandbox.shape_link(node, rate=0)
        for link, rate in links.items():
            for zone in sorted(set(zones.values())):
                sandbox.shape_link(zone, rate=rate)
            link_jobs = make_jobs(zones, rate)
            yield link, link_jobs, measure(sandbox, link_jobs, zones)
    finally:
        lifecycle.sandbox_down(name)


def node_orders(zones: Mapping[str, str], ranks: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes of the ranks, zone after zone, and in alternating zones (control)."""
    alternating = tuple(sorted(zones))[:ranks]
    return tuple(sorted(alternating, key=lambda node: zones[node])), alternating


def jobs(zones: Mapping[str, str], slow: bool, repeats: int) -> list[Job]:
    """Return the jobs for one link rate; large models on slow links get fewer repeats and no ring."""
    selected = []
    for ranks in RANKS:
        in_order, alternating = node_orders(zones, ranks)
        for size in SIZES:
            large = size > 1e7
            selected.append(Job(in_order, size, VARIANTS if large and slow else (*VARIANTS, "ring"),
                                min(repeats, 2) if large and slow else repeats, 1 if large else 5))
        selected.append(Job(alternating, min(SIZES), ("none", "ring"), repeats, 5, alternating=True))
    return selected


def measure(sandbox: lifecycle.Sandbox, link_jobs: Sequence[Job], zones: Mapping[str, str]) -> list[Measurements]:
    """Return step times and idle CPU shares of each job; see `allreduce_vs_ddp_worker`."""
    return sandbox_mpi.run_program(sandbox, "strategies.allreduce_vs_ddp_worker",
                                   {"zones": zones, "jobs": [job.to_json() for job in link_jobs]})


def evaluate(link: str, link_jobs: Sequence[Job], measured: Sequence[Measurements], shaped: bool) -> Iterator[Row]:
    """Yield the rows of one link rate, with a note if they are CPU-bound."""
    ring: dict[tuple[int, int], float] = {}
    for job, measurements in zip(link_jobs, measured, strict=True):
        ranks = len(job.nodes)
        label = f"{ranks} ranks, {job.size // 1_000_000}M parameters, {link}"
        label += cpu_bound_note(measurements["ring" if job.alternating else "hierarchical"]["idle"])
        rates = {name: [1 / seconds for seconds in values["seconds"]] for name, values in measurements.items()}
        medians = {name: statistics.median(values) for name, values in rates.items()}
        if job.alternating:
            if shaped:
                yield make_row(f"{label}: steps/s of a ring that alternates between both zones (control)",
                               rates["ring"], "1/s", baseline=ring[ranks, job.size],
                               target="below the ring with ranks in zone order",
                               met=medians["ring"] < ring[ranks, job.size])
            continue
        target_rate = min(OF_DDP * medians["ddp"], OF_NONE * medians["none"])
        yield make_row(f"{label}: steps/s of hierarchical allreduce", rates["hierarchical"], "1/s",
                       baseline=target_rate, target=f"the smaller of {OF_DDP} x DDP and {OF_NONE} x no communication",
                       met=medians["hierarchical"] >= target_rate)
        for name, description in (("ring", "ring allreduce"), ("ddp", "DistributedDataParallel"),
                                  ("post-local", "post-local SGD, averaging in every 4th step"),
                                  ("barrier", "no communication, with a barrier in each step"),
                                  ("none", "no communication")):
            if name in rates:
                yield make_row(f"{label}: steps/s of {description}", rates[name], "1/s",
                               baseline=medians["hierarchical"])
        if "ring" in medians:
            ring[ranks, job.size] = medians["ring"]
