"""Replica of the model with flat buffers of trained parameters and their gradients."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train import optimizer_hooks
from slurmdl.train.strategies.strategy import DeviceCopies, SideStream

FloatArray = npt.NDArray[np.float32]


class Replica(DeviceCopies):
    """A torch module whose trained parameters are views of one flat buffer.

    If a strategy sends gradients, they are views of another one. Strategies send and change the buffers in place,
    without packing. Parameters on another device, or in bfloat16, have flat buffers of their own; strategies then see
    a float32 copy in pinned host memory, updated on request (strategy.DeviceCopies). What bfloat16 parameters lose of
    it by rounding is added when they are read again: exchanges change models by less than their precision.

    Args:
        trained_ids: ids of the trained parameters; None for all.
        staged: whether the strategies' buffers are copies; None: only if the parameters are on another device, or not
            in float32.
        sends_gradients: whether the strategy sends gradients. Otherwise they remain where PyTorch stores them.

    Attributes:
        parameters: shape (D,), float32, on the host; write to them only between backward passes.
        rounding: shape (D,), float32, on the host: what the copy has beyond the bfloat16 parameters; None if nothing.
        names, tensors, sizes, starts: of each trained parameter, in buffer order; `starts` are buffer indices.
    """

    def __init__(self, module: Any, trained_ids: Collection[int] | None = None, staged: bool | None = None,
                 sends_gradients: bool = True) -> None:
        import torch

        named = [(name, tensor) for name, tensor in module.named_parameters()
                 if trained_ids is None or id(tensor) in trained_ids]
        _check_parameters(named)
        self.names = tuple(name for name, _ in named)
        self.tensors = tuple(tensor for _, tensor in named)
        self.trained_ids = {id(tensor) for tensor in self.tensors}
        self.sizes = tuple(tensor.numel() for tensor in self.tensors)
        self.starts = tuple(accumulate(self.sizes, initial=0))[:-1]
        # tensors keep their memory format, e.g. channels_last; tensors with gaps become contiguous
        self._strides = tuple(torch.empty_like(tensor, device="meta").stride() for tensor in self.tensors)
        flat = torch.empty(sum(self.sizes), dtype=self.tensors[0].dtype, device=self.tensors[0].device)
        for tensor, view in zip(self.tensors, self._parameter_views(flat), strict=True):
            view.copy_(tensor.detach())
        self._bind_views(flat)
        self.sends_gradients = sends_gradients
        self._bind_gradient_views(torch.zeros_like(flat if sends_gradients else flat[:0]))
        self._hidden_gradients: list[Any] = []
        self._host_is_current = False
        self._gradient_sums = flat.new_zeros(len(self.tensors))
        self._grad_accumulators: list[Any] = []
        self.staged = flat.device.type != "cpu" or flat.dtype != torch.float32 if staged is None else staged
        self.rounding: Any = None
        self._copy_stream = SideStream(flat.device)
        self._host_flat = _pinned_float32_copy(flat) if self.staged else flat
        self._host_grad = None if self.staged else self._flat_grad
        self.parameters: FloatArray = self._host_flat.numpy()

    def relocate_parameters(self, memory: FloatArray) -> None:
        """Move `parameters` into the given memory, shape (D,)."""
        import torch

        flat = torch.from_numpy(memory)
        flat.copy_(self._host_flat)
        self._host_flat, self.parameters = flat, memory
        if not self.staged:
            self._bind_views(flat)

    @property
    def gradients(self) -> FloatArray:
        """The gradients, likewise; shape (0,) without `sends_gradients`. A copy is allocated when first needed."""
        gradients: FloatArray = self._host_gradients().numpy()
        return gradients

    def _host_gradients(self) -> Any:
        if self._host_grad is None:
            self._host_grad = _pinned_float32_copy(self._flat_grad)
        return self._host_grad

    @property
    def device_gradients(self) -> Any:
        """The gradients as a tensor on their device, shape (D,); shape (0,) without `sends_gradients`."""
        return self._flat_grad

    @property
    def on_gpu(self) -> bool:
        return bool(self._flat.device.type == "cuda")

    def relocate_gradients(self, memory: FloatArray) -> None:
        """Move `gradients` into the given memory, shape (D,)."""
        import torch

        flat = torch.from_numpy(memory)
        flat.copy_(self._flat_grad if self._host_grad is None else self._host_grad)
        self._host_grad = flat
        if not self.staged:
            elsewhere = [(tensor, tensor.grad) for tensor, view in zip(self.tensors, self._grad_views, strict=True)
                         if tensor.grad is not view]
            self._bind_gradient_views(flat)
            for tensor, gradient in elsewhere:
                tensor.grad = gradient

    def _bind_gradient_views(self, flat: Any) -> None:
        """Make the gradients views of a buffer, if the strategy sends them."""
        self._flat_grad = flat
        self._grad_views = self._parameter_views(flat) if self.sends_gradients else []
        for tensor, view in zip(self.tensors, self._grad_views, strict=False):
            tensor.grad = view

    def _bind_views(self, flat: Any) -> None:
        """Make the parameters views of a buffer."""
        self._flat = flat
        for tensor, view in zip(self.tensors, self._parameter_views(flat), strict=True):
            tensor.data = view
        self._data_pointers = tuple(tensor.data_ptr() for tensor in self.tensors)

    def _parameter_views(self, flat: Any) -> list[Any]:
        """Views of a buffer with the parameters' shapes and memory formats.

        Each has a storage of its own in the memory of the buffer: torch.save writes whole storages.
        """
        import torch

        storage = (flat.untyped_storage if hasattr(flat, "untyped_storage") else flat.storage().untyped)()
        first, item = flat.storage_offset(), flat.element_size()
        empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return [empty.new_empty(0).set_(storage[(first + start) * item:(first + start + size) * item], 0,
                                        tensor.shape, strides)
                for tensor, start, size, strides in zip(
                    self.tensors, self.starts, self.sizes, self._strides, strict=True)]

    def mark_changed(self) -> None:
        """Note that the parameters may have changed on the device, or got other memory (`parameter.data = ...`)."""
        self._host_is_current = False
        if self.relocated_parameter():
            self._restore_views()

    def _restore_views(self) -> None:
        """Make assigned parameters views again, with the assigned values, as in sharpness-aware minimization.

        Not if a conversion of the module has changed the gradients, too, which may have been sent already.
        """
        if any(view.data_ptr() != self._flat_grad.data_ptr() + start * self._flat_grad.element_size()
               for view, start in zip(self._grad_views, self.starts, strict=False)):
            return
        for tensor, view, pointer in zip(self.tensors, self._parameter_views(self._flat), self._data_pointers,
                                         strict=True):
            if tensor.data_ptr() != pointer and (tensor.shape, tensor.dtype, tensor.device) == (
                    view.shape, view.dtype, view.device):
                view.copy_(tensor.detach())
                tensor.data = view

    def copy_to_host(self) -> None:
        if self.staged and not self._host_is_current:
            self._copy(self._host_flat, self._flat)
            self.wait_for_device()
            if self.rounding is not None:
                self._host_flat += self.rounding
            self._host_is_current = True

    def copy_to_device(self) -> None:
        if self.staged:
            self._copy(self._flat, self._host_flat)
            if self._flat.dtype != self._host_flat.dtype:
                rounding = self._host_flat - self._host_flat.to(self._flat.dtype)
                self.rounding = rounding if bool(rounding.any()) else None

    def wait_for_device(self) -> None:
        """Wait until a GPU has done the work that this thread has queued so far."""
        if self.on_gpu:
            import torch

            torch.cuda.current_stream(self._flat.device).synchronize()

    def copy_gradients_to_host(self, part: slice) -> Callable[[], None]:
        if not self.staged:
            return lambda: None
        with self._copy_stream.use():  # the backward pass continues
            self._copy(self._host_gradients()[part], self._flat_grad[part])
        return self._copy_stream.waiter()

    def copy_gradients_to_device(self) -> None:
        if self.staged:
            self._copy(self._flat_grad, self._host_gradients())

    def _copy(self, target: Any, source: Any) -> None:
        """Copy between device and host; asynchronous, in stream order, on CUDA."""
        target.copy_(source, non_blocking=self.on_gpu)

    def register_gradient_hook(self, on_gradient: Callable[[int], None]) -> list[Any]:
        """Call `on_gradient(index)` whenever a backward pass has completed the gradient of parameter `index`.

        Until the returned handles are removed.
        """
        handles = []
        for index, tensor in enumerate(self.tensors):
            completed = partial(self._on_gradient, index, on_gradient)
            if hasattr(tensor, "register_post_accumulate_grad_hook"):
                handles.append(tensor.register_post_accumulate_grad_hook(completed))
            else:  # PyTorch before 2.1: hook the AccumulateGrad node, which must be kept alive
                self._grad_accumulators.append(tensor.expand_as(tensor).grad_fn.next_functions[0][0])
                handles.append(self._grad_accumulators[-1].register_hook(completed))
        return handles

    def _on_gradient(self, index: int, on_gradient: Callable[[int], None], *_: Any) -> None:
        self.collect_gradient(index)
        on_gradient(index)

    def collect_gradient(self, index: int) -> None:
        """Copy the gradient of one parameter into the flat buffer if it is elsewhere; a missing gradient is 0."""
        if not self.sends_gradients:
            return
        tensor, view = self.tensors[index], self._grad_views[index]
        if tensor.grad is view:
            return
        if tensor.grad is None:
            view.zero_()
        else:
            view.copy_(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)
        tensor.grad = view

    def register_gradient_scale(self, factor: float) -> list[Any]:
        """Scale the gradients of backward passes before accumulation, until the returned handles are removed."""
        return [tensor.register_hook(lambda gradient: gradient * factor) for tensor in self.tensors
                if tensor.requires_grad]

    def checksum(self) -> int:
        """Checksum of the parameters, computed on their device: the sum of their bits as integers."""
        import torch

        if self._flat.element_size() == 2:
            return int(self._flat.view(torch.int16).sum(dtype=torch.int64))
        words, even = self._flat.view(torch.int32), self._flat.numel() // 2 * 2
        return int(words[:even].view(torch.int64).sum()) + int(words[even:].sum())

    def checksums(self) -> list[int]:
        """CRC-32 of each parameter."""
        import torch

        whole = self._flat.cpu()
        parts = [whole[self.slice_of(index)].view(torch.uint8) for index in range(len(self.tensors))]
        return [zlib.crc32(part.numpy()) for part in parts]

    @property
    def version(self) -> int:
        """Counter that grows with each in-place change of the parameters."""
        return sum(tensor._version for tensor in self.tensors)

    def slice_of(self, index: int) -> slice:
        """Slice of a parameter in the buffers."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def drop_gradients(self) -> None:
        """Set the flat gradients to 0."""
        self._flat_grad.zero_()
        if self._host_grad is not None:
            self._host_grad.zero_()

    def stash_gradients(self) -> None:
        """Remove the gradients, so that the optimizer's step changes nothing."""
        self._hidden_gradients = optimizer_hooks.stash_gradients(self.tensors)

    def restore_gradients(self) -> None:
        """Restore the gradients."""
        optimizer_hooks.restore_gradients(self.tensors, self._hidden_gradients)
        self._hidden_gradients = []

    def make_gradients_sparse(self, parameter_ids: Collection[int]) -> None:
        """Make the gradients of these parameters sparse for a step: the rows that are not 0 on all ranks."""
        for tensor, view in zip(self.tensors, self._grad_views, strict=False):
            if id(tensor) in parameter_ids and tensor.grad is view:
                tensor.grad = view.to_sparse(1)

    def make_gradients_dense(self, parameter_ids: Collection[int]) -> None:
        """Undo `make_gradients_sparse`."""
        for tensor, view in zip(self.tensors, self._grad_views, strict=False):
            if id(tensor) in parameter_ids and tensor.grad is not None:
                tensor.grad = view

    def relocated_parameter(self) -> str:
        """Name of a parameter that is no longer a view of the flat buffer, or ""."""
        return next((str(name) for name, tensor, pointer in zip(
            self.names, self.tensors, self._data_pointers, strict=True) if tensor.data_ptr() != pointer), "")

    def record_gradient_sum(self, index: int) -> None:
        """Record the sum of a gradient, to detect non-finite entries later without synchronizing a GPU now."""
        import torch

        torch.sum(self._flat_grad[self.slice_of(index)], 0, out=self._gradient_sums[index])

    def recorded_nonfinite_parameter(self) -> str:
        """Name of the first parameter with a non-finite recorded gradient sum, or ""."""
        return next((name for name, total in zip(self.names, self._gradient_sums.tolist(), strict=True)
                     if not math.isfinite(total)), "")

    def nonfinite_parameter(self) -> str:
        """Name of the first parameter with a non-finite gradient, or ""."""
        if math.isfinite(self._gradient_sum()):
            return ""
        # an element is not finite, or the sum overflows float32
        return next((name for name, tensor in zip(self.names, self.tensors, strict=True)
                     if tensor.grad is not None and not bool(_dense_values(tensor.grad).isfinite().all())), "")

    def _gradient_sum(self) -> float:
        """Sum of all entries of all gradients."""
        if self.sends_gradients:
            return float(self._flat_grad.sum())
        sums = [_dense_values(tensor.grad).sum() for tensor in self.tensors if tensor.grad is not None]
        if self.on_gpu and sums:  # synchronize once
            import torch

            return float(torch.stack(sums).sum())
        return sum(map(float, sums), 0.0)


def _dense_values(gradient: Any) -> Any:
    """The values of a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _check_parameters(named: list[tuple[str, Any]]) -> None:
    import torch

    if not named:
        raise TrainError("the optimizer trains no parameter of the model; give it model.parameters()")
    devices = {tensor.device for _, tensor in named}
    if len(devices) > 1:
        raise TrainError(f"the parameters are on {', '.join(sorted(map(str, devices)))}; expected one device per "
                         "rank")
    owners: dict[int, str] = {}
    for name, tensor in named:
        if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.dtype != named[0][1].dtype:
            raise TrainError(f"parameter {name} is {str(tensor.dtype).removeprefix('torch.')}; expected float32 or "
                             "bfloat16, the same for all trained parameters (or float32, and torch.autocast)")
        owner = owners.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if owner != name:
            raise TrainError(f"parameters {owner} and {name} share their memory; to tie them, use one "
                             "torch.nn.Parameter in both places")


def _pinned_float32_copy(tensor: Any) -> Any:
    """A copy on the host, in pinned memory for a GPU."""
    import torch

    return torch.empty(tensor.shape, dtype=torch.float32, pin_memory=tensor.device.type == "cuda").copy_(tensor)
