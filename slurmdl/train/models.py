"""The networks of the built-in trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmdl.errors import UsageError


def mlp(arguments: str, features: int, classes: int) -> Any:
    """Multi-layer perceptron with ReLU; `arguments` are the widths of its hidden layers, e.g. "256,128"."""
    from torch import nn

    try:
        widths = [int(width) for width in arguments.split(",") if width]
    except ValueError:
        widths = [0]
    if any(width < 1 for width in widths):
        raise UsageError(f"train: --model mlp:{arguments}: widths of hidden layers expected, e.g. mlp:256,128")
    layers: list[Any] = []
    for inputs, outputs in zip([features, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] if widths else features, classes))


#: name -> builder(arguments, features, classes)
MODELS: dict[str, Callable[[str, int, int], Any]] = {"mlp": mlp}


def build(spec: str, features: int, classes: int, seed: int) -> Any:
    """The torch module that NAME:ARGUMENTS stands for; the same seed gives the same parameters on every rank.

    Raises
    ------
    UsageError : unknown name, or arguments that the model does not know.
    """
    import torch

    name, _, arguments = spec.partition(":")
    if name not in MODELS:
        raise UsageError(f"train: --model {spec}: {name!r} is not one of {', '.join(MODELS)}")
    torch.manual_seed(seed)
    return MODELS[name](arguments, features, classes)
