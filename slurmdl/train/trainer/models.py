"""What stands behind a model's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from slurmdl.errors import UsageError

#: width, or number of layers
MAX_ARGUMENT = 1_000_000


def parse_ints(model: str, arguments: str, default: Sequence[int], expected: str) -> list[int]:
    """Positive whole numbers, separated by commas; `what` says in words which are expected."""
    if not arguments:
        return list(default)
    found = [int(word) if word.strip().isdecimal() and len(word) < 10 else 0 for word in arguments.split(",")]
    if not 1 <= min(found) <= max(found) <= MAX_ARGUMENT:
        raise UsageError(f"train: --model {model}:{arguments}: {expected} expected")
    return found


def require_image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape of (channels, height, width), or a UsageError for a model that needs images."""
    if len(shape) != 3:
        raise UsageError(f"train: --model {model} needs images of channels x height x width; "
                         f"the data's have shape {'x'.join(map(str, shape))}; mlp takes any")
    return shape[0], shape[1], shape[2]


# MERGED: A small convolutional network.

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


# MERGED: Multi-layer perceptron.

def mlp(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Linear layers with ReLU; `arguments` are the widths of the hidden ones, e.g. "256,128"; "" for none."""
    from torch import nn

    widths = parse_ints("mlp", arguments, (), "widths of hidden layers, e.g. mlp:256,128,")
    layers: list[Any] = [nn.Flatten()] if len(shape) > 1 else []
    features = math.prod(shape)
    for inputs, outputs in zip([features, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] if widths else features, classes))


# MERGED: Residual networks with batch normalisation.

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


# MERGED: A small transformer that reads an image patch by patch.

def transformer(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Encoder layers over square patches of an image, and the mean of what they make of them.

    `arguments` are the width, the number of layers, and of heads, by default 64,2,4. A patch's side is an eighth of
    the image's. There is no dropout, so that nothing is random but the first parameters.

    References
    ----------
    A. Dosovitskiy et al.: An image is worth 16x16 words. ICLR 2021. arXiv:2010.11929
    """
    import torch
    from torch import nn

    channels, height, across = require_image_shape("transformer", shape)
    found = parse_ints("transformer", arguments, (64, 2, 4), "WIDTH,LAYERS,HEADS, e.g. transformer:64,2,4,")
    if len(found) != 3 or found[0] % found[2]:
        raise UsageError(f"train: --model transformer:{arguments}: WIDTH,LAYERS,HEADS expected, and a width that the "
                         "heads divide, e.g. transformer:64,2,4")
    width, layers, heads = found
    side = max(min(height, across) // 8, 1)

    class Places(nn.Module):  # type: ignore[misc]
        """Adds what is learnt of each patch's place."""

        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(0.02 * torch.randn((height // side) * (across // side), width))

        def forward(self, patches: Any) -> Any:
            return patches.flatten(2).transpose(1, 2) + self.places

    class Mean(nn.Module):  # type: ignore[misc]
        def forward(self, patches: Any) -> Any:
            return patches.mean(1)

    # layers made one by one: those of TransformerEncoder are copies of one, with equal first parameters
    encoder = [nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                          norm_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(channels, width, side, side), Places(), *encoder, nn.LayerNorm(width), Mean(),
                         nn.Linear(width, classes))


# MERGED: Plain deep convolutional networks: many parameters for little computation.

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


# MERGED: The networks of the built-in trainer. A new one is one file here and one line in MODELS.

#: name -> builder(arguments, shape, classes): the torch module for images of a shape; `arguments` is what follows
#: the name, "" where nothing does
MODELS: dict[str, Callable[[str, tuple[int, ...], int], Any]] = {
    "mlp": mlp, "cnn": cnn, "resnet18": resnet18, "resnet50": resnet50, "vgg16": vgg16,
    "transformer": transformer}


def build_model(spec: str, shape: Sequence[int], classes: int, seed: int) -> Any:
    """The torch module that NAME:ARGUMENTS stands for; the same seed gives the same parameters on every rank.

    Parameters
    ----------
    shape : of one image: (channels, height, width), or (features,).

    Raises
    ------
    UsageError : unknown name, or arguments or a shape that the model does not know.
    """
    import torch

    name, _, arguments = spec.partition(":")
    if name not in MODELS:
        raise UsageError(f"train: --model {spec}: {name!r} is not one of {', '.join(MODELS)}")
    torch.manual_seed(seed)
    return MODELS[name](arguments, tuple(shape), classes)
