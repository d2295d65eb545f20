"""The benchmark of launchers: verdicts on given seconds. It runs for real in `make bench-launchers`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.launchers import srun_overhead, step_time


@pytest.fixture(autouse=True)
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = SimpleNamespace(spec=SimpleNamespace(name="none"), shared=Path("/shared"))
    for module in (step_time, srun_overhead):
        monkeypatch.setattr(module.lifecycle, "sandbox_up", lambda spec: sandbox)
        monkeypatch.setattr(module.lifecycle, "sandbox_down", lambda name: None)


@pytest.mark.parametrize(("now", "control", "met"), [(0.5, 1.0, True), (0.9, 1.0, False), (0.5, 0.5, True)])
def test_launch_must_be_faster_and_the_control_must_not(monkeypatch: pytest.MonkeyPatch, now: float, control: float,
                                                        met: bool) -> None:
    def measure(sandbox: object, command: str) -> dict[str, list[float]]:
        is_control = command.endswith(step_time.CONTROL)
        seconds = 1.0 if command.startswith("srun") else control if is_control else now
        return {"all-reduce": [seconds] * 3}

    monkeypatch.setattr(step_time, "measure", measure)
    rows = list(step_time.rows(1))
    judged = {row.metric: row.met for row in rows if row.met is not None}
    assert {judged[f"{name}: all-reduce"] for name in step_time.LINES} == {met}
    assert judged["torchrun, c10d with --local-addr: all-reduce (control)"] == (control > step_time.TARGET_SHARE)


def test_overhead_is_compared_with_srun_of_the_same_pmi(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = {"srun": 80, "srun --mpi=pmix": 200, "slurmdl srun": 340, "slurmdl srun --mpi=none": 240,
                    "slurmdl srun --version (control)": 50}
    text = "\n".join(f"{name}: {value * 10**6}" for name, value in milliseconds.items()
                     for _ in range(srun_overhead.REPEATS))
    monkeypatch.setattr(srun_overhead.sandbox_mpi, "call", lambda sandbox, argv: text)
    rows = {row.metric: row for row in srun_overhead.rows(1)}
    small = {name.partition(": ")[2]: row for name, row in rows.items() if name.startswith("hostname on 8 nodes")}
    assert (small["slurmdl srun"].met, small["slurmdl srun --mpi=none"].met) == (True, False)
    assert small["slurmdl srun"].baseline == pytest.approx(0.2)
    assert [row.met for name, row in rows.items() if "1000 nodes" in name] == [True, None]
