"""Multi-layer perceptron."""

from __future__ import annotations

import math
from typing import Any

from slurmdl.train.trainer.models.arguments import parse_ints


def mlp(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Linear layers with ReLU; `arguments` are the widths of the hidden ones, e.g. "256,128"; "" for none."""
    from torch import nn

    widths = parse_ints("mlp", arguments, (), "widths of hidden layers, e.g. mlp:256,128,")
    layers: list[Any] = [nn.Flatten()] if len(shape) > 1 else []
    features = math.prod(shape)
    for inputs, outputs in zip([features, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] if widths else features, classes))
