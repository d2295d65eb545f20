"""The trainer: its options, devices, optimizers, progress output, and runs on virtual ranks with their clock."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from virtual_ranks import train_summary

from slurmdl.errors import InputError, InvalidOptionsError, InvalidRunError, TrainError, UsageError
from slurmdl.train.__main__ import main
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer import models
from slurmdl.train.trainer.options import EmulatedCompute, Options, parse_train_options
from slurmdl.train.trainer.trainer import Progress, choose_device

torch.set_num_threads(1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_options_command_line_overrides_file_overrides_environment(file: Path) -> None:
    file.write_text("lr: 1e-1\noptimizer: adam\nasync: true\nshared-memory: no\nstrategy: gossip\n"
                    "virtual-ranks: 4\nvirtual-zones: [A:2, B:2x1]\nemulate-compute: 0.5\n")
    options = parse_train_options(["--config", str(file), "--lr", "0.5"], {"SLURMDL_TRAIN_STRATEGY": "ps",
                                                          "SLURMDL_TRAIN_PERIOD": "3"})
    assert (options.lr, options.optimizer, options.virtual_ranks) == (0.5, "adam", 4)
    assert options.virtual_zones == (("A", 2, 1), ("B", 2, 1))
    assert options.emulate_compute == EmulatedCompute(0.5)
    config = options.strategy_config
    assert (config.strategy, config.asynchronous, config.shared_memory, config.period) == ("gossip", True, False, 3)


def test_seed_has_up_to_18_digits() -> None:
    assert parse_train_options(["--seed", "123456789012345678"], {}).seed == 123456789012345678


def test_options_empty_file_gives_defaults(file: Path) -> None:
    file.write_text("# nothing\n")
    assert parse_train_options(["--config", str(file)], {}) == Options()


def test_preset_gives_defaults(file: Path) -> None:
    options = parse_train_options(["--preset", "diloco", "--outer-lr", "0.5"], {})
    config = options.strategy_config
    assert (config.strategy, config.period, config.outer_momentum, config.outer_lr) == ("local-sgd", 100, 0.9, 0.5)
    assert options.optimizer == "adamw"
    file.write_text("optimizer: adam\n")
    environ = {"SLURMDL_TRAIN_PRESET": "diloco", "SLURMDL_TRAIN_PERIOD": "7"}
    options = parse_train_options(["--config", str(file)], environ)
    assert (options.optimizer, options.strategy_config.period) == ("adam", 7)
    assert parse_train_options(["--optimizer", "sgd"], environ).optimizer == "sgd"
    noloco = parse_train_options(["--preset", "noloco", "--islands", "zone"], {})
    assert (noloco.strategy_config.strategy, noloco.strategy_config.outer_step) == ("gossip", (0.7, 0.5))
    assert noloco.optimizer == "adam"
    assert not parse_train_options(["--strategy", "gossip"], {}).strategy_config.has_outer_optimizer
    with pytest.raises(UsageError, match="--preset diloco: not valid with --strategy gossip; expected local-sgd"):
        parse_train_options(["--preset", "diloco", "--strategy", "gossip"], {})


@pytest.mark.parametrize(("text", "message"), [
    ("seed: 1\nlrr: 1", ":2: 'lrr': unknown option; expected lr, "),
    ("zzz: 1", ":1: 'zzz': unknown option; expected async, "),
    ("lr: x", ":1: 'lr': invalid value 'x'; expected a number from 0 to below inf"),
    ("- a", ":1: expected OPTION: VALUE"),
    ("\nlr: {a: 1}", ":2: 'lr': expected one value, or a list of values"), ("lr:", ":1: 'lr': expected one value"),
    ("a: b: c", ":1: is not YAML"), ("lr: 1\nlr: 2", ":2: 'lr': given twice"),
    ("lr: &a [*a]", ":1: 'lr': expected one value"),
    ("async: maybe", ":1: 'async': invalid value 'maybe'; expected yes, no"),
    ("strategy: gosip", ":1: 'strategy': invalid value 'gosip'; expected gossip, "),
    ("config: x", ":1: 'config': unknown")])
def test_options_invalid_file_names_line_and_option(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError) as error:
        parse_train_options(["--config", str(file)], {})
    assert str(error.value).startswith(f"{file}{message}")
    assert "\n" not in str(error.value)


def test_options_unreadable_file_raises(file: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        parse_train_options(["--config", str(file)], {})
    file.write_bytes(b"lr: \xff")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        parse_train_options(["--config", str(file)], {})


@pytest.mark.parametrize(("name", "rates"), [
    ("constant", [1.0, 1.0, 1.0, 1.0]), ("cosine", [1.0, 0.75, 0.25, 0.0]), ("step", [1.0, 0.1, 0.01, 0.001])])
def test_lr_scheduler_rates(name: str, rates: list[float]) -> None:
    optimizer = models.build_optimizer("sgd", [torch.nn.Parameter(torch.zeros(1))], 1.0, 0.9, 0.0)
    schedule = models.build_lr_scheduler(optimizer, name, 3)
    observed = []
    for _ in range(4):
        observed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert observed == pytest.approx(rates)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam),
                                            ("adamw", torch.optim.AdamW)])
def test_optimizer_type_and_hyperparameters(name: str, kind: type) -> None:
    optimizer = models.build_optimizer(name, [torch.nn.Parameter(torch.zeros(1))], 0.1, 0.5, 0.01)
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert group.get("momentum", 0.5) == 0.5


def step_metrics(step: int, **further: float) -> dict[str, float]:
    return {"step": step, "loss": 2.0 / step, "seconds": 0.5, "exposed_comm_seconds": 0.1, **further}


def test_progress_writes_log_lines_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 1000, 65))  # read at the start and at each line
    progress = Progress(4, 2, str(tmp_path / "metrics"), now=lambda: float(next(clock)))
    for step in range(1, 5):
        progress.log_step(step_metrics(step, **({"test_accuracy": 0.5} if step == 4 else {})))
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 2 of 4: loss 1.5000, 0.5000 s/step, communication 20%, 1 min 5 s left",
        "step 4 of 4: loss 0.5833, 0.5000 s/step, communication 20%, accuracy 50.00%"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics").read_text().splitlines()] == [1, 2, 3, 4]


def test_progress_on_terminal_draws_bar(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    progress = Progress(2, 50, terminal=terminal)
    progress.log_step(step_metrics(1))
    progress.log_step(step_metrics(2))
    first, last = terminal.getvalue().split("\r")[1:]
    assert first.startswith("[" + "#" * 15 + "." * 15 + "] step 1 of 2: loss 2.0000")
    assert last.startswith("[" + "#" * 30 + "] step 2 of 2")
    assert last.endswith("\n")
    assert capsys.readouterr().out == ""


def test_progress_unwritable_file_raises() -> None:
    with pytest.raises(TrainError, match="/nowhere/metrics: No such file"):
        Progress(1, 1, "/nowhere/metrics")


def test_progress_remaining_time_counts_steps_since_restart(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 100.0])
    Progress(400, 50, completed_steps=50, now=lambda: next(clock)).log_step(step_metrics(100))
    assert capsys.readouterr().out.endswith(", 10 min left\n")  # 50 steps took 100 s, 300 remain


@pytest.mark.parametrize("options", [
    "--strategy ps --virtual-ranks 1", "--virtual-ranks 4 --strategy ps --ps 9",
    "--virtual-ranks 2 --compression int4",
    "--virtual-ranks 4 --strategy gossip --comm-pattern ring", "--virtual-ranks 2 --straggler 9=2",
    "--virtual-ranks 2 --strategy adaptive-gossip --comm-budget 0.0001%",
    "--virtual-ranks 2 --strategy local-sgd --load-balance --async", "--virtual-ranks 2 --steps 0",
    "--virtual-ranks 2 --batch-size 100000", "--virtual-ranks 2 --model mlp:x"])
def test_main_invalid_options_returns_usage_error(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options.split(), "--emulate-compute", "0.01"]
                if "--straggler" in options else options.split()) == 64
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("slurmdl: ")


@pytest.mark.parametrize(("words", "message"), [
    ("--strategy gosip", "--strategy: invalid value 'gosip'; expected gossip, "),
    ("--ps -1", "--ps: invalid value '-1'"),
    ("--steps 0", "--steps: invalid value '0'"), ("--batch-size x", "--batch-size: invalid value 'x'"),
    ("--lr nan", "--lr: invalid value 'nan'"), ("--momentum 1", "--momentum: invalid value '1'"),
    ("--data mnist", "'mnist'"), ("--step 3", "--step"), ("more", "more"),
    ("--device gpu", "expected auto, cpu, cuda or cuda:N"),
    ("--device cuda:", "expected auto, cpu, cuda or cuda:N"),
    ("--device cuda --virtual-ranks 2", "--device cuda: not valid with --virtual-ranks"),
    *((words, "") for words in (
        "--virtual-ranks 4 --virtual-zones A:2", "--virtual-zones A:2", "--virtual-links inter-zone=1G",
        "--straggler 1=2", "--virtual-ranks 0", "--virtual-ranks 2 --virtual-zones A:1,A:1",
        "--virtual-ranks 2 --virtual-links far=1G", "--virtual-ranks 2 --virtual-links inter-zone=0",
        "--virtual-ranks 2 --virtual-links inter_zone=1G", "--emulate-compute sleep:1", "--emulate-compute x",
        "--emulate-compute 1:2:3", "--virtual-ranks 2 --straggler 1=0", "--fold 0/5", "--fold 1/1",
        "--dirichlet-alpha 0"))])
def test_invalid_options_are_rejected(words: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_train_options(words.split(), {})
    assert message in str(error.value)


def test_options_misspelled_variable_raises() -> None:
    with pytest.raises(UsageError, match="unknown variable SLURMDL_TRAIN_PEROID; expected SLURMDL_TRAIN_PERIOD"):
        parse_train_options([], {"SLURMDL_TRAIN_PEROID": "3"})


def test_parser_defaults_equal_class_defaults() -> None:
    assert parse_train_options([]) == Options()
    assert parse_train_options(["--ps", "2", "--lr", "0.5"]) == Options(strategy_config=StrategyConfig(ps=2), lr=0.5)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(("name", "local_rank", "expected"), [
    ("auto", 0, "cuda:0"), ("auto", 3, "cuda:3"), ("auto", 5, "cuda:1"), ("cuda", 2, "cuda:2"),
    ("cuda:3", 0, "cuda:3"), ("cpu", 1, "cpu")])
def test_ranks_of_a_node_take_its_gpus_in_turn(gpus: None, name: str, local_rank: int, expected: str) -> None:
    assert choose_device(name, local_rank) == torch.device(expected)


def test_missing_gpu_is_rejected(gpus: None) -> None:
    with pytest.raises(InvalidOptionsError, match="--device cuda:4: no such GPU; expected cuda:0 to cuda:3, or auto"):
        choose_device("cuda:4", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch sees a GPU")
def test_without_a_gpu_auto_is_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_device("auto", 1) == torch.device("cpu")
    assert main(["--device", "cuda", "--steps", "2"]) == UsageError.exit_status
    message, = capsys.readouterr().err.splitlines()
    assert "--device cuda: PyTorch" in message and "sees no GPU; expected auto or cpu" in message


def run_summary(*words: str) -> dict[str, Any]:
    return train_summary("--steps 30 --model mlp:16 --batch-size 16", *words)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
def test_virtual_run_is_reproducible(strategy: str) -> None:
    assert run_summary("--virtual-ranks", "4", "--strategy", strategy) == run_summary("--virtual-ranks", "4",
                                                                              "--strategy", strategy)


def test_virtual_run_counts_bytes_by_locality_level() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    summary = run_summary("--virtual-ranks", "8", "--virtual-zones", "A:2x2,B:4", "--strategy", "gossip",
                    "--comm-pattern", "base-2")
    # Distances alternate between 1, 2 and 4. Distance 1: ranks 0 to 3 have a partner on their node. Distance 2: all
    # partners are in the same zone. Distance 4: all are in the other zone. The remaining bytes are the final average.
    per_turn = 8 * 4 * size * 10
    sent = summary["bytes_sent"]
    final = sum(sent.values()) - 3 * per_turn
    assert 0 < final < 2 * 8 * 4 * size
    assert per_turn <= sent["inter_zone"] < per_turn + final
    assert per_turn // 2 <= sent["intra_node"] < per_turn // 2 + final


def test_virtual_time_is_computation_plus_links() -> None:
    size = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    summary = run_summary("--virtual-ranks", "2", "--virtual-zones", "A:1,B:1", "--strategy", "gossip",
                    "--emulate-compute", "0.5",
                    "--virtual-links", f"inter-zone={size * 8 / 0.25}:0.05")
    assert summary["seconds_per_step"] == pytest.approx(0.5 + 0.25 + 0.05)
    assert summary["exposed_comm_seconds"] == pytest.approx(30 * 0.3)


def test_straggler_delays_allreduce() -> None:
    summary = run_summary("--virtual-ranks", "4", "--strategy", "allreduce", "--emulate-compute", "0.1",
                          "--straggler",
                    "2=4")
    assert summary["seconds_per_step"] == pytest.approx(0.4)


def test_synthetic_workload_has_any_size(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    summary = run_summary("--virtual-ranks", "2", "--strategy", "allreduce", "--emulate-compute", "0.3:1000",
                          "--summary",
                    str(file))
    assert (summary["parameters"], summary["test_accuracy"]) == (1000, None)
    assert summary["seconds_per_step"] == pytest.approx(0.3)
    assert sum(summary["bytes_sent"].values()) == 30 * 2 * 4000
    assert json.loads(file.read_text()) == json.loads(json.dumps(summary))


def test_error_names_virtual_rank_unless_all_ranks_raise_it() -> None:
    with pytest.raises(TrainError, match=r"^rank \d on B\d: step \d: the gradient of .* has infinite or NaN"):
        run_summary("--virtual-ranks", "2", "--virtual-zones", "B:2", "--strategy", "gossip", "--lr", "1e30")
    with pytest.raises(InvalidRunError, match=r"^--comm-pattern ring"):
        run_summary("--virtual-ranks", "2", "--strategy", "gossip", "--comm-pattern", "ring")
    with pytest.raises(UsageError, match=r"--batch-size 800: each worker has only 718 samples"):
        run_summary("--virtual-ranks", "2", "--batch-size", "800")
    for path, reason in (("/nowhere/summary", "No such file or directory"), ("/etc", "Is a directory")):
        with pytest.raises(TrainError, match=rf"^rank 0 on \S+: --summary {path}: cannot be written \({reason}\)"):
            run_summary("--virtual-ranks", "2", "--summary", path)
    with pytest.raises(InvalidRunError, match=r"^--straggler 2=: no such rank; expected 0 to 1"):
        run_summary("--virtual-ranks", "2", "--straggler", "2=4")


@pytest.mark.parametrize(("words", "warns"), [
    ("--strategy gossip --dirichlet-alpha 0.1", True), ("--strategy local-sgd --dirichlet-alpha 0.1", True),
    ("--strategy allreduce --dirichlet-alpha 0.1", False),
    ("--strategy gossip --dirichlet-alpha 1000", False), ("--strategy gossip", False)],
    ids=["skewed", "local-sgd", "allreduce", "nearly alike", "alike"])
def test_label_skew_is_reported_and_warned_about(words: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_summary(*words.split(), "--virtual-ranks", "4", "--steps", "2")
    stderr = capsys.readouterr().err
    assert ("label skew of the workers is 0." in stderr) == warns
    assert (summary["label_skew"] > 0.4) == ("0.1" in words)
