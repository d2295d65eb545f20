"""Networks of the built-in trainer, optimizers and learning rate schedules by name.

A new network is one builder and one line in MODELS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from slurmdl.errors import UsageError

#: largest width or number of layers
MAX_ARGUMENT = 1_000_000
#: image height from which ResNets halve the image twice before the first block, as for ImageNet
IMAGENET_MIN_HEIGHT = 64
#: channels of VGG's convolutions between two poolings
_VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
#: width of VGG's hidden linear layers, and largest height of their input
_VGG_HIDDEN, _VGG_MAX_POOL = 4096, 7


def _parse_ints(model: str, arguments: str, default: Sequence[int], expected: str) -> list[int]:
    """Parse comma-separated positive integers; `expected` describes them."""
    if not arguments:
        return list(default)
    values = [int(word) if word.strip().isdecimal() and len(word) < 10 else 0 for word in arguments.split(",")]
    if not 1 <= min(values) <= max(values) <= MAX_ARGUMENT:
        raise UsageError(f"train: --model {model}:{arguments}: expected {expected}")
    return values


def _require_no_arguments(model: str, arguments: str) -> None:
    if arguments:
        raise UsageError(f"train: --model {model}:{arguments}: {model} takes no arguments")


def _require_image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width); UsageError for other shapes."""
    if len(shape) != 3:
        raise UsageError(f"train: --model {model}: expected images of channels x height x width, the data have shape "
                         f"{'x'.join(map(str, shape))}; mlp takes any")
    return shape[0], shape[1], shape[2]


