"""Training and checks on a GPU; `make gpu-test` runs these tests, and fails without a GPU.

SLURMDL_GPU_TEST_DEVICE=cpu runs the same programs on the CPU, which shows only that the programs are correct.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from mpi import torchrun

DEVICE = os.environ.get("SLURMDL_GPU_TEST_DEVICE", "cuda")
SCRIPT = str(Path(__file__).parent / "device_script.py")
#: variables of a strategy, and its number of ranks
STRATEGIES = {
    "allreduce": ({"STRATEGY": "allreduce"}, 2),
    "gossip": ({"STRATEGY": "gossip", "PERIOD": "3"}, 2),
    "adaptive-gossip": ({"STRATEGY": "adaptive-gossip", "COMM_BUDGET": "20%"}, 2),
    "local-sgd": ({"STRATEGY": "local-sgd", "PERIOD": "8", "COMPRESSION": "int8"}, 2),
    "ps": ({"STRATEGY": "ps", "PS": "1"}, 3),
}
#: bytes; a smaller copy is neither a model nor gradients: the check for non-finite gradients reads one number
SMALL_COPY = 1024


@pytest.fixture(autouse=True)
def device() -> None:
    import torch

    if DEVICE != "cpu" and not torch.cuda.is_available():
        if os.environ.get("SLURMDL_REQUIRE_GPU") == "1":
            pytest.fail(f"PyTorch {torch.__version__} sees no GPU")
        pytest.skip("PyTorch sees no GPU (make gpu-test)")


def run_ranks(ranks: int, *arguments: str, strategy: dict[str, str] | None = None) -> None:
    """Run Python on ranks of this machine, which exchange messages by torch.distributed."""
    variables = {f"SLURMDL_TRAIN_{name}": value for name, value in (strategy or {}).items()}
    done = torchrun(ranks, *arguments, environ={**variables, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr


def check_models_agree(one: Path, other: Path, tolerance: float) -> None:
    """Compare two models, relative to the largest parameter of each tensor."""
    import torch

    first, second = torch.load(one), torch.load(other)
    for name, tensor in first.items():
        assert (tensor - second[name]).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.parametrize("name", STRATEGIES)
def test_models_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Several ranks share one GPU. Another rounding may change a decision of the drift trigger: its bound is wide."""
    strategy, ranks = STRATEGIES[name]
    for device in (DEVICE, "cpu"):
        run_ranks(ranks, SCRIPT, device, str(tmp_path / device), strategy=strategy)
    check_models_agree(tmp_path / DEVICE, tmp_path / "cpu", 0.1 if name == "adaptive-gossip" else 1e-2)


def test_autocast_with_a_grad_scaler_trains(tmp_path: Path) -> None:
    run_ranks(2, SCRIPT, DEVICE, str(tmp_path / "amp"), "--amp", strategy={"STRATEGY": "allreduce"})
    run_ranks(2, SCRIPT, DEVICE, str(tmp_path / "fp32"), strategy={"STRATEGY": "allreduce"})
    check_models_agree(tmp_path / "amp", tmp_path / "fp32", 0.1)


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU copies nothing")
@pytest.mark.parametrize(("strategy", "copies_models"), [
    ({"STRATEGY": "local-sgd", "PERIOD": "1000"}, False), ({"STRATEGY": "gossip", "PERIOD": "1000"}, False),
    ({"STRATEGY": "allreduce"}, True)])
def test_steps_without_an_exchange_copy_nothing(strategy: dict[str, str], copies_models: bool,
                                                tmp_path: Path) -> None:
    """Copies between host and device in the profiler's trace; control: allreduce, which exchanges in each step."""
    run_ranks(2, SCRIPT, DEVICE, str(tmp_path / "model"), "--profile", str(tmp_path / "trace"), strategy=strategy)
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    copies = [event["args"].get("bytes", 0) for event in events if event.get("cat") == "gpu_memcpy"
              and ("HtoD" in event["name"] or "DtoH" in event["name"])]
    assert any(size > SMALL_COPY for size in copies) == copies_models, copies


@pytest.mark.parametrize("model", ["mlp:64", "cnn"])
def test_built_in_trainer_has_the_accuracy_of_the_cpu(model: str, tmp_path: Path) -> None:
    for device in (DEVICE, "cpu"):
        run_ranks(2, "-m", "slurmdl.train", "--device", device, "--model", model, "--steps", "100", "--summary",
                  str(tmp_path / device))
    on_device, on_cpu = (json.loads((tmp_path / device).read_text()) for device in (DEVICE, "cpu"))
    assert on_device["device"].partition(":")[0] == DEVICE and on_cpu["device"] == "cpu"
    assert abs(on_device["test_accuracy"] - on_cpu["test_accuracy"]) < 0.05


def test_mean_of_tensors_on_the_gpu() -> None:
    """By gloo, which lets ranks share a GPU, unlike NCCL; streams and collectives are the same."""
    script = Path(__file__).parents[1] / "unit" / "device_mean_script.py"
    done = torchrun(4, str(script), "[[0, 1], [2, 3]]", DEVICE)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        results = json.loads(line)
        assert results["torch.float32"]["equal"] and results["torch.float32"]["error"] < 1e-6


@pytest.mark.skipif(DEVICE == "cpu", reason="the check is one of GPUs")
def test_preflight_measures_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from slurmdl.health.node_checks import check_gpu

    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(torch.cuda.device_count()))
    found = check_gpu()
    assert found["gpus"] == found["allocated"] == len(found["products"]), found
    assert not found["errors"]
    assert all(product["rate"] > 1e11 for product in found["products"]), found
