"""Optimizers of torch.optim and learning rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

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
