"""One rank's copy of the network, its trained parameters and their gradients laid out flat."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.strategies.strategy import DeviceCopies

FloatArray = npt.NDArray[np.float32]


class Replica(DeviceCopies):
    """A torch module whose trained parameters are views of one flat buffer, and their gradients of another.

    A strategy sends and changes the buffers in place: nothing is packed, copied or unpacked. Parameters on another
    device than the CPU have their flat buffers there; what a strategy sees is a copy in pinned memory of the host,
    which is brought up to date where a strategy asks for it, see strategies.strategy.Copies.

    Parameters
    ----------
    chosen : ids of the parameters that are trained; None for all.
    staged : whether the strategies' buffers are copies; None: only where the parameters are not on the CPU.

    Attributes
    ----------
    parameters, gradients : shape (D,), float32, on the host; write to them only between two backward passes.
    names, tensors, sizes : of each trained parameter, in the order of the buffers.
    starts : index of the first element of each parameter in the buffers.

    Raises
    ------
    TrainError : parameters that cannot be laid out flat, named.
    """

    def __init__(self, module: Any, trained_ids: Collection[int] | None = None, staged: bool | None = None) -> None:
        import torch

        named = [(name, tensor) for name, tensor in module.named_parameters()
                 if trained_ids is None or id(tensor) in trained_ids]
        _check_parameters(named)
        self.names = tuple(name for name, _ in named)
        self.tensors = tuple(tensor for _, tensor in named)
        self.sizes = tuple(tensor.numel() for tensor in self.tensors)
        self.starts = tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))
        # each keeps its memory format, as channels_last; one whose memory has gaps becomes contiguous
        self._strides = tuple(torch.empty_like(tensor, device="meta").stride() for tensor in self.tensors)
        flat = torch.empty(sum(self.sizes), dtype=torch.float32, device=self.tensors[0].device)
        slope = torch.zeros_like(flat)
        for tensor, view in zip(self.tensors, self._parameter_views(flat), strict=True):
            view.copy_(tensor.detach())
        self._bind_views(flat)
        self._flat_grad, self._grad_views = slope, self._parameter_views(slope)
        self.show_gradients()
        #: whether `parameters` are as those on the device
        self._host_is_current = False
        self._gradient_sums = slope.new_zeros(len(self.tensors))
        self._grad_accumulators: list[Any] = []
        self.staged = flat.device.type != "cpu" if staged is None else staged
        self._host_flat, self._host_grad = (_pinned_copy(flat), _pinned_copy(slope)) if self.staged else (flat, slope)
        self.parameters: FloatArray = self._host_flat.numpy()
        self.gradients: FloatArray = self._host_grad.numpy()

    def relocate_parameters(self, memory: FloatArray) -> None:
        """Move `parameters` into other memory, of shape (D,)."""
        import torch

        here = torch.from_numpy(memory)
        here.copy_(self._host_flat)
        self._host_flat, self.parameters = here, memory
        if not self.staged:
            self._bind_views(here)

    def _bind_views(self, flat: Any) -> None:
        """Let the parameters be views of this buffer."""
        self._flat = flat
        for tensor, view in zip(self.tensors, self._parameter_views(flat), strict=True):
            tensor.data = view
        self._data_pointers = tuple(tensor.data_ptr() for tensor in self.tensors)

    def _parameter_views(self, flat: Any) -> list[Any]:
        """The views of a buffer that belong to the parameters, in their shapes and memory formats."""
        return [flat[self.slice_of(index)].as_strided(tensor.shape, strides)
                for index, (tensor, strides) in enumerate(zip(self.tensors, self._strides, strict=True))]

    def mark_changed(self) -> None:
        """The parameters may have changed on the device: by the optimizer, or by the script."""
        self._host_is_current = False

    def copy_to_host(self) -> None:
        if self.staged and not self._host_is_current:
            self._copy(self._host_flat, self._flat)
            self._copy_waiter()()
            self._host_is_current = True

    def copy_to_device(self) -> None:
        if self.staged:
            self._copy(self._flat, self._host_flat)

    def copy_gradients_to_host(self, part: slice) -> Callable[[], None]:
        if not self.staged:
            return super().copy_gradients_to_host(part)
        self._copy(self._host_grad[part], self._flat_grad[part])
        return self._copy_waiter()

    def copy_gradients_to_device(self) -> None:
        if self.staged:
            self._copy(self._flat_grad, self._host_grad)

    def _copy(self, target: Any, source: Any) -> None:
        """Copy between device and host; CUDA does it in the order of the device's work, and nobody waits."""
        target.copy_(source, non_blocking=self._flat.device.type == "cuda")

    def _copy_waiter(self) -> Callable[[], None]:
        """What waits for the copies so far."""
        import torch

        if self._flat.device.type != "cuda":
            return _no_wait
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._flat.device))
        wait: Callable[[], None] = copied.synchronize
        return wait

    def register_gradient_hook(self, on_gradient: Callable[[int], None]) -> None:
        """Call `gathered(index)` whenever a backward pass has completed the gradient of parameter `index`."""
        for index, tensor in enumerate(self.tensors):
            completed = partial(self._on_gradient, index, on_gradient)
            if hasattr(tensor, "register_post_accumulate_grad_hook"):
                tensor.register_post_accumulate_grad_hook(completed)
            else:  # PyTorch before 2.1: a node of the graph adds gradients up, and lives as long as it is held
                self._grad_accumulators.append(tensor.expand_as(tensor).grad_fn.next_functions[0][0])
                self._grad_accumulators[-1].register_hook(completed)

    def _on_gradient(self, index: int, on_gradient: Callable[[int], None], *_: Any) -> None:
        self.collect_gradient(index)
        on_gradient(index)

    def collect_gradient(self, index: int) -> None:
        """Bring the gradient of one parameter into the flat buffer, if autograd or the user laid it elsewhere.

        A parameter without a gradient, as `zero_grad` leaves it and a pass that does not use it, has a gradient of 0:
        what one rank does not use another may.
        """
        tensor, view = self.tensors[index], self._grad_views[index]
        if tensor.grad is not view:
            if tensor.grad is None:
                view.zero_()
            else:
                view.copy_(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)
            tensor.grad = view

    def register_gradient_scale(self, factor: float) -> list[Any]:
        """Multiply the gradients that backward passes bring, before they add up, until the handles are removed."""
        return [tensor.register_hook(lambda gradient: gradient * factor) for tensor in self.tensors
                if tensor.requires_grad]

    def checksum(self) -> int:
        """Of the parameters on their device, at the speed of memory: the sum of their bits, as whole numbers."""
        import torch

        words, even = self._flat.view(torch.int32), self._flat.numel() // 2 * 2
        return int(words[:even].view(torch.int64).sum()) + int(words[even:].sum())

    def checksums(self) -> list[int]:
        """CRC-32 of each parameter."""
        whole = self._flat.cpu().numpy()
        return [zlib.crc32(whole[self.slice_of(index)]) for index in range(len(self.tensors))]

    @property
    def version(self) -> int:
        """Another number after each change of the parameters in place."""
        return sum(tensor._version for tensor in self.tensors)

    def slice_of(self, index: int) -> slice:
        """Where a parameter lies in the buffers."""
        return slice(self.starts[index], self.starts[index] + self.sizes[index])

    def hide_gradients(self) -> None:
        """Let the optimizer find no gradients, so that its step leaves all as it is."""
        for tensor in self.tensors:
            tensor.grad = None

    def show_gradients(self) -> None:
        """The gradients are those of the flat buffer again."""
        for tensor, view in zip(self.tensors, self._grad_views, strict=True):
            tensor.grad = view

    def relocated_parameter(self) -> str:
        """Name of a parameter that is no longer a view of the flat buffer, "" where all are."""
        for name, tensor, place in zip(self.names, self.tensors, self._data_pointers, strict=True):
            if tensor.data_ptr() != place:
                return str(name)
        return ""

    def record_gradient_sum(self, index: int) -> None:
        """Note whether the gradient of a parameter holds an infinity or no number; a GPU does it without a wait."""
        import torch

        torch.sum(self._flat_grad[self.slice_of(index)], 0, out=self._gradient_sums[index])

    def recorded_nonfinite_parameter(self) -> str:
        """Name of the first parameter whose gradient was not finite when it was looked at, "" for none."""
        return next((name for name, total in zip(self.names, self._gradient_sums.tolist(), strict=True)
                     if not math.isfinite(total)), "")

    def nonfinite_parameter(self) -> str:
        """Name of the first parameter whose gradient holds an infinity or no number now, "" for none."""
        if math.isfinite(float(self._flat_grad.sum())):
            return ""
        # some element is not finite, or their sum is beyond float32
        return next((name for index, name in enumerate(self.names)
                     if not bool(self._flat_grad[self.slice_of(index)].isfinite().all())), "")

    def unscale_gradients(self, scale: Any) -> None:
        """Divide the gradients by a scale, as torch.amp.GradScaler does."""
        import torch

        factor = scale.double().reciprocal().float()
        with torch.no_grad():
            for tensor in self.tensors:
                if tensor.grad is not None:
                    tensor.grad.mul_(factor.to(tensor.grad.device))


def _no_wait() -> None:
    """Nothing is to be waited for."""


def _check_parameters(named: list[tuple[str, Any]]) -> None:
    import torch

    if not named:
        raise TrainError("the optimizer trains no parameter of the model; give it model.parameters()")
    devices = {tensor.device for _, tensor in named}
    if len(devices) > 1:
        raise TrainError(f"the parameters are on {', '.join(sorted(map(str, devices)))}; valid: one device per rank")
    owners: dict[int, str] = {}
    for name, tensor in named:
        if tensor.dtype != torch.float32:
            raise TrainError(f"parameter {name} is {str(tensor.dtype).removeprefix('torch.')}; valid: float32 "
                             "(torch.autocast computes with less where that is wanted)")
        other = owners.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if other != name:
            raise TrainError(f"parameters {other} and {name} share their memory; to tie them, use one "
                             "torch.nn.Parameter in both places")


def _pinned_copy(tensor: Any) -> Any:
    """A copy on the host, in memory from which a GPU copies without a detour."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda").copy_(tensor)
