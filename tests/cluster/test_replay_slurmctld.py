"""The node selection of `slurmdl replay` against a real slurmctld with virtual nodes: equal nodes per leaf zone."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from benchmarks.replay.controller import Controller, SandboxController, start_controller
from slurmdl.errors import SandboxError
from slurmdl.history.leaves import Leaves
from slurmdl.history.slurm_rules import slurm_rule
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.source import block_topology, tree_topology
from slurmdl.topology.topology import Topology

JOBS = 40
#: of 22.05 only trees of two levels are compared: higher switches count differently there
TOPOLOGIES = {"two levels": tree_topology((1, 8, 64)), "three levels": tree_topology((1, 3, 9, 72)),
              "blocks": block_topology((9, 72), (8, 16, 32))}


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="a controller needs root")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_nodes_per_leaf_of_random_jobs(name: str) -> None:
    topology: Topology = TOPOLOGIES[name]
    try:
        controller = start_controller(topology)
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        if isinstance(controller, SandboxController) and name != "two levels":
            pytest.skip("needs a newer Slurm in a chroot")
        leaves = Leaves.from_topology(topology)
        rule, source = slurm_rule(leaves), random.Random(5)
        position = {zone: i for i, zone in enumerate(leaves.zone.tolist())}
        free, running, compared = leaves.size.copy(), {}, 0
        for _ in range(JOBS):
            size = source.randint(1, max(1, int(free.sum())))
            expected = rule.choose(free, size)
            if expected is None:  # end a job, so that others fit
                job = source.choice(list(running))
                _end_job(controller, job)
                free += running.pop(job)
                continue
            job = int(controller.run(["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", "--exclusive",
                                      f"-N{size}"], stdin="#!/bin/sh\n").split(";")[0])
            counts = np.zeros_like(free)
            for node in _wait_for_nodes(controller, job):
                counts[position[int(topology.leaf[topology.node_index[node]])]] += 1
            assert counts.tolist() == expected.tolist(), (free, size)
            free, running[job], compared = free - counts, counts, compared + 1
            if free.sum() < len(topology.nodes) / 4 or source.random() < 0.3:
                job = source.choice(list(running))
                _end_job(controller, job)
                free += running.pop(job)
        assert compared > JOBS / 2
    finally:
        controller.close()


def _end_job(controller: Controller, job: int) -> None:
    """Cancel a job and wait until its nodes are free: on a busy machine they are completing for a moment."""
    controller.run(["scancel", str(job)])
    deadline = time.monotonic() + 30
    while controller.run(["sinfo", "-h", "-t", "completing", "-o", "%N"]).strip():
        assert time.monotonic() < deadline, "the nodes of a canceled job do not become free"
        time.sleep(0.05)


def _wait_for_nodes(controller: Controller, job: int) -> tuple[str, ...]:
    deadline = time.monotonic() + 30
    while not (text := controller.run(["squeue", "-h", "-j", str(job), "-t", "CF,R", "-o", "%N"]).strip()):
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.05)
    return tuple(expand_hostlist(text))
