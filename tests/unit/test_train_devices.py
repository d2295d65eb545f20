"""The device of the built-in trainer's model; the GPUs of these tests are only a number."""

from __future__ import annotations

import pytest
import torch

from slurmdl.errors import InvalidOptionsError, UsageError
from slurmdl.train.__main__ import main
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import choose_device


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


@pytest.mark.parametrize(("arguments", "words"), [
    (["--device", "gpu"], "'gpu'; expected auto, cpu, cuda or cuda:N"),
    (["--device", "cuda:"], "expected auto, cpu, cuda or cuda:N"),
    (["--device", "cuda", "--virtual-ranks", "2"], "--device cuda: not valid with --virtual-ranks")])
def test_invalid_devices_are_rejected(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_train_options(arguments)
