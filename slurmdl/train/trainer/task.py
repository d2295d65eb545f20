"""What a run of the built-in trainer trains: a network on images, or a stand-in that only takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from slurmdl.train.library.deal import Deal
from slurmdl.train.library.loader import IntArray, Source
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data import Data
from slurmdl.train.trainer.options import Options

#: share of the forward pass in the time of both
FORWARD = 1 / 3


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
        #: images that all workers together have taken, each of its own
        self._seen = 0

    def pace(self, seconds: Callable[[int], float], wait: Callable[[float], None]) -> None:
        """From now on let so much time go by in each training step with so many images, as if it were computed."""
        def forward(module: Any, images: Any, scores: Any) -> None:
            if scores.requires_grad:
                takes = seconds(len(scores))
                wait(takes * FORWARD)
                scores.register_hook(lambda slope: wait(takes * (1 - FORWARD)))

        self.module.register_forward_hook(forward)

    def steps_per_epoch(self, workers: int) -> int:
        """Steps in which each worker sees all of its images, or all workers together all."""
        own = self._data.steps_per_epoch(workers, self._batch)
        return own if self._data.skew else Deal(len(self._data.train_y), workers, self._batch, True, self._seed).steps

    def label_skew(self, workers: int) -> float:
        """How much the labels of the workers' own images differ, 0 to 1; 0 where all images are dealt out to all."""
        return self._data.label_skew(workers, self._seed) if self._data.skew else 0.0

    @property
    def source(self) -> Source | None:
        """What is dealt out to all workers; None where each has images of its own."""
        def batches(indices: Iterator[IntArray]) -> Iterator[Any]:
            return ((self._data.train_x[index], self._data.train_y[index]) for index in indices)

        return None if self._data.skew else Source(len(self._data.train_y), 0, batches)

    def batches(self, worker: int, workers: int) -> Iterator[Any]:
        """Endless batches of one worker's share, from those on that all have seen."""
        whole = workers * self._batch
        for batch in self._data.batches(worker, workers, self._batch, self._seed, self._seen // whole):
            self._seen += whole
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How far the training has come in its data; `batches` go on from there."""
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._seen = state["seen"]

    def loss(self, batch: Any) -> Any:
        """Mean cross-entropy of a batch, as a tensor."""
        import torch

        images, labels = batch
        return torch.nn.functional.cross_entropy(self.module(torch.from_numpy(images)), torch.from_numpy(labels))

    def renew(self, worker: int, workers: int) -> None:
        """Estimate the statistics of batch normalisation anew, which an average of models lacks."""
        import torch

        batches = self.batches(worker, workers)

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

    The gradients are random numbers, the same in each step, so that the model moves on. A batch is a number of
    samples.

    Parameters
    ----------
    seconds : of a step with so many samples.

    Attributes
    ----------
    module : the torch module.
    """

    LAYERS = 16
    SAMPLES = 1 << 18

    def __init__(self, size: int, seconds: Callable[[int], float], wait: Callable[[float], None], seed: int) -> None:
        import torch

        def takes() -> float:
            return seconds(self._samples)

        edges = [size * layer // self.LAYERS for layer in range(self.LAYERS + 1)]
        torch.manual_seed(seed)
        slopes = [torch.randn(end - start) for start, end in pairwise(edges)]

        class Layer(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, signal: Any, weights: Any, slope: Any) -> Any:
                context.slope = slope
                wait(takes() * FORWARD / StandIn.LAYERS)
                return signal.clone()

            @staticmethod
            def backward(context: Any, error: Any) -> Any:
                wait(takes() * (1 - FORWARD) / StandIn.LAYERS)
                return error, context.slope, None

        class Layers(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList(torch.randn_like(slope) for slope in slopes)

            def forward(self) -> Any:
                signal = torch.zeros(1)
                for weights, slope in zip(self.weights, slopes, strict=True):
                    signal = Layer.apply(signal, weights, slope)
                return signal.sum()

        self.module = Layers()
        self._samples = 0

    def steps_per_epoch(self, workers: int) -> int:
        return 1

    def label_skew(self, workers: int) -> float:
        """None has labels."""
        return 0.0

    @property
    def source(self) -> Source:
        """Nothing but how many there are."""
        return Source(self.SAMPLES, 0, lambda indices: map(len, indices))

    def batches(self, worker: int, workers: int) -> Iterator[int]:
        """Nothing is any worker's own."""
        return iter(())

    def state_dict(self) -> dict[str, int]:
        """Nothing: all its batches are the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing."""

    def loss(self, batch: int) -> Any:
        self._samples = batch
        return self.module()

    def renew(self, worker: int, workers: int) -> None:
        """Nothing: it has no statistics."""

    def score(self) -> None:
        """Nothing to tell apart."""
