"""hierarchical_hook: the mean of DistributedDataParallel, with fewer bytes between islands; under torchrun."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi import torchrun_lines

SCRIPT = str(Path(__file__).with_name("hook_script.py"))
UNKNOWN = "int3"
PARAMETERS, STEPS = 5 * 300 + 300 + 300 + 1, 40


def results_of(compression: str) -> list[tuple[Any, int, float]]:
    """Model, bytes between islands and last loss of each rank."""
    nightly = ("int8",) if compression == "int8" else ()
    # an unknown compression ends the script
    lines = torchrun_lines(4, SCRIPT, "plain", "none", "int4", *nightly, UNKNOWN)
    results = dict(map(ast.literal_eval, (line for line in lines if line.startswith("("))))[compression]
    assert len({tuple(values) for values, *_ in results}) == 1, "replicas differ"
    return [(torch.tensor(values), sent, loss) for values, sent, loss in results]


def test_without_compression_gradients_are_those_of_plain_ddp() -> None:
    (values, *_), (expected, *_) = results_of("none")[0], results_of("plain")[0]
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), pytest.param(
    "int8", 0.26, marks=pytest.mark.nightly), ("int4", 0.14)])
def test_bytes_between_islands(compression: str, share: float) -> None:
    """An exchange sends one model from each of the two islands; a scale per 256 elements is little."""
    sent = sum(bytes_sent for _, bytes_sent, _ in results_of(compression))
    assert sent == pytest.approx(share * 2 * 4 * PARAMETERS * STEPS, rel=0.12)


def test_compressed_gradients_train_as_well() -> None:
    losses = {name: sum(loss for *_, loss in results_of(name)) / 4 for name in ("plain", "int4")}
    assert losses["int4"] == pytest.approx(losses["plain"], rel=0.15)


def test_unknown_compression_is_rejected() -> None:
    lines = torchrun_lines(4, SCRIPT, "plain", "none", "int4", UNKNOWN)
    expected = "InvalidOptionsError: HierarchicalState(): compression 'int3'; expected one of none, fp16"
    assert [line.startswith(expected) for line in lines] == 3 * [False] + 4 * [True], lines