def mlp(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Linear layers with ReLU; `arguments` are the hidden widths, e.g. "256,128", "" for none."""
    from torch import nn

    widths = _parse_ints("mlp", arguments, (), "widths of hidden layers, e.g. mlp:256,128")
    layers: list[Any] = [nn.Flatten()] if len(shape) > 1 else []
    features = math.prod(shape)
    for inputs, outputs in zip([features, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] if widths else features, classes))


def cnn(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """3 x 3 convolutions with ReLU and pooling in between, then an average pooling to 2 x 2.

    `arguments` are the channels of the convolutions, by default 32,64,64.
    """
    from torch import nn

    channels = _parse_ints("cnn", arguments, (32, 64, 64), "channels of the convolutions, e.g. cnn:32,64")
    inputs, _, _ = _require_image_shape("cnn", shape)
    layers: list[Any] = []
    for outputs in channels:
        layers += [nn.MaxPool2d(2, ceil_mode=True)] * bool(layers)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * inputs, classes))


def resnet(name: str, depths: tuple[int, ...], expansion: int, arguments: str, shape: tuple[int, ...],
           classes: int) -> Any:
    """Stages of `depths` residual blocks; outputs have `expansion` times the channels of the 3 x 3 convolutions.

    Blocks downsample in the 3 x 3 convolution, as in most libraries; in the paper (K. He et al.: Deep residual
    learning for image recognition. CVPR 2016. arXiv:1512.03385), in the first 1 x 1.
    """
    from torch import nn

    _require_no_arguments(name, arguments)
    channels, height, _ = _require_image_shape(name, shape)
    large = height >= IMAGENET_MIN_HEIGHT
    layers = [*_conv_batchnorm(channels, 64, 7 if large else 3, 2 if large else 1), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, padding=1)] * large
    inputs = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers += [_residual_block(inputs, 64 << stage, expansion, 2 if stage and not index else 1), nn.ReLU()]
            inputs = expansion * 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _conv_batchnorm(inputs: int, outputs: int, size: int, stride: int) -> list[Any]:
    """A convolution without bias and its batch normalization, initialized as in He et al. (2015)."""
    from torch import nn

    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]


def _residual_block(inputs: int, width: int, expansion: int, stride: int) -> Any:
    """The sum of two or, with an expansion, three convolutions and a shortcut, projected if the shapes differ."""
    from torch import nn

    outputs = expansion * width
    if expansion == 1:
        body = [*_conv_batchnorm(inputs, width, 3, stride), nn.ReLU(), *_conv_batchnorm(width, width, 3, 1)]
    else:
        body = [*_conv_batchnorm(inputs, width, 1, 1), nn.ReLU(), *_conv_batchnorm(width, width, 3, stride),
                nn.ReLU(), *_conv_batchnorm(width, outputs, 1, 1)]

    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*body)
            same_shape = stride == 1 and inputs == outputs
            self.shortcut = nn.Sequential(*[] if same_shape else _conv_batchnorm(inputs, outputs, 1, stride))

        def forward(self, images: Any) -> Any:
            return self.body(images) + self.shortcut(images)

    return Residual()


def vgg16(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """VGG-16, configuration D; 138,357,544 parameters for images of 3 x 224 x 224 and 1000 classes."""
    from torch import nn

    _require_no_arguments("vgg16", arguments)
    channels, *sides = _require_image_shape("vgg16", shape)
    min_side = 1 << len(_VGG_STAGES)
    if min(sides) < min_side:
        raise UsageError(f"train: --model vgg16: expected images of {min_side} x {min_side} or more, the data have "
                         f"{sides[0]} x {sides[1]}")
    layers: list[Any] = []
    for stage in _VGG_STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    pooled = [min(side // min_side, _VGG_MAX_POOL) for side in sides]
    layers += [nn.AdaptiveAvgPool2d(pooled), nn.Flatten()]
    features = channels * pooled[0] * pooled[1]
    for _ in range(2):
        layers += [nn.Linear(features, _VGG_HIDDEN), nn.ReLU(), nn.Dropout()]
        features = _VGG_HIDDEN
    return nn.Sequential(*layers, nn.Linear(features, classes))


def transformer(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Transformer encoder over square image patches, with mean pooling and without dropout.

    `arguments` are width, number of layers and number of heads, by default 64,2,4. The side of a patch is an eighth
    of the image's.

    Reference: A. Dosovitskiy et al.: An image is worth 16x16 words. ICLR 2021. arXiv:2010.11929
    """
    import torch
    from torch import nn

    channels, image_height, image_width = _require_image_shape("transformer", shape)
    width, layers, heads = _parse_transformer_arguments("transformer", arguments, (64, 2, 4))
    side = max(min(image_height, image_width) // 8, 1)

    class PositionEmbedding(nn.Module):  # type: ignore[misc]
        """Flatten the patches and add a learned embedding of their positions."""

        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(0.02 * torch.randn((image_height // side) * (image_width // side), width))

        def forward(self, patches: Any) -> Any:
            return patches.flatten(2).transpose(1, 2) + self.positions

    class MeanPool(nn.Module):  # type: ignore[misc]
        def forward(self, patches: Any) -> Any:
            return patches.mean(1)

    # one by one: nn.TransformerEncoder would copy one layer, with equal initial parameters
    encoder = [_transformer_layer(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(channels, width, side, side), PositionEmbedding(), *encoder, nn.LayerNorm(width),
                         MeanPool(), nn.Linear(width, classes))


def gpt(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Decoder-only Transformer with learned positions and layer normalization before each block, without dropout.

    `arguments` are width, number of layers and number of heads, by default 128,2,4. Input: tokens of shape (batch,
    length); output: scores of the next token, shape (batch, classes, length).

    Reference: A. Radford et al.: Language models are unsupervised multitask learners. OpenAI, 2019.
    """
    import torch
    from torch import nn

    width, layers, heads = _parse_transformer_arguments("gpt", arguments, (128, 2, 4))
    [length] = shape

    class GPT(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(classes, width)
            self.positions = nn.Parameter(0.02 * torch.randn(length, width))
            self.blocks = nn.ModuleList(_transformer_layer(width, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.scores = nn.Linear(width, classes)
            nn.init.normal_(self.tokens.weight, std=0.02)

        def forward(self, tokens: Any) -> Any:
            hidden = self.tokens(tokens) + self.positions[:tokens.shape[1]]
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=hidden.device)
            for block in self.blocks:
                hidden = block(hidden, src_mask=mask, is_causal=True)
            return self.scores(self.norm(hidden)).transpose(1, 2)

    return GPT()


def _parse_transformer_arguments(model: str, arguments: str, default: tuple[int, int, int]) -> list[int]:
    example = f"{model}:{','.join(map(str, default))}"
    values = _parse_ints(model, arguments, default, f"WIDTH,LAYERS,HEADS, e.g. {example}")
    if len(values) != 3 or values[0] % values[2]:
        raise UsageError(f"train: --model {model}:{arguments}: expected WIDTH,LAYERS,HEADS, with a multiple of HEADS "
                         f"as WIDTH, e.g. {example}")
    return values


def _transformer_layer(width: int, heads: int) -> Any:
    from torch import nn

    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                      norm_first=True)


#: models of texts; the others take images
TEXT_MODELS = ("gpt",)
#: name -> builder(arguments, shape, classes) of a torch module; `arguments` is the text after NAME:, or ""
MODELS: dict[str, Callable[[str, tuple[int, ...], int], Any]] = {
    "mlp": mlp, "cnn": cnn,
    "resnet18": partial(resnet, "resnet18", (2, 2, 2, 2), 1),
    "resnet50": partial(resnet, "resnet50", (3, 4, 6, 3), 4),
    "vgg16": vgg16, "transformer": transformer, "gpt": gpt}


def build_model(spec: str, shape: Sequence[int], classes: int, seed: int, text: bool = False) -> Any:
    """Build the torch module NAME:ARGUMENTS; the same seed gives the same parameters on every rank.

    `shape` is that of one image: (channels, height, width), or (features,); or (length,) of a `text`. Raises
    UsageError if the name is unknown, the arguments are invalid, or the model does not support the data.
    """
    import torch

    name, _, arguments = spec.partition(":")
    if name not in MODELS:
        raise UsageError(f"train: --model {spec}: {name!r} is not one of {', '.join(MODELS)}")
    if text != (name in TEXT_MODELS):
        expected = TEXT_MODELS if text else [model for model in MODELS if model not in TEXT_MODELS]
        raise UsageError(f"train: --model {spec}: the data are {'texts' if text else 'images'}; expected "
                         f"{', '.join(expected)}, or {'no ' * text}--data text")
    torch.manual_seed(seed)
    return MODELS[name](arguments, tuple(shape), classes)


OPTIMIZERS = ("sgd", "adam", "adamw")


def build_optimizer(name: str, parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> Any:
    """Build a fused torch optimizer; `momentum` is SGD's, Adam uses its default."""
    import torch

    # fused optimizers run on CPUs since PyTorch 2.4
    options = {"lr": lr, "weight_decay": weight_decay} | ({"fused": True} if torch.__version__ >= (2, 4) else {})
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=momentum, **options)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(parameters, **options)


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


#: name -> learning rate factor(progress); progress is the completed share of the steps, 0 to 1
LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0, "cosine": _cosine,
    "cosine-restarts": lambda progress: _cosine(4 * progress % 1), "step": lambda progress: 0.1 ** int(progress * 3)}


def build_lr_scheduler(optimizer: Any, name: str, steps: int, global_step: Callable[[], int] | None = None) -> Any:
    """Build a torch scheduler for `steps` steps, to be stepped after the optimizer.

    `cosine` decays the rate to 0 along half a cosine, `cosine-restarts` does so four times (I. Loshchilov, F. Hutter:
    SGDR. ICLR 2017. arXiv:1608.03983), `step` divides it by 10 after each third of the steps. `global_step` returns
    the completed steps if they differ from the optimizer's.
    """
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: LR_SCHEDULES[name]((global_step() if global_step else step) / steps))
