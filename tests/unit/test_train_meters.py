"""Meters: phase times, drift, traces and the summary table."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import python

from benchmarks.stub_models import NoOpOptimizer
from slurmdl.errors import SlurmdlError
from slurmdl.train import init
from slurmdl.train.library.run import Run
from slurmdl.train.meters import (
    LOCALITY_LEVELS,
    MAX_SAMPLES,
    PHASES,
    PhaseTimer,
    SampledSeries,
    StepMeter,
    format_summary,
)
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual
from slurmdl.train.triggers import MAX_COORDINATES, DriftEstimator, sample_coordinates

#: seconds of each phase of a step
WORK = {"data": 0.5, "forward": 1.0, "backward": 2.0, "optimizer": 0.25}


class Clock:
    def __init__(self) -> None:
        self.time = self.peer_wait = 0.0

    def __call__(self) -> float:
        return self.time


def test_phase_timer_attributes_time_to_phases() -> None:
    """Three steps with two intervals of 10 s in between, and 0.5 s of an empty step after the third."""
    clock, meter = Clock(), StepMeter()
    timer = PhaseTimer(meter, clock, lambda: clock.peer_wait)
    clock.time = 100.0  # before the first step
    for _ in range(3):
        for phase, seconds in WORK.items():
            timer.enter(phase)
            timer.enter(phase)
            clock.time += seconds
        timer.enter("communication")
        clock.time += 4.0
        clock.peer_wait += 1.5
        timer.end_step()
        timer.enter("data")  # an empty step at the end of the epoch
        clock.time += 0.5
        timer.discard_empty_step()
        clock.time += 9.5
    assert meter.phases == {**{phase: 3 * seconds for phase, seconds in WORK.items()}, "communication": 7.5,
                            "peer_wait": 4.5}
    assert tuple(meter.phases) == PHASES
    assert (meter.wall.count, meter.wall.total, meter.wall.median) == (3, 3 * 7.75, 7.75)
    assert (meter.exposed_comm.count, meter.exposed_comm.total, meter.exposed_comm.last) == (3, 12.0, 4.0)
    assert meter.between_steps == 20.5


def test_step_meter_uses_constant_memory() -> None:
    """The state after 100,000 steps is as large as after 1,000, and as accurate."""
    def size(meter: StepMeter) -> int:
        file = io.BytesIO()
        torch.save(meter.state_dict(), file)
        return file.tell() + len(pickle.dumps(meter.totals))

    random = np.random.default_rng(1)
    sizes, walls, losses = [], random.lognormal(size=100_000), np.linspace(3, 1, 100_000)
    meter = StepMeter()
    for step, (wall, loss) in enumerate(zip(walls.tolist(), losses.tolist(), strict=True), 1):
        meter.wall.add(wall)
        meter.exposed_comm.add(wall / 4)
        meter.samples.add(8)
        meter.loss.add(loss)
        if step in (1_000, 100_000):
            sizes.append(size(meter))
    assert sizes[1] <= sizes[0] + 128  # torch.save pads records to 64 bytes
    assert sizes[1] < 8_000
    totals = meter.totals
    assert (totals.steps, totals.samples, totals.loss) == (100_000, 800_000, 1.0)
    assert totals.wall == pytest.approx(walls.sum())
    assert totals.median == pytest.approx(np.median(walls), rel=0.2)
    copy = StepMeter()
    copy.load_state_dict(meter.state_dict())
    assert copy.totals == totals


def test_sampled_series_median_of_few_values_is_exact() -> None:
    series = SampledSeries()
    for value in range(MAX_SAMPLES):
        series.add(float(value))
    assert series.median == (MAX_SAMPLES - 1) / 2


class WorkingModel(torch.nn.Module):
    """Its forward and backward pass take the seconds of WORK on `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = torch.nn.Linear(4, 2), clock

    def forward(self, x: Any) -> Any:
        self.clock.time += WORK["forward"]
        y = self.layer(x)
        y.register_hook(lambda gradient: self._work_backward())
        return 2 * y

    def _work_backward(self) -> None:
        self.clock.time += WORK["backward"]


class WorkingSGD(torch.optim.SGD):
    """Its step takes the seconds of WORK on `clock`."""

    clock: Clock

    def step(self, *arguments: Any) -> Any:
        self.clock.time += WORK["optimizer"]
        return super().step(*arguments)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_phases_sum_to_step_time(strategy: str) -> None:
    clock = Clock()

    class ClockTransport(virtual.VirtualTransport):
        def now(self) -> float:
            return clock.time

    def program(transport: virtual.VirtualTransport) -> dict[str, Any] | None:
        transport.__class__ = ClockTransport
        run = init(StrategyConfig(strategy), environ={}, transport=transport)
        model = WorkingModel(clock)
        torch.optim.SGD(model.parameters())  # from now on PyTorch calls the hooks at each super().step(), too
        optimizer = WorkingSGD(model.parameters(), lr=0.1)
        optimizer.clock = clock
        model, optimizer = run.wrap(model, optimizer)
        for batch in run.loader(torch.ones(20, 4), 1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            clock.time += 10.0  # between two steps
        run.finish()
        return run.summary()
    summary = virtual.run_virtual_ranks(1, program)[0]
    assert summary is not None
    assert sum(summary["phases"].values()) == pytest.approx(summary["train_seconds"])
    for phase in ("forward", "backward", "optimizer"):
        assert summary["phases"][phase] == pytest.approx(20 * WORK[phase])
    assert summary["train_seconds"] + summary["between_steps_seconds"] == pytest.approx(clock.time)
    assert (summary["steps"], summary["batch_size"]) == (20, 1)


def test_peer_wait_ends_with_first_chunk() -> None:
    """Rank 1 sends a second after rank 0, when rank 0's message has arrived."""
    class DelayNetwork:
        def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
            return clock, clock + 0.25

    def program(transport: virtual.VirtualTransport) -> float:
        p2p = MeteredP2P(transport, LOCALITY_LEVELS[:1] * 2)
        vector = np.zeros(10, np.float32)
        if transport.rank == 1:
            transport.emulate_compute(1.0)
        p2p.exchange([(1 - transport.rank, vector)], [(1 - transport.rank, np.empty_like(vector))])
        return p2p.peer_wait_seconds()
    assert virtual.run_virtual_ranks(2, program, DelayNetwork()) == [1.25, 0.0]


@pytest.mark.parametrize(("size", "sent_at"), [(100_000, 1.0), (10, 0.0)])
def test_large_model_is_sent_when_partner_is_ready(size: int, sent_at: float) -> None:
    """Rank 1 is a second later than rank 0; until then a large message would only occupy links."""
    sent: list[tuple[int, int, float]] = []

    class RecordingNetwork:
        def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
            sent.append((source, size, clock))
            return clock, clock

    def program(transport: virtual.VirtualTransport) -> None:
        gradients = np.zeros(size, np.float32)
        ctx = StrategyContext(MeteredP2P(transport, LOCALITY_LEVELS[1:2] * 2), CommThread(False), (0, 1), (),
                              np.zeros_like(gradients), gradients, (size,),
                              StrategyConfig("gossip", "random-matching"), 1, ("",) * 2, ("",) * 2, {}, lambda: 0.1,
                              lambda part: NoOpOptimizer())
        strategy = STRATEGIES["gossip"](ctx)
        transport.emulate_compute(float(transport.rank))
        strategy.finish_gradients(0)
        strategy.after_optimizer_step(0)

    virtual.run_virtual_ranks(2, program, RecordingNetwork())
    models = [(source, clock) for source, length, clock in sent if length]
    assert sum(length for source, length, _ in sent if source == 0) == 4 * size, "bytes of the model only"
    assert {clock for source, clock in models if source == 0} == {sent_at}


def test_drift_estimator_measures_from_last_reset() -> None:
    random = np.random.default_rng(1)
    sizes = (5, 40_000, 1, 0, 7_000)
    vector = random.standard_normal(sum(sizes)).astype(np.float32)
    estimator, start = DriftEstimator(vector, sizes), vector.copy()
    assert estimator.relative_drift() == 0
    vector += 0.1 * random.standard_normal(vector.size).astype(np.float32)
    exact = np.linalg.norm(vector - start) / np.linalg.norm(start)
    assert estimator.relative_drift() == pytest.approx(exact, rel=0.1)
    estimator.reset()
    assert estimator.relative_drift() == 0
    indices, multiplicity = sample_coordinates(sizes)
    assert len(indices) <= MAX_COORDINATES + len(sizes)
    assert multiplicity.sum() == pytest.approx(sum(sizes))
    assert len(set(indices.tolist())) == len(indices)


def train_linear(run: Run) -> dict[str, Any] | None:
    torch.manual_seed(run.rank)
    model = torch.nn.Linear(4, 2)
    model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.loader(torch.ones(24, 4), 2):
        opt.zero_grad()
        run.world.transport.emulate_compute(0.01)
        loss = model(batch).square().sum()
        loss.backward()
        opt.step()
        run.log_loss(float(loss.detach()))
    run.finish(lambda: (1.0, 0.5 + run.rank / 10))
    return run.summary((0.5, 0.9) if run.is_main else None)


def test_run_writes_summary_and_traces(tmp_path: Path) -> None:
    trace_dir = tmp_path / "traces"

    def program(transport: virtual.VirtualTransport) -> tuple[dict[str, Any] | None, StepMeter]:
        run = init(StrategyConfig("gossip"), environ={}, transport=transport, trace_dir=str(trace_dir))
        return train_linear(run), run.meter
    (summary, meter), *others = virtual.run_virtual_ranks(3, program)
    assert summary is not None and [other_summary for other_summary, _ in others] == [None, None]
    assert [summary[f"test_accuracy{key}"] for key in ("", "_local_mean", "_local_worst")] == pytest.approx(
        [0.9, 0.6, 0.5])
    assert summary["train_loss"] is not None
    text = " ".join(format_summary(summary).split())
    for word in ("peer wait", "exchanges", "local models, worst 50.00%", "spectral gap"):
        assert word in text
    assert meter.loss.count == 4
    for rank in range(3):
        events = json.loads((trace_dir / f"rank-{rank}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["name"] for event in spans} > {"data", "forward", "backward", "communication", "optimizer"}
        assert all(event["pid"] == rank and event["dur"] >= 0 for event in spans)


def test_killed_run_leaves_valid_trace(tmp_path: Path) -> None:
    """The run is killed in the third step."""
    script = ("import os, signal, torch; from slurmdl.train import init; run = init(); model = torch.nn.Linear(4, 2);"
              "model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1));"
              "[(model(batch).sum().backward(), number == 2 and os.kill(os.getpid(), signal.SIGKILL), opt.step()) "
              "for number, batch in enumerate(run.loader(torch.ones(40, 4), 4))]")
    done = python("-c", script, environ={"SLURMDL_TRAIN_TRACE_DIR": str(tmp_path),
                  "SLURMDL_TRAIN_STRATEGY": "gossip"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    spans = [event["name"] for event in json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
             if event["ph"] == "X"]
    assert [spans.count(phase) for phase in ("data", "forward", "backward")] == [3, 3, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_full_disk_ends_trace_but_not_training(tmp_path: Path) -> None:
    command = (f"{sys.executable} -m slurmdl.train --virtual-ranks 2 --strategy gossip --steps 200 "
               f"--trace-dir {tmp_path}")
    done = subprocess.run(["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs {tmp_path} || exit 99; "
                           f"{command} && cat {tmp_path}/rank-0.json"], capture_output=True, text=True, check=False)
    if done.returncode == 99:
        pytest.skip(f"no mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"trace {tmp_path}/rank-{rank}.json: No space left on device; it ends here" in done.stderr
    events = json.loads(done.stdout[done.stdout.index('{"traceEvents"'):])["traceEvents"]
    assert len(events) > 50


def test_unwritable_trace_dir_is_rejected_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SlurmdlError, match=r"trace .*file/rank-[01]\.json: "):
        virtual.run_virtual_ranks(2, lambda transport: init(StrategyConfig("gossip"), environ={}, transport=transport,
                                              trace_dir=str(tmp_path / "file")))
