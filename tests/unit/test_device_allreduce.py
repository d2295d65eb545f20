"""Allreduce as on GPUs, on CPUs: the same code, with gloo instead of NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi import torchrun

from slurmdl.train.library.checkpoint_restore import export_model
from slurmdl.train.strategies import allreduce
from slurmdl.train.strategy_config import StrategyConfig

DIRECTORY = Path(__file__).parent
ON_DEVICES = str(DIRECTORY / "device_backend_script.py")
#: entry i is the zone of rank i
IN_ZONES = "export SLURMD_NODENAME=n$R SLURM_TOPOLOGY_ADDR=z$((R / 2)).n$R SLURM_TOPOLOGY_ADDR_PATTERN=switch.node"
STEPS, BUCKETS = 30, 5
TRAIN = ("slurmdl.train", "--steps", str(STEPS), "--model", "mlp:16", "--batch-size", "8")


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 1], [2, 3]],
                                    pytest.param([[0, 2, 1], [3]], marks=pytest.mark.nightly)])
def test_mean_and_bytes(groups: list[list[int]]) -> None:
    proc = torchrun(4, str(DIRECTORY / "device_mean_script.py"), json.dumps(groups), "cpu")
    assert proc.returncode == 0, proc.stderr
    for line in proc.stdout.splitlines():
        results = json.loads(line)
        assert results["torch.float32"]["equal"] and results["torch.bfloat16"]["equal"]
        assert results["torch.float32"]["error"] < 1e-6 and results["torch.bfloat16"]["error"] < 2e-2
        if len({len(group) for group in groups}) == 1:  # otherwise messages have another algorithm
            for level, count in results["bytes"].items():
                assert count == pytest.approx(results["bytes of messages"][level], abs=64)


@pytest.mark.parametrize("options", [
    "--strategy allreduce --comm-pattern hierarchical",
    pytest.param("--strategy allreduce --comm-pattern ring", marks=pytest.mark.nightly),
    pytest.param("--strategy local-sgd --period 8 --islands zone", marks=pytest.mark.nightly)])
def test_training_is_that_of_the_host(options: str, tmp_path: Path) -> None:
    models = []
    for name, start, slices in (("devices", (ON_DEVICES,), 4 * STEPS * BUCKETS), ("host", ("-m",), 0)):
        folder = str(tmp_path / name)
        proc = torchrun(4, *start, *TRAIN, *options.split(), "--checkpoint-dir", folder,
                        "--checkpoint-every", str(STEPS), per_rank=IN_ZONES)
        assert proc.returncode == 0, proc.stderr
        assert proc.stderr.count("a slice is averaged") == slices
        export_model(folder, None, f"{folder}.pt")
        models.append(torch.load(f"{folder}.pt"))
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("fault, words", [
    ("early", "slurmdl: train: rank 1 on n: rank 0 continues, but this one has ended after 2 steps"),
    pytest.param("nan", "slurmdl: rank 1 on n: step 1: the gradient of weight has infinite or NaN entries",
                 marks=pytest.mark.nightly)])
def test_fault_of_one_worker_ends_all_ranks(fault: str, words: str) -> None:
    proc = torchrun(2, ON_DEVICES, str(DIRECTORY / "library_programs.py"), "fault", fault,
                    environ={"SLURMD_NODENAME": "n"})
    assert proc.returncode != 0
    [message] = [line for line in proc.stderr.splitlines() if line.startswith("slurmdl: ")]
    assert message.startswith(words)


NCCL = {"cuda": "nccl"}


def choose(monkeypatch: pytest.MonkeyPatch, devices: list[tuple[str, str]], **config: Any) -> str:
    """The choice of rank 0, for ranks with these types and IDs of devices, all on one node."""
    settings = StrategyConfig(**{"strategy": "allreduce", **config})
    transport = SimpleNamespace(device_backends=NCCL, allgather=lambda own: [
        (NCCL.get(kind, ""), identity) for kind, identity in devices])
    world = SimpleNamespace(config=settings, strategy=settings.strategy, transport=transport, rank=0,
                            nodes=("n1",) * len(devices), format_rank=lambda rank: f"rank {rank} on n1")
    monkeypatch.setattr(allreduce, "_device_id", lambda device: "")
    return allreduce.choose_device_backend(world, SimpleNamespace(type=devices[0][0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("devices", "options", "backend", "warning"), [
    ([("cuda", "a"), ("cuda", "b")], {}, "nccl", ""),
    ([("cuda", "a"), ("cuda", "a")], {}, "", "rank 0 on n1 and rank 1 share a GPU, which NCCL does not support"),
    ([("cuda", "a"), ("cpu", "")], {}, "", "rank 1 on n1 has no GPU for NCCL"),
    ([("cpu", ""), ("cpu", "")], {}, "", ""),
    ([("cuda", "a"), ("cuda", "b")], {"compression": "fp16"}, "", ""),
    ([("cuda", "a"), ("cuda", "b")], {"strategy": "gossip"}, "", ""),
    ([("cuda", "a"), ("cuda", "b")], {"strategy": "gossip", "islands": "zone", "compression": "int4"}, "nccl", "")])
def test_choice_of_the_backend(devices: list[tuple[str, str]], options: dict[str, str], backend: str, warning: str,
                               monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose(monkeypatch, devices, **options) == backend
    message = capsys.readouterr().err
    assert (warning in message and message.count("\n") == 1) if warning else not message
