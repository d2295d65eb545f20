"""One rank's copy of the network, its parameters and gradients laid out flat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Replica:
    """A torch module whose parameters are views of one flat buffer, and their gradients of another.

    A strategy sends and changes the buffers in place: nothing is packed, copied or unpacked.

    Attributes
    ----------
    parameters, gradients : shape (D,), float32; write to them only between two calls of `backward`.
    sizes : elements of each tensor, in the order of the buffers.
    """

    def __init__(self, module: Any) -> None:
        import torch

        self._module = module
        tensors = list(module.parameters())
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).float()
        slope = torch.zeros_like(flat)
        start = 0
        for tensor in tensors:
            end = start + tensor.numel()
            tensor.data = flat[start:end].view_as(tensor)
            tensor.grad = slope[start:end].view_as(tensor)
            start = end
        self._flat, self._slope = flat, slope
        self.sizes = tuple(tensor.numel() for tensor in tensors)
        self.parameters: FloatArray = flat.numpy()
        self.gradients: FloatArray = slope.numpy()

    def backward(self, images: FloatArray, labels: IntArray) -> float:
        """Fill `gradients` with those of the mean cross-entropy of a batch, and return that loss."""
        import torch

        self.gradients.fill(0)
        loss = torch.nn.functional.cross_entropy(self._module(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        return float(loss.detach())

    def optimizer(self, part: slice, lr: float, momentum: float) -> Callable[[], None]:
        """SGD for a part of the buffers; each call makes a step."""
        import torch

        shard = torch.nn.Parameter(self._flat[part])
        shard.grad = self._slope[part]
        step: Callable[[], None] = torch.optim.SGD([shard], lr=lr, momentum=momentum).step
        return step

    def evaluate(self, images: FloatArray, labels: IntArray) -> tuple[float, float]:
        """(mean cross-entropy, fraction of images classified rightly)."""
        import torch

        with torch.no_grad():
            scores = self._module(torch.from_numpy(images))
            target = torch.from_numpy(labels)
            loss = torch.nn.functional.cross_entropy(scores, target)
            return float(loss), float((scores.argmax(1) == target).float().mean())
