"""Networks: parameter counts, shapes, initial parameters, and errors."""

from __future__ import annotations

import pytest
import torch

from slurmdl.errors import UsageError
from slurmdl.train.trainer.models import MODELS, TEXT_MODELS, build_model


def parameters(module: torch.nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


@pytest.mark.parametrize(("spec", "shape", "classes", "count"), [
    ("resnet18", (3, 224, 224), 1000, 11_689_512), ("resnet50", (3, 224, 224), 1000, 25_557_032),
    ("vgg16", (3, 224, 224), 1000, 138_357_544), ("vgg16", (3, 32, 32), 10, 33_638_218),
    ("mlp:256,128", (1, 8, 8), 10, 50_826), ("mlp", (64,), 10, 650),
    ("cnn:16,32", (3, 32, 32), 10, 3 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 4 * 32 * 10 + 10)])
def test_model_parameter_count(spec: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(build_model(spec, shape, classes, 1)) == count


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 5, 7), (3, 64, 64)])
@pytest.mark.parametrize("spec", ["mlp:16", "cnn:4,8", "resnet18", "transformer:16,1,2"])
def test_model_accepts_any_image_size(spec: str, shape: tuple[int, ...]) -> None:
    module = build_model(spec, shape, 3, 1)
    scores = module(torch.randn(2, *shape))
    assert scores.shape == (2, 3)
    scores.sum().backward()
    assert all(tensor.grad is not None for tensor in module.parameters())


def test_gpt_predicts_from_earlier_tokens_only() -> None:
    module = build_model("gpt:16,2,4", (12,), 256, 1, text=True).eval()
    tokens = torch.randint(256, (3, 12))
    scores = module(tokens)
    assert scores.shape == (3, 256, 12)
    changed = tokens.clone()
    changed[:, 7] += 1
    difference = (module(changed % 256) - scores).abs().amax((0, 1))
    assert torch.all(difference[:7] == 0) and torch.all(difference[7:] > 0)
    scores.sum().backward()
    assert all(tensor.grad is not None for tensor in module.parameters())


@pytest.mark.parametrize("spec, text, fact", [
    ("mlp:8", True, "the data are texts; expected gpt, or no --data text"),
    ("gpt", False, "the data are images; expected mlp, cnn"), ("gpt:10,1,4", True, "a multiple of HEADS")])
def test_model_that_does_not_fit_the_data_is_rejected(spec: str, text: bool, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        build_model(spec, (16,), 256, 1, text)


@pytest.mark.parametrize("spec, side", [("resnet50", 8), ("vgg16", 32), ("vgg16", 70)])
def test_large_model_runs(spec: str, side: int) -> None:
    with torch.no_grad():
        assert build_model(spec, (3, side, side), 10, 1).eval()(torch.randn(1, 3, side, side)).shape == (1, 10)


@pytest.mark.parametrize("spec", ["mlp:8", "cnn:4", "resnet18", "transformer:8,2,2"])
def test_model_initial_parameters_depend_on_seed(spec: str) -> None:
    first, same_seed, other_seed = (
        torch.nn.utils.parameters_to_vector(build_model(spec, (1, 8, 8), 10, seed).parameters())
        for seed in (1, 1, 2))
    assert torch.equal(first, same_seed)
    assert not torch.equal(first, other_seed)


def test_transformer_layers_differ_initially() -> None:
    module = build_model("transformer:8,2,2", (1, 8, 8), 10, 1)
    first, second = (layer for layer in module if isinstance(layer, torch.nn.TransformerEncoderLayer))
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


@pytest.mark.parametrize("spec", ["vgg", "mlp:a", "mlp:0", "mlp:2000000", "mlp:" + 5000 * "9",
                                  "cnn:1,,2", "resnet18:3", "vgg16", "vgg16:2", "transformer:8,2",
                                  "transformer:9,2,2"])
def test_model_invalid_spec_raises(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        build_model(spec, (1, 8, 8), 10, 1)
    assert spec in str(error.value)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"mlp", *TEXT_MODELS}))
def test_image_model_rejects_flat_features(name: str) -> None:
    with pytest.raises(UsageError, match=f"--model {name}: expected images.*64"):
        build_model(name, (64,), 10, 1)
