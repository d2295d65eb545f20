"""The networks of the built-in trainer. A new one is one file here and one line in MODELS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slurmdl.errors import UsageError
from slurmdl.train.trainer.models.cnn import cnn
from slurmdl.train.trainer.models.mlp import mlp
from slurmdl.train.trainer.models.resnet import resnet18, resnet50
from slurmdl.train.trainer.models.transformer import transformer
from slurmdl.train.trainer.models.vgg import vgg16

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
