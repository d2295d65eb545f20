"""hierarchical_hook: the mean of DistributedDataParallel, with fewer bytes between islands; under torchrun."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi import torchrun

SCRIPT = str(Path(__file__).with_name("hook_script.py"))
PARAMETERS, STEPS = 5 * 300 + 300 + 300 + 1, 40


@functools.cache
def run_script(compression: str) -> list[tuple[Any, int, float]]:
    """Model, bytes between islands and last loss of each rank."""
    proc = torchrun(4, SCRIPT, compression)
    assert proc.returncode == 0, proc.stderr
    results = ast.literal_eval(proc.stdout)
    assert len({tuple(values) for values, *_ in results}) == 1, "replicas differ"
    return [(torch.tensor(values), sent, loss) for values, sent, loss in results]


def test_without_compression_gradients_are_those_of_plain_ddp() -> None:
    (values, *_), (expected, *_) = run_script("none")[0], run_script("plain")[0]
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), pytest.param(
    "int8", 0.26, marks=pytest.mark.nightly), ("int4", 0.14)])
def test_bytes_between_islands(compression: str, share: float) -> None:
    """An exchange sends one model from each of the two islands; a scale per 256 elements is little."""
    sent = sum(bytes_sent for _, bytes_sent, _ in run_script(compression))
    assert sent == pytest.approx(share * 2 * 4 * PARAMETERS * STEPS, rel=0.12)


def test_compressed_gradients_train_as_well() -> None:
    losses = {name: sum(loss for *_, loss in run_script(name)) / 4 for name in ("plain", "int4")}
    assert losses["int4"] == pytest.approx(losses["plain"], rel=0.15)


def test_unknown_compression_is_rejected() -> None:
    proc = torchrun(4, SCRIPT, "int3")
    assert "InvalidOptionsError: HierarchicalState(): compression 'int3'; expected one of none, fp16" in proc.stdout
