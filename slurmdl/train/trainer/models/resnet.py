"""Residual networks with batch normalisation.

References
----------
K. He, X. Zhang, S. Ren, J. Sun: Deep residual learning for image recognition. CVPR 2016. arXiv:1512.03385
"""

from __future__ import annotations

from typing import Any

from slurmdl.errors import UsageError
from slurmdl.train.trainer.models.arguments import require_image_shape

#: images from this height on are halved twice before the first block, as those of ImageNet
IMAGENET_MIN_HEIGHT = 64


def resnet18(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """18 layers: two blocks of two convolutions at each of four sizes; 11,689,512 parameters for 1000 classes."""
    return _resnet("resnet18", arguments, shape, classes, (2, 2, 2, 2), _basic_block, 1)


def resnet50(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """50 layers: 3, 4, 6 and 3 blocks of three convolutions; 25,557,032 parameters for 1000 classes.

    A block halves the image in its 3 x 3 convolution, as most libraries have it; the paper has it in the first 1 x 1.
    """
    return _resnet("resnet50", arguments, shape, classes, (3, 4, 6, 3), _bottleneck_block, 4)


def _resnet(name: str, arguments: str, shape: tuple[int, ...], classes: int, depths: tuple[int, ...],
            block: Any, expansion: int) -> Any:
    from torch import nn

    if arguments:
        raise UsageError(f"train: --model {name}:{arguments}: {name} has no arguments")
    channels, height, _ = require_image_shape(name, shape)
    large = height >= IMAGENET_MIN_HEIGHT
    layers = [*_conv_batchnorm(channels, 64, 7 if large else 3, 2 if large else 1), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, padding=1)] * large
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for number in range(depth):
            stride = 2 if stage and not number else 1
            layers += [_residual_block(block(inputs, width, stride), inputs, width * expansion, stride), nn.ReLU()]
            inputs = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _conv_batchnorm(inputs: int, outputs: int, size: int, stride: int) -> list[Any]:
    """A convolution, which needs no bias, and its normalisation; the first weights as He et al. (2015) have them."""
    from torch import nn

    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]


def _basic_block(inputs: int, width: int, stride: int) -> list[Any]:
    from torch import nn

    return [*_conv_batchnorm(inputs, width, 3, stride), nn.ReLU(), *_conv_batchnorm(width, width, 3, 1)]


def _bottleneck_block(inputs: int, width: int, stride: int) -> list[Any]:
    from torch import nn

    return [*_conv_batchnorm(inputs, width, 1, 1), nn.ReLU(), *_conv_batchnorm(width, width, 3, stride), nn.ReLU(),
            *_conv_batchnorm(width, 4 * width, 1, 1)]


def _residual_block(body: list[Any], inputs: int, outputs: int, stride: int) -> Any:
    """The sum of what the layers make of their input and of that input itself, resized where need be."""
    from torch import nn

    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*body)
            same = stride == 1 and inputs == outputs
            self.short = nn.Sequential(*[] if same else _conv_batchnorm(inputs, outputs, 1, stride))

        def forward(self, images: Any) -> Any:
            return self.body(images) + self.short(images)

    return Residual()
