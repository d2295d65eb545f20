"""The benchmark of heterogeneous nodes on a real Slurm: jobs with each placement method, and their measurements."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import skipped_without_cluster

from benchmarks.heterogeneous import placement_savings
from benchmarks.heterogeneous.placement_methods import DEFAULT, LEAF, NEGATIVE_CONTROL, PLACED, Job
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

TOPOLOGY = round_robin_topology(6, 2)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    name = f"unequal-{os.getpid()}"
    with skipped_without_cluster():
        sandbox = lifecycle.sandbox_up(SandboxSpec(name, TOPOLOGY, zone_features=False, slurm_conf_lines=SETTINGS))
    yield Jobs(sandbox)
    lifecycle.sandbox_down(name)


@pytest.mark.nightly
def test_job_runs_with_each_placement_method_on_free_nodes(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_savings, "STEPS", 3)
    case = placement_savings.Case(Job("PS", 2, 2, 2), ("n1", "n3", "n5", "n6"))
    outcome = placement_savings.measure(jobs, case, TOPOLOGY, np.random.default_rng(1), True)
    # n2 and n4 are free; Slurm's default puts both servers on n2, placement puts one on each node
    assert outcome.runs[DEFAULT][0].order == outcome.runs[LEAF][0].order == ("n2", "n2", "n4", "n4")
    assert sorted(outcome.runs[PLACED][0].order[:2]) == ["n2", "n4"]
    assert sorted(outcome.runs[NEGATIVE_CONTROL][0].order) == ["n2", "n2", "n4", "n4"]
    for variant, (run, model) in outcome.runs.items():
        assert run.inter_zone_bytes == 0
        assert run.seconds > 0
        assert 0 <= run.result.idle <= 1
        assert model == outcome.costs[variant]
    assert outcome.runs[PLACED][0].inter_node_bytes < outcome.runs[DEFAULT][0].inter_node_bytes
    assert jobs.assigned_nodes(6, 1) == TOPOLOGY.nodes, "the other job has not ended"


@pytest.mark.nightly
def test_failed_job_reports_its_error_output(jobs: Jobs) -> None:
    with pytest.raises(SandboxError, match=r"no summary: .*--comm-pattern ring"):
        jobs.train(2, 1, "--strategy gossip --comm-pattern ring --steps 1")
