"""Islands of DistributedDataParallel and FSDP2 ranks under torchrun: sync_islands(), and hierarchical_hook."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi import torchrun_lines
from test_train_islands import OuterMomentum, reference_models

OUTER, HOOK = ((str(Path(__file__).with_name("island_program.py")), name) for name in ("outer", "hook"))


@functools.cache
def results_of_trainings() -> dict[str, Any]:
    """Case -> results of all ranks, of one process group."""
    return dict(map(ast.literal_eval, torchrun_lines(4, *OUTER, "ddp", "fsdp", "ddp-of-all-ranks", "inner",
                                                     "compiled", "subclass", "bfloat16", "scaler")))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ddp-of-all-ranks", "inner", "compiled", "subclass"])
def test_islands_equal_those_of_one_process_each(kind: str) -> None:
    """Also the models at the end, since the last step is one with an exchange."""
    results = results_of_trainings()[kind]
    expected = reference_models("aabb", OuterMomentum(3, 0.6, 0.4))[0][-1]
    for values, _, is_sharded, exchanges, _ in results:
        torch.testing.assert_close(torch.tensor(values), expected, rtol=2e-4, atol=2e-5)
        assert (is_sharded, exchanges) == (kind == "fsdp", 4)
    assert len({tuple(values) for values, *_ in results}) == 1
    # 4 exchanges, and the model of the first island at the start: 50 parameters, or shards of them with padding
    sent = [result[1] for result in results]
    assert sum(sent) == pytest.approx(4 * 50 * (2 * 4 + 1), rel=0.05)


def test_means_below_the_precision_of_bfloat16_add_up() -> None:
    assert results_of_trainings()["bfloat16"] == [1 + 8 * 2.0 ** -7 / 2] * 4


def test_step_that_a_scaler_skips_on_one_island_counts() -> None:
    results = results_of_trainings()["scaler"]
    assert [result[3] for result in results] == 4 * [4]  # exchanges
    assert [result[4] for result in results] == [0, 0, 2, 2]
    assert len({tuple(result[0]) for result in results}) == 1


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp-overlapped", marks=pytest.mark.nightly)])
def test_checkpoint_of_torch_distributed_resumes(kind: str) -> None:
    """The same result as without interruption, though models of islands differ at the checkpoint."""
    cases = dict(map(ast.literal_eval, torchrun_lines(4, *OUTER, kind, f"{kind}-resumed")))
    for whole, resumed in zip(cases[kind], cases[f"{kind}-resumed"], strict=True):
        assert whole[0] == resumed[0] and whole[3] == resumed[3] == 4


@pytest.mark.parametrize(("kind", "message"), [
    ("bad-groups", "InvalidRunError: sync_islands(): groups of the ranks (0, 1), (0, 1, 2, 3), (2, 3); expected "),
    pytest.param("bad-state", "InvalidRunError: sync_islands(): the state has no exchanges of rank ",
                 marks=pytest.mark.nightly),
    pytest.param("drift", "InvalidOptionsError: sync_islands(): strategy adaptive-gossip; expected local-sgd or",
                 marks=pytest.mark.nightly),
    pytest.param("other-group", "InvalidRunError: sync_islands(): the model averages gradients over the ranks "
                 "[0, 2]; expected the ranks of the island [0, 1], or all ranks", marks=pytest.mark.nightly),
    pytest.param("late-ddp", "InvalidRunError: sync_islands(): a DistributedDataParallel was made of the model ",
                 marks=pytest.mark.nightly),
    pytest.param("model", "InvalidRunError: sync_islands(): ranks 0 and 2 do not exchange the same; expected ",
                 marks=pytest.mark.nightly)])
def test_what_does_not_fit_is_rejected(kind: str, message: str) -> None:
    lines = torchrun_lines(4, *OUTER, kind)
    assert len(lines) >= 1 and all(line.startswith(("InvalidRunError", "InvalidOptionsError")) for line in lines)
    assert any(line.startswith(message) for line in lines), lines


UNKNOWN = "int3"
PARAMETERS, STEPS = 5 * 300 + 300 + 300 + 1, 40


def results_of(compression: str) -> list[tuple[Any, int, float]]:
    """Model, bytes between islands and last loss of each rank."""
    nightly = ("int8",) if compression == "int8" else ()
    # an unknown compression ends the script
    lines = torchrun_lines(4, *HOOK, "plain", "none", "int4", *nightly, UNKNOWN)
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
    lines = torchrun_lines(4, *HOOK, "plain", "none", "int4", UNKNOWN)
    expected = "InvalidOptionsError: HierarchicalState(): compression 'int3'; expected one of none, fp16"
    assert [line.startswith(expected) for line in lines] == 3 * [False] + 4 * [True], lines
