"""The trainer's options, from a file and from the command line, and what it shows as it goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from slurmdl.errors import InputError, TrainError, UsageError
from slurmdl.train.__main__ import main
from slurmdl.train.trainer import optimizers
from slurmdl.train.trainer.options import EmulatedCompute, Options, parse_train_options
from slurmdl.train.trainer.progress import Progress


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_file_and_command_line(file: Path) -> None:
    file.write_text("lr: 1e-1\noptimizer: adam\nasync: true\nshared-memory: no\nstrategy: gossip\n"
                    "simulate: 4\nzones: [A:2, B:2x1]\ncompute: replay:0.5\n")
    found = parse_train_options(["--config", str(file), "--lr", "0.5"], {"SLURMDL_TRAIN_STRATEGY": "ps",
                                                          "SLURMDL_TRAIN_PERIOD": "3"})
    assert (found.lr, found.optimizer, found.virtual_ranks) == (0.5, "adam", 4)
    assert found.virtual_zones == (("A", 2, 1), ("B", 2, 1))
    assert found.emulate_compute == EmulatedCompute(0.5)
    its = found.strategy_config
    assert (its.strategy, its.asynchronous, its.shared_memory, its.period) == ("gossip", True, False, 3)


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert parse_train_options(["--config", str(file)], {}) == Options()


@pytest.mark.parametrize(("text", "message"), [
    ("seed: 1\nlrr: 1", ":2: 'lrr': unknown option; near: lr"),
    ("zzz: 1", ":1: 'zzz': unknown option; valid: async, "),
    ("lr: x", ":1: 'lr': 'x' is not a number from 0 to below inf"), ("- a", ":1: OPTION: VALUE expected"),
    ("\nlr: {a: 1}", ":2: 'lr': one value, or a list of values, expected"), ("lr:", ":1: 'lr': one value"),
    ("a: b: c", ":1: is not YAML"), ("lr: 1\nlr: 2", ":2: 'lr': given twice"), ("lr: &a [*a]", ":1: 'lr': one value"),
    ("async: maybe", ":1: 'async': 'maybe' is not one of true, false"),
    ("strategy: gosip", ":1: 'strategy': 'gosip' is not one of allreduce, "), ("config: x", ":1: 'config': unknown")])
def test_faults_of_a_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        parse_train_options(["--config", str(file)], {})
    assert str(raised.value).startswith(f"{file}{message}")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(file: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        parse_train_options(["--config", str(file)], {})
    file.write_bytes(b"lr: \xff")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        parse_train_options(["--config", str(file)], {})


@pytest.mark.parametrize(("name", "rates"), [
    ("constant", [1.0, 1.0, 1.0, 1.0]), ("cosine", [1.0, 0.75, 0.25, 0.0]), ("step", [1.0, 0.1, 0.01, 0.001])])
def test_schedules(name: str, rates: list[float]) -> None:
    optimizer = optimizers.build_optimizer("sgd", [torch.nn.Parameter(torch.zeros(1))], 1.0, 0.9, 0.0)
    schedule = optimizers.build_lr_scheduler(optimizer, name, 3)
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam),
                                            ("adamw", torch.optim.AdamW)])
def test_optimizers(name: str, kind: type) -> None:
    optimizer = optimizers.build_optimizer(name, [torch.nn.Parameter(torch.zeros(1))], 0.1, 0.5, 0.01)
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert group.get("momentum", 0.5) == 0.5


def figures(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 2.0 / step, "seconds": 0.5, "comm_seconds": 0.1, **more}


def test_lines_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 1000, 65))  # read at the start and at each line
    progress = Progress(4, 2, str(tmp_path / "metrics"), now=lambda: float(next(clock)))
    for step in range(1, 5):
        progress.log_step(figures(step, **({"accuracy": 0.5} if step == 4 else {})))
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 2 of 4: loss 1.5000, 0.5000 s/step, communication 20%, 1 min 5 s left",
        "step 4 of 4: loss 0.5833, 0.5000 s/step, communication 20%, accuracy 50.00%"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics").read_text().splitlines()] == [1, 2, 3, 4]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    progress = Progress(2, 50, terminal=terminal)
    progress.log_step(figures(1))
    progress.log_step(figures(2))
    first, last = terminal.getvalue().split("\r")[1:]
    assert first.startswith("[" + "#" * 15 + "." * 15 + "] step 1 of 2: loss 2.0000")
    assert last.startswith("[" + "#" * 30 + "] step 2 of 2")
    assert last.endswith("\n")
    assert capsys.readouterr().out == ""


def test_files_that_cannot_be_written() -> None:
    with pytest.raises(TrainError, match="/nowhere/metrics: No such file"):
        Progress(1, 1, "/nowhere/metrics")


def test_tensorboard_or_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1, 50, tensorboard=str(tmp_path / "board"))
    progress.log_step(figures(1))
    progress.close()
    said = capsys.readouterr().err
    if said:
        assert said.splitlines() == ["slurmdl: train: --tensorboard is left aside: it needs the package tensorboard "
                                     "(pip install tensorboard)"]
    else:
        assert list((tmp_path / "board").glob("events.*"))


def test_a_variable_that_is_misspelt_is_named() -> None:
    with pytest.raises(UsageError, match="SLURMDL_TRAIN_PEROID: no such variable; valid: SLURMDL_TRAIN_PERIOD"):
        parse_train_options([], {"SLURMDL_TRAIN_PEROID": "3"})


def test_the_time_left_counts_only_the_steps_of_this_start(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 100.0])
    Progress(400, 50, completed_steps=50, now=lambda: next(clock)).log_step(figures(100))
    assert capsys.readouterr().out.endswith(", 10 min left\n")  # 50 steps took 100 s, and 300 are to come


@pytest.mark.parametrize("options", [
    "--strategy ps --simulate 1", "--simulate 4 --strategy ps --ps 9", "--simulate 2 --compress int4",
    "--simulate 4 --strategy gossip --traffic ring", "--simulate 2 --slow 9=2",
    "--simulate 2 --strategy adaptive-gossip --comm-budget 0.0001%",
    "--simulate 2 --strategy local-sgd --balance batch --async", "--simulate 2 --steps 0",
    "--simulate 2 --batch 100000", "--simulate 2 --model mlp:x"])
def test_options_at_fault_have_the_status_of_wrong_usage(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options.split(), "--compute", "replay:0.01"] if "--slow" in options else options.split()) == 64
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("slurmdl: ")
