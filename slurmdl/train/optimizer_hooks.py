"""Hooks around each step of an optimizer, also if it steps a base optimizer of the same parameters; GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import FrameType
from typing import Any
from weakref import WeakSet

#: optimizers with hooks
_hooked = WeakSet[Any]()
#: positional arguments of an optimizer's step, itself first, and keyword arguments
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def install(optimizer: Any, before: Callable[[Any, tuple[Any, ...], dict[str, Any]], StepArguments | None],
            after: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Callable[[], None]:
    """Call `before` and `after` around each step, as PyTorch's step hooks; return a function that ends this.

    A step that calls another one, of a base class or of a base optimizer, counts once: the outer one, except with a
    closure, which computes gradients for the step of the base optimizer. A GradScaler leaves unscaling and skipping
    to `before` meanwhile (apply_grad_scaler).
    """
    complete(optimizer)
    optimizers = [optimizer, *_base_optimizers(optimizer, [optimizer])]

    def step_pre_hook(stepped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        return before(stepped, args, kwargs) if _counts(sys._getframe(1), optimizers) else None

    def step_post_hook(stepped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _counts(sys._getframe(1), optimizers):
            after(stepped, args, kwargs)

    undo = [function for each in optimizers for function in (
        each.register_step_pre_hook(step_pre_hook).remove, each.register_step_post_hook(step_post_hook).remove)]
    _change_grad_scaler()
    _hooked.update(optimizers)

    def remove() -> None:
        for function in undo:
            function()
        _hooked.difference_update(optimizers)
    return remove


def sparse_parameter_ids(optimizer: Any) -> set[int]:
    """Ids of the parameters of which an optimizer, or its base optimizers, accept sparse gradients only."""
    from torch.optim import SparseAdam

    optimizers = [optimizer, *_base_optimizers(optimizer, [optimizer])]
    return {parameter for each in optimizers if isinstance(each, SparseAdam) for parameter in _parameter_ids(each)}


def complete(optimizer: Any) -> None:
    """Add the attributes for hooks to an optimizer that does not call `super().__init__()`, e.g. Lookahead."""
    from torch.optim import Optimizer

    if hasattr(optimizer, "register_step_pre_hook") and "_optimizer_step_pre_hooks" not in vars(optimizer):
        owners = [optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))]
        defaults: Any = next((owner.defaults for owner in owners if hasattr(owner, "defaults")), {})
        Optimizer.__setstate__(optimizer, {"defaults": dict(defaults)})  # as after unpickling
        # its class calls hooks now, and may have other instances
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if not hasattr(type(optimizer), name):
                setattr(type(optimizer), name, {})


@cache
def _change_grad_scaler() -> None:
    """Make each GradScaler leave its work to the steps of optimizers with hooks.

    They declare to support it only meanwhile: Lightning does not clip gradients for optimizers that always do.
    """
    import torch

    scaler_type: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # before PyTorch 2.3
    original_step = scaler_type.step

    @wraps(original_step)
    def step(scaler: Any, optimizer: Any, *arguments: Any, **kwargs: Any) -> Any:
        supported = getattr(optimizer, "_step_supports_amp_scaling", False)
        if optimizer not in _hooked or supported:
            return original_step(scaler, optimizer, *arguments, **kwargs)
        optimizer._step_supports_amp_scaling = True
        try:
            return original_step(scaler, optimizer, *arguments, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = supported

    scaler_type.step = step


def _base_optimizers(optimizer: Any, known: list[Any]) -> list[Any]:
    """Optimizers of the same parameters that an optimizer holds, e.g. in sharpness-aware minimization."""
    from torch.optim import Optimizer

    parameters, found = _parameter_ids(optimizer), list[Any]()
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and not any(value is other for other in [*known, *found]) \
                and parameters & _parameter_ids(value):
            found += [value, *_base_optimizers(value, [*known, *found, value])]
    return found


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def _counts(frame: FrameType, optimizers: list[Any]) -> bool:
    """Whether the step of a frame counts: the outermost one without a base optimizer or closure.

    PyTorch calls the hooks around the `step` of each class of which an optimizer was created. `frame` is that of
    PyTorch's function around the step, which calls the hooks (torch/optim/optimizer.py, profile_hook_step). A depth
    counted by the hooks would be wrong after a step that raised an exception.
    """
    counting: FrameType | None = None
    current: FrameType | None = frame
    while current:
        if current.f_code is frame.f_code:
            stepped, *args = current.f_locals["args"]
            closure = current.f_locals["kwargs"].get("closure") or next(iter(args), None)
            base_counts = closure is not None and stepped is optimizers[0] and len(optimizers) > 1
            if any(stepped is optimizer for optimizer in optimizers) and not base_counts:
                counting = current
        current = current.f_back
    return counting is frame


def apply_grad_scaler(optimizer: Any, tensors: Iterable[Any]) -> bool:
    """Do what a torch.amp.GradScaler leaves to this step, if there is one; return whether to skip the update.

    It leaves unscaling and skipping to optimizers that declare to support it. So the hooks run in each step, also if
    this rank alone skips the update.

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


def stash_gradients(tensors: Iterable[Any]) -> list[Any]:
    """Remove the gradients, so that the optimizer's step changes nothing; return them."""
    hidden = []
    for tensor in tensors:
        hidden.append(tensor.grad)
        tensor.grad = None
    return hidden


def restore_gradients(tensors: Iterable[Any], hidden: list[Any]) -> None:
    """Restore hidden gradients."""
    for tensor, gradient in zip(tensors, hidden, strict=True):
        tensor.grad = gradient


def local_part(tensor: Any) -> Any:
    """This rank's part of a sharded tensor; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
