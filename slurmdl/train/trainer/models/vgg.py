"""Plain deep convolutional networks: many parameters for little computation.

References
----------
K. Simonyan, A. Zisserman: Very deep convolutional networks for large-scale image recognition. ICLR 2015.
arXiv:1409.1556
"""

from __future__ import annotations

from typing import Any

from slurmdl.errors import UsageError
from slurmdl.train.trainer.models.arguments import require_image_shape

#: channels of the convolutions between two halvings of the image
_VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
#: width of the hidden layers behind them, and largest height of what these see of the image
_VGG_HIDDEN, _VGG_MAX_POOL = 4096, 7


def vgg16(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """16 layers, configuration D; 138,357,544 parameters for images of 3 x 224 x 224 and 1000 classes."""
    from torch import nn

    if arguments:
        raise UsageError(f"train: --model vgg16:{arguments}: vgg16 has no arguments")
    channels, *sides = require_image_shape("vgg16", shape)
    least = 1 << len(_VGG_STAGES)
    if min(sides) < least:
        raise UsageError(f"train: --model vgg16 needs images of at least {least} x {least}; the data's have "
                         f"{sides[0]} x {sides[1]}")
    layers: list[Any] = []
    for stage in _VGG_STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    seen = [min(side // least, _VGG_MAX_POOL) for side in sides]
    layers += [nn.AdaptiveAvgPool2d(seen), nn.Flatten()]
    features = channels * seen[0] * seen[1]
    for _ in range(2):
        layers += [nn.Linear(features, _VGG_HIDDEN), nn.ReLU(), nn.Dropout()]
        features = _VGG_HIDDEN
    return nn.Sequential(*layers, nn.Linear(features, classes))
