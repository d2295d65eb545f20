"""Parameter servers on the nodes of their workers: bytes between nodes, and concurrent submitters.

B. Qiao, Z. Li, M. Wu: DLTAP: a network-efficient scheduling method for distributed deep learning workload in
containerized cluster environment. ITM Web of Conferences 12 (2017), 03030. doi:10.1051/itmconf/20171203030

Servers and workers train three networks of real size, with 2 to 4 tasks on each of 3 to 5 nodes of a partly occupied
cluster. A real controller chooses the nodes of plain Slurm; a spread placement assigns the tasks to all free nodes in
turn. The cost model predicts the bytes; the part `placement-savings` of `benchmarks.heterogeneous` compares them with
metered bytes. Then SUBMITTERS jobs are submitted at once to the empty cluster and run, and each rank reports its
node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.heterogeneous.placement_methods import DEFAULT, NEGATIVE_CONTROL, PLACED, Job
from benchmarks.heterogeneous.placement_savings import CPUS, DLTAP, LEAST, NODES, ZONES, Case, draw, orders, predicted
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs
from benchmarks.results import Row, make_row
from slurmdl.cluster import reader
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, round_robin_topology
from slurmdl.topology.topology import Topology

#: elements of the networks; MLP is a perceptron of 784, 512, 512 and 10 units, see docs/train.md for the others
NETWORKS = {"MLP": 669_706, "ResNet-50": 25_557_032, "VGG-16": 138_357_544}
JOBS = 40
SPREAD = "tasks spread over all free nodes"
VARIANTS = (PLACED, DEFAULT, SPREAD, LEAST, NEGATIVE_CONTROL)
#: jobs that are submitted at once, number of repeats, and the job
SUBMITTERS, BURSTS, BURST_JOB = 6, 3, Job("PS", 2, 4, 2)
#: time limit of the jobs of a burst in seconds
BURST_TIMEOUT_S = 120.0


def rows(seed: int) -> Iterator[Row]:
    """Yield the bytes between nodes that placement saves, by network, and with concurrent submitters."""
    topology = round_robin_topology(NODES, ZONES)
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"dltap-{os.getpid()}", topology, cpus=CPUS, zone_features=False,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        by_network: dict[str, list[Mapping[str, float]]] = {name: [] for name in NETWORKS}
        cases = [case for case in draw(topology, seed) if case.job.kind == "PS"][:JOBS]
        for number, case in enumerate(cases, 1):
            for name, by_variant in compare(jobs, case, topology, np.random.default_rng([seed, number])).items():
                by_network[name].append(by_variant)
            print(f"dltap: {number} of {len(cases)} jobs", file=sys.stderr, flush=True)
        for name, costs in by_network.items():
            yield from evaluate(name, costs)
        bursts = [{variant: run_burst(jobs, topology, variant) for variant in (PLACED, DEFAULT)}
                  for _ in range(BURSTS)]
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield saving(f"{SUBMITTERS} concurrent submitters", DEFAULT, [by_variant[DEFAULT] for by_variant in bursts],
                 [by_variant[PLACED] for by_variant in bursts], None, published=True)


def compare(jobs: Jobs, case: Case, topology: Topology,
            random: np.random.Generator) -> dict[str, Mapping[str, float]]:
    """Return network -> variant -> bytes between nodes per step, while another job occupies the busy nodes."""
    blocker = jobs.occupy(case.busy)
    try:
        slurm = jobs.assigned_nodes(case.job.nodes, case.job.tasks_per_node)
        text = namespaces.run_on_host(jobs.sandbox.pids[LOGIN], ["scontrol", "-o", "-d"],
                                      stdin="show nodes\nshow partitions\nshow config\n")
    finally:
        jobs.cancel(blocker)
    snapshot, free = reader.parse_snapshot(text), sorted(set(topology.nodes) - set(case.busy))
    by_network: dict[str, Mapping[str, float]] = {}
    for name, size in NETWORKS.items():
        job = replace(case.job, parameters=size)
        variants = orders(replace(case, job=job), topology, snapshot, slurm, random)
        variants[SPREAD] = tuple(free[rank % len(free)] for rank in range(job.nodes * job.tasks_per_node))
        by_network[name] = {variant: predicted(job, variants[variant], topology).inter_node_bytes
                            for variant in VARIANTS if variant in variants}
    return by_network


def evaluate(name: str, costs: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    """Yield the savings of all jobs with one network, next to the largest possible savings, and the control."""
    of = {variant: [job_bytes[variant] for job_bytes in costs if variant in job_bytes] for variant in VARIANTS}
    least = of[LEAST] if len(of[LEAST]) == len(costs) else None
    for base in (DEFAULT, SPREAD):
        yield saving(f"{name}, {len(costs)} jobs", base, of[base], of[PLACED], least, published=base == DEFAULT)
    ratio = sum(of[NEGATIVE_CONTROL]) / sum(of[PLACED])
    yield make_row(f"{name}: bytes between nodes of {NEGATIVE_CONTROL} over those of placement (control)", [ratio],
                   "times", baseline=1.0, target="above 1", met=ratio > 1)


def saving(label: str, base: str, before: Sequence[float], placed: Sequence[float], least: Sequence[float] | None,
           published: bool) -> Row:
    """Return the bytes between nodes that placement saves relative to `base`; the baseline is the largest saving."""
    share = 100 * (1 - sum(placed) / sum(before))
    return make_row(f"{label}: bytes between nodes saved relative to {base}", [share], "%",
                    baseline=100 * (1 - sum(least) / sum(before)) if least else None,
                    target=f"at least the published {DLTAP:g} %" if published else "",
                    met=share >= DLTAP if published else None)


def run_burst(jobs: Jobs, topology: Topology, variant: str) -> float:
    """Submit several jobs at once; return the bytes between nodes per step, summed over the jobs.

    Raises:
        SandboxError: a job is rejected, or does not run in time.
    """
    sandbox, folder = jobs.sandbox, jobs.folder
    start, submit = ("slurmdl srun", ["slurmdl", "sbatch"]) if variant == PLACED else ("srun", ["sbatch"])
    script = folder / "burst.sh"
    # each rank reports its node; the job then keeps its nodes until all jobs have theirs
    script.write_text(
        f"#!/bin/sh\n#SBATCH -N {BURST_JOB.nodes} --ntasks-per-node={BURST_JOB.tasks_per_node} --no-requeue -t 5\n"
        "#SBATCH -o /dev/null\n"
        f"#DL --dl-strategy=ps --dl-ps={BURST_JOB.ps} --dl-bytes={BURST_JOB.request.options.model_bytes:.0f}\n"
        f"{start} sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME > {folder}/at.$SLURM_JOB_ID.$SLURM_PROCID'\nsleep 20\n")
    processes = [subprocess.Popen(sandbox.command([*submit, "--parsable", str(script)], directory=str(folder)),
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for _ in range(SUBMITTERS)]
    outputs = [process.communicate(timeout=BURST_TIMEOUT_S) for process in processes]
    if any(process.returncode for process in processes):
        raise SandboxError(f"a submission failed: {' '.join(err for _, err in outputs)[-300:]}")
    numbers = [out.strip() for out, _ in outputs]
    deadline = time.monotonic() + BURST_TIMEOUT_S
    total_bytes = sum(predicted(BURST_JOB, _nodes_of_ranks(folder, number, deadline), topology).inter_node_bytes
                      for number in numbers)
    for number in numbers:
        jobs.cancel(int(number))
    return total_bytes


def _nodes_of_ranks(folder: Path, number: str, deadline: float) -> list[str]:
    """Wait until all ranks of a job have reported their node; return the nodes in rank order."""
    ranks = BURST_JOB.nodes * BURST_JOB.tasks_per_node
    while True:
        reports = [file.read_text().split() for file in folder.glob(f"at.{number}.*")]
        if len(reports) == ranks and all(len(report) == 2 for report in reports):
            node_by_rank = dict(reports)
            return [node_by_rank[str(rank)] for rank in range(ranks)]
        if time.monotonic() > deadline:
            raise SandboxError(f"job {number}: not all ranks reported their node within {BURST_TIMEOUT_S:g} s")
        time.sleep(0.2)
