"""Steps of a torch.amp.GradScaler, which leaves unscaling and skipping to optimizers that declare to support it.

So the hooks of an optimizer (optimizer_hooks.py) run in each step, also if this rank alone skips the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def apply_grad_scaler(optimizer: Any, tensors: Iterable[Any]) -> bool:
    """Do what a GradScaler leaves to this step, if there is one; return whether the update is to be skipped.

    The gradients of the tensors, or of this rank's parts of them, are divided by the scale unless they overflow, or
    the script has done it (`unscale_`).
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    overflows, scale = bool(float(found_inf)), optimizer.grad_scale
    if scale is not None and not overflows:
        import torch

        factor = scale.double().reciprocal().float()
        with torch.no_grad():
            for tensor in tensors:
                if tensor.grad is not None:
                    gradient = local_part(tensor.grad)
                    gradient.mul_(factor.to(gradient.device))
    optimizer.grad_scale = optimizer.found_inf = None
    return overflows


def hide_gradients(tensors: Iterable[Any]) -> list[Any]:
    """Remove the gradients, so that the optimizer's step changes nothing; return them."""
    hidden = []
    for tensor in tensors:
        hidden.append(tensor.grad)
        tensor.grad = None
    return hidden


def show_gradients(tensors: Iterable[Any], hidden: list[Any]) -> None:
    """Restore hidden gradients."""
    for tensor, gradient in zip(tensors, hidden, strict=True):
        tensor.grad = gradient


def local_part(tensor: Any) -> Any:
    """This rank's part of a sharded tensor; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
