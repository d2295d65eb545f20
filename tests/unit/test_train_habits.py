"""Habits of PyTorch users with a wrapped model: copies of it, and files with a part of it."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from virtual_ranks import library

from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig


def file_size(content: Any) -> int:
    file = io.BytesIO()
    torch.save(content, file)
    return file.tell()


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
def test_wrapped_model_can_be_copied_and_saved(method: str) -> None:
    def program(run: Run) -> None:
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model, opt)
        for x in run.loader(torch.ones(12, 300), 3):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module, loaded):
            assert torch.equal(other(x), model(x))
            with torch.no_grad():
                other[1].bias += 1
            assert not torch.equal(other[1].bias, model[1].bias)
        assert file_size(model[1].state_dict()) < 10_000 < file_size(model.state_dict())
    library(2, StrategyConfig(method), program)


def test_error_in_an_interactive_interpreter_does_not_end_it() -> None:
    lines = "from slurmdl.train import init\nrun = init()\ntypo\nprint(run.step + 41)\n"
    result = subprocess.run([sys.executable, "-i"], input=lines, text=True, capture_output=True, check=False)
    assert "NameError" in result.stderr and result.stdout == "41\n"
