"""Workloads of the built-in trainer: classification, or synthetic gradients with emulated computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from slurmdl.comm_layout import FORWARD_SHARE, split_offsets
from slurmdl.train.checkpointed_fields import CheckpointedFields
from slurmdl.train.library.loader import DataSource, IntArray
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data_readers import LabeledDataset
from slurmdl.train.trainer.options import Options


class Classification(CheckpointedFields):
    """Classification of images, or of the next byte of a text, with the torch module `module`, one of `models`.

    `device` is the torch.device of the module, or its name.
    """

    state_fields = ("samples_seen",)
    #: batches for the statistics of batch normalization
    BATCHNORM_BATCHES = 50

    def __init__(self, options: Options, data: LabeledDataset, device: Any = "cpu") -> None:
        self.module = models.build_model(options.model, data.shape, data.classes, options.seed, data.is_text)
        self.module.to(device)
        self._device = device
        self._data, self._batch_size, self._seed = data, options.batch_size, options.seed
        #: by all workers together, if each has its own samples; the position from which `batches` continues
        self.samples_seen = 0

    def install_compute_emulation(self, compute_seconds: Callable[[int], float],
                                  emulate_compute: Callable[[float], None]) -> None:
        """Emulate additional computation of `compute_seconds(samples)` in each training step."""
        def on_forward(module: Any, samples: Any, scores: Any) -> None:
            if scores.requires_grad:
                seconds = compute_seconds(len(scores))
                emulate_compute(seconds * FORWARD_SHARE)
                scores.register_hook(lambda gradient: emulate_compute(seconds * (1 - FORWARD_SHARE)))

        self.module.register_forward_hook(on_forward)

    def steps_per_epoch(self, worker_count: int) -> int:
        """Steps of a pass over each worker's own samples, or over all samples if they are not partitioned."""
        own_steps = self._data.steps_per_epoch(worker_count, self._batch_size)
        return own_steps if self._data.dirichlet_alpha else GlobalBatches(
            len(self._data.train_y), worker_count, self._batch_size, True, self._seed).steps_per_epoch

    @property
    def data_source(self) -> DataSource | None:
        """The samples, to be assigned to the workers; None if each worker has its own."""
        def make_batches(indices: Iterator[IntArray]) -> Iterator[Any]:
            return ((self._data.train_x[index], self._data.train_y[index]) for index in indices)

        return None if self._data.dirichlet_alpha else DataSource(len(self._data.train_y), 0, make_batches)

    def batches(self, worker_rank: int, worker_count: int) -> Iterator[Any]:
        """Yield endless batches of a worker's own samples, after those already seen."""
        global_batch_size = worker_count * self._batch_size
        for batch in self._data.batches(worker_rank, worker_count, self._batch_size,
                                        self._seed, self.samples_seen // global_batch_size):
            self.samples_seen += global_batch_size
            yield batch

    def loss(self, batch: Any) -> Any:
        """Mean cross-entropy of a batch, as a tensor."""
        import torch

        samples, labels = map(self._on_device, batch)
        return torch.nn.functional.cross_entropy(self.module(samples), labels)

    def _on_device(self, array: Any) -> Any:
        import torch

        return torch.from_numpy(array).to(self._device)

    def recompute_batchnorm(self, worker_rank: int, worker_count: int) -> None:
        """Recompute the statistics of batch normalization, which an averaged model lacks."""
        import torch

        batches = self.batches(worker_rank, worker_count)
        torch.optim.swa_utils.update_bn(
            (self._on_device(next(batches)[0]) for _ in range(self.BATCHNORM_BATCHES)), self.module)

    def evaluate(self) -> tuple[float, float]:
        """Return (mean cross-entropy, accuracy) on the test samples; of a text, per byte."""
        import torch

        chunks = (self._on_device(array).split(500) for array in (self._data.test_x, self._data.test_y))
        loss, correct = 0.0, 0
        self.module.eval()
        with torch.no_grad():
            for samples, target in zip(*chunks, strict=True):
                scores = self.module(samples)
                loss += float(torch.nn.functional.cross_entropy(scores, target, reduction="sum"))
                correct += int((scores.argmax(1) == target).sum())
        self.module.train()
        return loss / self._data.test_y.size, correct / self._data.test_y.size


class SyntheticWorkload(CheckpointedFields):
    """Equal layers of parameters with constant random gradients, ready one after the other in emulated time.

    A batch is a number of samples, and `compute_seconds` returns the seconds of a step for it.
    """

    LAYERS = 16
    NUM_SAMPLES = 1 << 18

    def __init__(self, num_parameters: int, compute_seconds: Callable[[int], float],
                 emulate_compute: Callable[[float], None], seed: int) -> None:
        import torch

        def layer_seconds(share: float) -> float:
            return compute_seconds(self._batch_size) * share / SyntheticWorkload.LAYERS

        torch.manual_seed(seed)
        gradients = [torch.randn(end - start) for start, end in pairwise(split_offsets(num_parameters, self.LAYERS))]

        class Layer(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, signal: Any, weights: Any, gradient: Any) -> Any:
                context.gradient = gradient
                emulate_compute(layer_seconds(FORWARD_SHARE))
                return signal.clone()

            @staticmethod
            def backward(context: Any, error: Any) -> Any:
                emulate_compute(layer_seconds(1 - FORWARD_SHARE))
                return error, context.gradient, None

        class Layers(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList(torch.randn_like(gradient) for gradient in gradients)

            def forward(self) -> Any:
                signal = torch.zeros(1)
                for weights, gradient in zip(self.weights, gradients, strict=True):
                    signal = Layer.apply(signal, weights, gradient)
                return signal.sum()

        self.module = Layers()
        self._batch_size = 0

    def steps_per_epoch(self, worker_count: int) -> int:
        return 1

    @property
    def data_source(self) -> DataSource:
        return DataSource(self.NUM_SAMPLES, 0, lambda indices: map(len, indices))

    def batches(self, worker_rank: int, worker_count: int) -> Iterator[int]:
        return iter(())

    def loss(self, batch: int) -> Any:
        self._batch_size = batch
        return self.module()

    def recompute_batchnorm(self, worker_rank: int, worker_count: int) -> None:
        """Do nothing: the workload has no batch normalization."""

    def evaluate(self) -> None:
        """Return None: the workload has no test images."""
