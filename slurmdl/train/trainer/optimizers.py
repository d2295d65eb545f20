"""Optimizers of torch.optim by name, and how their learning rate goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

OPTIMIZERS = ("sgd", "adam", "adamw")


def build_optimizer(name: str, parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> Any:
    """A torch optimizer, whose step is one call for all tensors; `momentum` is SGD's, Adam's is 0.9."""
    import torch

    # such optimizers run on a CPU from PyTorch 2.4 on
    at_once = {"fused": True} if torch.__version__ >= (2, 4) else {}
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, **at_once)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, weight_decay=weight_decay, **at_once)


def _constant(progress: float) -> float:
    return 1.0


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _step(progress: float) -> float:
    return 0.1 ** int(progress * 3)


def _cosine_restarts(progress: float) -> float:
    return _cosine(4 * progress % 1)


#: name -> factor of the learning rate when this share of the steps is done, 0 to 1
LR_SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "cosine": _cosine, "restarts": _cosine_restarts,
                                               "step": _step}


def build_lr_scheduler(optimizer: Any, name: str, steps: int, global_step: Callable[[], int] | None = None) -> Any:
    """A torch scheduler for a run of so many steps; its `step()` is called after each step of the optimizer.

    `done` gives the steps so far, where they are other than those of this optimizer.

    `cosine` lets the rate fall to 0 along half a cosine, `restarts` does so four times, one after the other
    (I. Loshchilov, F. Hutter: SGDR. ICLR 2017. arXiv:1608.03983), `step` divides it by 10 after each third of the
    steps.
    """
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: LR_SCHEDULES[name](
        (global_step() if global_step else number) / steps))
