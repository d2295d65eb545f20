"""Exported models, and how many checkpoints are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmdl.cli.main import main
from slurmdl.train import init
from slurmdl.train.library.checkpoint import CheckpointDir, Manifest
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual


def build_model() -> Any:
    """Tied, frozen and channels_last parameters, and buffers."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                                torch.nn.Linear(64, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[5].weight = model[4].weight
    model[3].bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def run_to_checkpoint(folder: Path, strategy: str, steps: int = 6, ranks: int = 3, keep: int | None = None) -> Any:
    """Train with a checkpoint every 2 steps; return the state dict of rank 0 after `finish`."""
    def rank(transport: virtual.VirtualTransport) -> Any:
        run = init(StrategyConfig(strategy), environ={}, transport=transport, checkpoint_dir=str(folder),
                   checkpoint_every=2, checkpoint_keep=keep)
        torch.manual_seed(1)
        model = build_model()
        opt = torch.optim.SGD([tensor for tensor in model.parameters() if tensor.requires_grad], lr=0.05)
        run.attach(model, opt)
        while run.step < steps:
            with run.data_phase():
                batch = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(100 * run.rank + run.step))
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
        run.finish()
        run.close()
        return model.state_dict()

    return virtual.run_virtual_ranks(ranks, rank)[0]


def export(*argv: object) -> None:
    assert main(["train", "export", *map(str, argv)]) == 0


@pytest.mark.parametrize(("strategy", "said"), [("allreduce", "step 6\n"),
                                                ("gossip", "step 6, the mean of 3 workers\n")])
def test_exported_model_is_that_of_the_finished_run(strategy: str, said: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """The last checkpoint follows the last step, and `finish` averages what differs."""
    final = run_to_checkpoint(tmp_path / "kept", strategy)
    capsys.readouterr()
    export(tmp_path / "kept", "--output", tmp_path / "model.pt")
    assert capsys.readouterr().err.endswith(f"model.pt: the model of {said}")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert build_model().load_state_dict(state).missing_keys == []
    assert list(state) == list(final)
    for name, value in final.items():
        if strategy == "allreduce" and "running" not in name:
            assert torch.equal(state[name], value), name
        torch.testing.assert_close(state[name], value)


def test_statistics_of_exported_model_are_averaged(tmp_path: Path) -> None:
    run_to_checkpoint(tmp_path / "kept", "gossip")
    export(tmp_path / "kept", "--output", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    own = [torch.load(tmp_path / f"kept/step-00000006/worker-{rank}.pt", weights_only=True)["model"]
           for rank in range(3)]
    mean = torch.stack([model["1.running_mean"] for model in own]).mean(0)
    assert not torch.equal(own[0]["1.running_mean"], own[1]["1.running_mean"])
    torch.testing.assert_close(state["1.running_mean"], mean)


def test_earlier_checkpoint_and_damaged_newest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    run_to_checkpoint(kept, "allreduce")
    export(kept, "--step", 4, "--output", tmp_path / "4.pt")
    (kept / "step-00000006/worker-0.pt").write_bytes(b"damaged")
    capsys.readouterr()
    export(kept, "--output", tmp_path / "newest.pt")
    messages = capsys.readouterr().err.splitlines()
    assert messages[0].startswith(f"slurmdl: train export: a checkpoint is skipped: {kept}/step-00000006/worker-0.pt")
    assert messages[1].endswith("the model of step 4")
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("4.pt", "newest.pt"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("argv", "message"), [
    (["{kept}", "--step", "5"], "{kept}: no checkpoint of step 5; expected one of 6, 4"),
    (["{kept}/none"], "{kept}/none: no checkpoint"),
    (["{kept}", "--output", "{kept}/none/model.pt"], "{kept}/none/model.pt: No such file or directory"),
    ([], "train export: the following arguments are required: DIR (slurmdl train export --help lists the options)"),
])
def test_export_errors_are_one_line(argv: list[str], message: str, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    run_to_checkpoint(kept, "allreduce")
    capsys.readouterr()
    assert main(["train", "export", *(word.format(kept=kept) for word in argv)]) in (64, 65)
    assert capsys.readouterr().err == f"slurmdl: {message.format(kept=kept)}\n"


@pytest.mark.parametrize(("keep", "numbers"), [(None, [10, 8]), (1, [10]), (3, [10, 8, 6]), (0, [10, 8, 6, 4, 2])])
def test_number_of_kept_checkpoints_holds_over_a_restart(keep: int | None, numbers: list[int],
                                                         tmp_path: Path) -> None:
    run_to_checkpoint(tmp_path, "allreduce", 6, keep=keep)
    CheckpointDir(str(tmp_path)).write_rank_file(5, "worker-0", {"of": "an interrupted checkpoint"})
    run_to_checkpoint(tmp_path, "allreduce", 10, keep=keep)
    assert CheckpointDir(str(tmp_path)).list_numbers() == numbers


def test_checkpoints_newer_than_the_one_resumed_from_are_removed(tmp_path: Path) -> None:
    def write(folder: CheckpointDir, number: int) -> None:
        folder.commit(Manifest(number, {}, {}, {"worker-0": folder.write_rank_file(number, "worker-0", number)}))

    for number in (10, 20, 30):
        write(CheckpointDir(str(tmp_path), 0), number)
    resumed = CheckpointDir(str(tmp_path), 3)
    resumed.mark_verified(20)  # 30 is damaged
    write(resumed, 25)
    assert resumed.list_numbers() == [25, 20, 10]


class Counter(torch.nn.Linear):
    """A module with a state of its own, as get_extra_state() defines it."""

    def __init__(self, state: object) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def test_extra_state_of_a_module_is_kept_and_objects_are_rejected_at_wrap(tmp_path: Path) -> None:
    def rank(transport: virtual.VirtualTransport, state: object) -> object:
        run = init(StrategyConfig("allreduce"), environ={}, transport=transport, checkpoint_dir=str(tmp_path),
                   checkpoint_every=1)
        model = Counter(state)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        run.attach(model, opt)
        with run.data_phase():
            batch = torch.ones(1, 2)
        model(batch).sum().backward()
        opt.step()
        run.finish()
        return model.state

    assert virtual.run_virtual_ranks(2, lambda transport: rank(transport, 7)) == [7, 7]
    assert virtual.run_virtual_ranks(2, lambda transport: rank(transport, 1)) == [7, 7]
    with pytest.raises(Exception, match=r"wrap\(Counter\): checkpoints: \w+: its state holds .*Path"):
        virtual.run_virtual_ranks(2, lambda transport: rank(transport, tmp_path))
