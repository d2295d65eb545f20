"""The benchmark of replays on few jobs; it runs as a whole in `make bench-replay`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest

from benchmarks.replay import calibration, policies, speed
from slurmdl.errors import SandboxError
from slurmdl.history.replay import ReplaySettings
from slurmdl.history.scheduler import SchedulerTiming
from slurmdl.topology.source import tree_topology


@pytest.fixture(autouse=True)
def few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "JOBS", 60)
    monkeypatch.setattr(policies, "LOADS", (0.9,))
    monkeypatch.setattr(policies, "SEEDS", 2)
    monkeypatch.setattr(speed, "JOBS", 60)
    monkeypatch.setattr(speed, "SAMPLED_JOBS", 3)
    monkeypatch.setattr(speed, "TOPOLOGY", (1, 4, 32))
    monkeypatch.setattr(calibration, "JOBS", 60)


def test_policies_judge_waits_runs_other_users_and_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tree_topology((1, 4, 32))
    thin = policies.Case("thin", small, "gossip", policies.THIN)
    monkeypatch.setattr(policies, "cases", lambda: (thin, dataclasses.replace(thin, scores=policies.DEFAULT)))
    rows = list(policies.rows(1))
    metrics = [row.metric for row in rows[:len(rows) // 2]]
    assert sum("mean wait" in metric for metric in metrics) == 2
    assert sum("other users' jobs" in metric for metric in metrics) == 1
    assert all(row.repeats == 2 for row in rows)
    control, unjudged = (row for row in rows if "random nodes" in row.metric)
    assert control.metric.startswith("control: ")
    assert control.met
    assert unjudged.met is None


def test_speed_has_each_policy_and_the_search_as_control() -> None:
    rows = list(speed.rows(1))
    assert [row.metric.partition("policy ")[2].partition(",")[0] for row in rows[:4]] == [
        "slurm", "slurmdl", "mixed", "random"]
    assert rows[-1].metric.startswith("control: ")
    assert all(row.value > 0 for row in rows)


class InstantController:
    """Starts each job when it is submitted, on the first nodes, and rejects what is not asked for."""

    release = "test"

    def __init__(self) -> None:
        self.jobs: dict[int, int] = {}
        self.submitted = 0

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        if argv[0] == "sbatch":
            self.submitted += 1
            self.jobs[self.submitted] = int(next(word[2:] for word in argv if word.startswith("-N")))
            return f"{self.submitted}\n"
        if argv[0] == "scancel":
            for job in argv[1:]:
                del self.jobs[int(job)]
            return ""
        return "".join(f"{job} n[0001-{nodes:04}]\n" for job, nodes in self.jobs.items())

    def close(self) -> None:
        self.jobs.clear()


def test_trace_is_submitted_and_ended_at_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "POLL_S", 0.01)
    topology = calibration.topologies()["tree"]
    trace = calibration.compressed_trace(ReplaySettings(topology, ("slurm",)).machine(), 1)
    assert trace.run_s.mean() == pytest.approx(calibration.MEAN_RUN_S, rel=0.1)
    assert (trace.limit_s % 60 == 0).all()
    short = dataclasses.replace(trace.first(5), submit_s=np.arange(5) * 0.05, run_s=np.full(5, 0.2))
    controller = InstantController()
    observed = calibration.submit_trace(controller, topology, short, Event())
    assert not controller.jobs
    assert ((observed.start_s - observed.submit_s) >= 0).all()
    assert observed.zones.tolist() == [-(-int(nodes) // 20) for nodes in short.nodes]
    stop = Event()
    stop.set()
    with pytest.raises(SandboxError, match="5 jobs have not ended"):
        calibration.submit_trace(controller, topology, short, stop)


def test_calibration_finds_no_error_in_a_copy_of_the_simulation_and_finds_one_in_a_changed_copy() -> None:
    machine = ReplaySettings(calibration.topologies()["tree"], ("slurm",)).machine()
    trace = calibration.compressed_trace(machine, 1)
    timing = SchedulerTiming(backfill_interval_s=1.0, start_s=0.5)
    schedule = calibration._simulate(trace, machine, timing)
    copy = calibration.Observed(trace.submit_s, schedule.start_s, schedule.zones, schedule.utilization)
    judged = [row for row in calibration.compare("copy", copy, trace, machine, timing) if row.met is not None]
    assert all(row.met for row in judged)
    assert [row.value for row in judged[:3]] == [row.baseline for row in judged[:3]]
    late = dataclasses.replace(copy, start_s=copy.start_s + 60, utilization=copy.utilization / 2)
    rows = [row for row in calibration.compare("late", late, trace, machine, timing) if row.met is not None]
    assert [row.met for row in rows[:3]] == [False, False, True]


def test_delay_of_the_controller_is_that_of_jobs_that_need_not_wait() -> None:
    machine = ReplaySettings(calibration.topologies()["tree"], ("slurm",)).machine()
    trace = calibration.compressed_trace(machine, 1)
    schedule = calibration._simulate(trace, machine, SchedulerTiming())
    observed = calibration.Observed(trace.submit_s, schedule.start_s + 0.25, schedule.zones, schedule.utilization)
    assert calibration.measure_timing(observed, trace, machine).start_s == pytest.approx(0.25)
