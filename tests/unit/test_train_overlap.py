"""Backward passes beside a communication thread, over MPI: exchanges overlap, `no_sync`, copies of a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from mpi import mpirun, needs_mpi
from torch import nn

pytestmark = needs_mpi
PROGRAM = str(Path(__file__).with_name("mpi_programs") / "backward_overlap.py")


def run_task(name: str, argument: Any = None) -> list[Any]:
    """Results of a task of the program on two ranks."""
    proc = mpirun(2, PROGRAM, name, json.dumps(argument))
    assert proc.returncode == 0, proc.stderr
    return [json.loads(line) for line in proc.stdout.splitlines()]


def test_gradients_are_sent_during_the_backward_pass() -> None:
    assert run_task("starts") == [[76, 60, 56, 40, 36, 20, 16, 0, 0]] * 2


def test_gradient_bucket_is_copied_when_complete() -> None:
    """Each element is copied once, during the backward pass."""
    for *to_host, to_device in run_task("copies"):
        assert sum(size for size, _ in to_host) == 80
        assert to_device == [80, 8]
        assert min(gradients for _, gradients in to_host) < 4, "of eight gradients"


def test_no_sync_accumulates_without_exchange() -> None:
    """Four passes per step, two of them in `no_sync`; the model is that of one process on all samples."""
    torch.manual_seed(3)
    x, y = torch.randn(80, 6), torch.randint(3, (80,))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    expected = torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])
    for result in run_task("no_sync", [0, 2]):
        assert torch.allclose(torch.tensor(result["parameters"]), expected, rtol=0, atol=1e-6)
        assert result["exchanges"] == 3 * 2
