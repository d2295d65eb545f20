"""What a run of the built-in trainer trains: a network on images, or a stand-in that only takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from slurmdl.train import models
from slurmdl.train.data import Data
from slurmdl.train.options import Options


class Images:
    """A network that tells images apart.

    Attributes
    ----------
    module : the torch module.
    """

    #: batches on which the statistics of normalisation are estimated anew
    ESTIMATED = 50

    def __init__(self, options: Options, data: Data) -> None:
        self.module = models.build(options.model, data.shape, data.classes, options.seed)
        self._data, self._batch, self._seed = data, options.batch, options.seed

    def steps_per_epoch(self, workers: int) -> int:
        """Steps in which each worker sees all of its images."""
        return self._data.steps_per_epoch(workers, self._batch)

    def batches(self, worker: int, workers: int) -> Iterator[Any]:
        """Endless batches of one worker."""
        return self._data.batches(worker, workers, self._batch, self._seed)

    def loss(self, batch: Any) -> Any:
        """Mean cross-entropy of a batch, as a tensor."""
        import torch

        images, labels = batch
        return torch.nn.functional.cross_entropy(self.module(torch.from_numpy(images)), torch.from_numpy(labels))

    def renew(self, batches: Iterator[Any]) -> None:
        """Estimate the statistics of batch normalisation anew, which an average of models lacks."""
        import torch

        torch.optim.swa_utils.update_bn(
            (torch.from_numpy(next(batches)[0]) for _ in range(self.ESTIMATED)), self.module)

    def score(self) -> tuple[float, float]:
        """(mean cross-entropy, share of the images that are told rightly) on the test images."""
        import torch

        part, total, right = 500, 0.0, 0
        self.module.eval()
        with torch.no_grad():
            for start in range(0, len(self._data.test_y), part):
                scores = self.module(torch.from_numpy(self._data.test_x[start:start + part]))
                target = torch.from_numpy(self._data.test_y[start:start + part])
                total += float(torch.nn.functional.cross_entropy(scores, target, reduction="sum"))
                right += int((scores.argmax(1) == target).sum())
        self.module.train()
        return total / len(self._data.test_y), right / len(self._data.test_y)


class StandIn:
    """Parameters in equal layers whose gradients are ready one after the other while time goes by.

    A third of the time is the forward pass, two thirds the backward pass. The gradients are random numbers, the same
    in each step, so that the model moves on.

    Attributes
    ----------
    module : the torch module.
    """

    LAYERS = 16

    def __init__(self, size: int, seconds: float, wait: Callable[[float], None], seed: int) -> None:
        import torch

        edges = [size * layer // self.LAYERS for layer in range(self.LAYERS + 1)]
        torch.manual_seed(seed)
        self.module = torch.nn.Module()
        slopes = []
        for layer in range(self.LAYERS):
            weights = torch.nn.Parameter(torch.randn(edges[layer + 1] - edges[layer]))
            self.module.register_parameter(f"layer{layer}", weights)
            slopes.append(torch.randn_like(weights))

        class Layer(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, signal: Any, weights: Any, slope: Any) -> Any:
                context.slope = slope
                wait(seconds / 3 / StandIn.LAYERS)
                return signal.clone()

            @staticmethod
            def backward(context: Any, error: Any) -> Any:
                wait(2 * seconds / 3 / StandIn.LAYERS)
                return error, context.slope, None

        self._layer, self._slopes = Layer, slopes

    def steps_per_epoch(self, workers: int) -> int:
        return 1

    def batches(self, worker: int, workers: int) -> Iterator[Any]:
        return repeat(None)

    def loss(self, batch: Any) -> Any:
        import torch

        signal = torch.zeros(1)
        for weights, slope in zip(self.module.parameters(), self._slopes, strict=True):
            signal = self._layer.apply(signal, weights, slope)
        return signal.sum()

    def renew(self, batches: Iterator[Any]) -> None:
        """Nothing: it has no statistics."""

    def score(self) -> None:
        """Nothing to tell apart."""
