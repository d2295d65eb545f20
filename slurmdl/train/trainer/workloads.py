"""What a run of the built-in trainer trains: a network on images, or a stand-in that only takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from slurmdl.train.library.loader import DataSource, IntArray
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data import ImageDataset
from slurmdl.train.trainer.options import Options

#: share of the forward pass in the time of both
FORWARD_SHARE = 1 / 3


class ImageClassification:
    """A network that tells images apart.

    Attributes
    ----------
    module : the torch module.
    """

    #: batches on which the statistics of normalisation are estimated anew
    BATCHNORM_BATCHES = 50

    def __init__(self, options: Options, data: ImageDataset) -> None:
        self.module = models.build_model(options.model, data.shape, data.classes, options.seed)
        self._data, self._batch_size, self._seed = data, options.batch_size, options.seed
        #: images that all workers together have taken, each of its own
        self._samples_seen = 0

    def install_compute_emulation(
        self, compute_seconds: Callable[[int], float], emulate_compute: Callable[[float], None]) -> None:
        """From now on let so much time go by in each training step with so many images, as if it were computed."""
        def forward(module: Any, images: Any, scores: Any) -> None:
            if scores.requires_grad:
                takes = compute_seconds(len(scores))
                emulate_compute(takes * FORWARD_SHARE)
                scores.register_hook(lambda slope: emulate_compute(takes * (1 - FORWARD_SHARE)))

        self.module.register_forward_hook(forward)

    def steps_per_epoch(self, worker_count: int) -> int:
        """Steps in which each worker sees all of its images, or all workers together all."""
        own = self._data.steps_per_epoch(worker_count, self._batch_size)
        return own if self._data.dirichlet_alpha else GlobalBatches(
            len(self._data.train_y), worker_count, self._batch_size, True, self._seed).steps_per_epoch

    def label_skew(self, worker_count: int) -> float:
        """How much the labels of the workers' own images differ, 0 to 1; 0 where all images are dealt out to all."""
        return self._data.label_skew(worker_count, self._seed) if self._data.dirichlet_alpha else 0.0

    @property
    def data_source(self) -> DataSource | None:
        """What is dealt out to all workers; None where each has images of its own."""
        def batches(indices: Iterator[IntArray]) -> Iterator[Any]:
            return ((self._data.train_x[index], self._data.train_y[index]) for index in indices)

        return None if self._data.dirichlet_alpha else DataSource(len(self._data.train_y), 0, batches)

    def batches(self, worker_rank: int, worker_count: int) -> Iterator[Any]:
        """Endless batches of one worker's share, from those on that all have seen."""
        whole = worker_count * self._batch_size
        for batch in self._data.batches(worker_rank, worker_count, self._batch_size,
                                        self._seed, self._samples_seen // whole):
            self._samples_seen += whole
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How far the training has come in its data; `batches` go on from there."""
        return {"seen": self._samples_seen}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._samples_seen = state["seen"]

    def loss(self, batch: Any) -> Any:
        """Mean cross-entropy of a batch, as a tensor."""
        import torch

        images, labels = batch
        return torch.nn.functional.cross_entropy(self.module(torch.from_numpy(images)), torch.from_numpy(labels))

    def recompute_batchnorm(self, worker_rank: int, worker_count: int) -> None:
        """Estimate the statistics of batch normalisation anew, which an average of models lacks."""
        import torch

        batches = self.batches(worker_rank, worker_count)

        torch.optim.swa_utils.update_bn(
            (torch.from_numpy(next(batches)[0]) for _ in range(self.BATCHNORM_BATCHES)), self.module)

    def evaluate(self) -> tuple[float, float]:
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


class SyntheticWorkload:
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
    NUM_SAMPLES = 1 << 18

    def __init__(self, num_parameters: int, compute_seconds: Callable[[
                 int], float], emulate_compute: Callable[[float], None], seed: int) -> None:
        import torch

        def takes() -> float:
            return compute_seconds(self._batch_size)

        edges = [num_parameters * layer // self.LAYERS for layer in range(self.LAYERS + 1)]
        torch.manual_seed(seed)
        slopes = [torch.randn(end - start) for start, end in pairwise(edges)]

        class Layer(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, signal: Any, weights: Any, slope: Any) -> Any:
                context.slope = slope
                emulate_compute(takes() * FORWARD_SHARE / SyntheticWorkload.LAYERS)
                return signal.clone()

            @staticmethod
            def backward(context: Any, error: Any) -> Any:
                emulate_compute(takes() * (1 - FORWARD_SHARE) / SyntheticWorkload.LAYERS)
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
        self._batch_size = 0

    def steps_per_epoch(self, worker_count: int) -> int:
        return 1

    def label_skew(self, worker_count: int) -> float:
        """None has labels."""
        return 0.0

    @property
    def data_source(self) -> DataSource:
        """Nothing but how many there are."""
        return DataSource(self.NUM_SAMPLES, 0, lambda indices: map(len, indices))

    def batches(self, worker_rank: int, worker_count: int) -> Iterator[int]:
        """Nothing is any worker's own."""
        return iter(())

    def state_dict(self) -> dict[str, int]:
        """Nothing: all its batches are the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing."""

    def loss(self, batch: int) -> Any:
        self._batch_size = batch
        return self.module()

    def recompute_batchnorm(self, worker_rank: int, worker_count: int) -> None:
        """Nothing: it has no statistics."""

    def evaluate(self) -> None:
        """Nothing to tell apart."""
