"""A small convolutional network."""

from __future__ import annotations

from typing import Any

from slurmdl.train.trainer.models.arguments import parse_ints, require_image_shape


def cnn(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """3 x 3 convolutions with ReLU, each but the first after a halving of the image; then the mean over 2 x 2 fields.

    `arguments` are the channels of the convolutions, by default 32,64,64.
    """
    from torch import nn

    channels = parse_ints("cnn", arguments, (32, 64, 64), "channels of the convolutions, e.g. cnn:32,64,")
    inputs, _, _ = require_image_shape("cnn", shape)
    layers: list[Any] = []
    for outputs in channels:
        layers += [nn.MaxPool2d(2, ceil_mode=True)] * bool(layers)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * inputs, classes))
