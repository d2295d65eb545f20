"""Interface of the strategies, their context, and the base of those with a trigger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.plan import group_ranks
from slurmdl.train.checkpointed_fields import CheckpointedFields
from slurmdl.train.meters import LOCALITY_LEVELS
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Tag
from slurmdl.train.triggers import CommCost, DriftTrigger, Trigger

FloatArray = npt.NDArray[np.float32]
Hyperparameters = npt.NDArray[np.float64]
#: begin and end in the parameters, and by name: tensors of that length, or values for the whole slice
ShardState = tuple[int, int, Mapping[str, Any]]


def _cannot_relocate(memory: FloatArray) -> None:
    raise TrainError("parameters that cannot be moved cannot be shared")


class ShardOptimizer(Protocol):
    """An optimizer for a slice of the parameters."""

    def __call__(self, hyperparameters: Hyperparameters, /) -> None:
        """Update the slice from its gradients, with the hyperparameters of a worker's optimizer."""

    def state_bytes(self) -> npt.NDArray[np.uint8]:
        """Serialize its state, for example momentum."""

    def load_state_bytes(self, state: npt.NDArray[np.uint8]) -> None:
        """Restore a serialized state."""

    def shard_states(self) -> list[ShardState]:
        """Its state by position in the parameters, so that it can be resharded."""

    def load_shard_states(self, states: Sequence[ShardState]) -> None:
        """Restore its state from states that cover the slice."""


class DeviceCopies:
    """Copies between the host buffers of a strategy and a model on another device.

    Strategies request copies explicitly, so that only what an exchange needs is copied. This implementation is for
    models in host memory, and does nothing.
    """

    def copy_to_host(self) -> None:
        """Copy the parameters to the host, before they are read."""

    def copy_to_device(self) -> None:
        """Copy changed parameters to the device."""

    def copy_gradients_to_host(self, part: slice) -> Callable[[], None]:
        """Start to copy a slice of the gradients to the host; return a function that waits for it."""
        return lambda: None

    def copy_gradients_to_device(self) -> None:
        """Copy changed gradients to the device, before the optimizer reads them."""


@dataclass(frozen=True)
class StrategyContext:
    """Context of a strategy on this rank.

    Attributes:
        p2p: this rank's messages; during the training only ops of the communication thread use them.
        workers, servers: ranks by role, each in rank order.
        parameters, gradients: shape (D,), the replica's flat buffers; parameters are equal on all ranks at the start.
            Only the training thread writes to them, between update and next forward pass.
        sizes: elements of each tensor, in the order of the buffers.
        config: with strategy and communication pattern set.
        seed: equal on all ranks.
        nodes, zones: entry i is the node or leaf zone of rank i; zone "" if unknown.
        costs: "leafA|leafB" (names sorted) -> seconds per byte between two leaf zones, see plan.Plan.
        learning_rate: returns the optimizer's current learning rate.
        make_shard_optimizer: makes an optimizer of the user's kind for a slice of the parameters, for servers.
        hyperparameters: returns the optimizer's current hyperparameters, always the same number.
        lr_indices: indices of the learning rates among the hyperparameters.
        model_weights: returns the current weights of the workers' models; () if they are equal.
        relocate_parameters: moves the replica's parameters into other memory of shape (D,), for shared memory.
        relocate_gradients: likewise for the gradients; None if they must stay where they are.
        device_copies: between the buffers and the model.
        device_gradients: the gradients as a tensor on a GPU, if ranks average them there; `gradients` is then empty.
        device_backend: of torch.distributed, for these tensors; "" without them.
    """

    p2p: MeteredP2P
    comm_thread: CommThread
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    parameters: FloatArray
    gradients: FloatArray
    sizes: tuple[int, ...]
    config: StrategyConfig
    seed: int
    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    costs: Mapping[str, float]
    learning_rate: Callable[[], float]
    make_shard_optimizer: Callable[[slice], ShardOptimizer]
    hyperparameters: Callable[[], Hyperparameters] = field(default=lambda: np.zeros(0))
    lr_indices: tuple[int, ...] = ()
    model_weights: Callable[[], tuple[float, ...]] = tuple
    relocate_parameters: Callable[[FloatArray], None] = _cannot_relocate
    relocate_gradients: Callable[[FloatArray], None] | None = None
    device_copies: DeviceCopies = field(default=DeviceCopies())
    device_gradients: Any = None
    device_backend: str = ""

    @property
    def worker_rank(self) -> int:
        """This rank's index among the workers."""
        return self.workers.index(self.p2p.rank)

    @property
    def control_p2p(self) -> MeteredP2P:
        """Messages that `p2p.bytes_sent` does not count, since they carry no training data."""
        transport = self.p2p.transport
        return MeteredP2P(transport, (LOCALITY_LEVELS[0],) * transport.size)

    @property
    def allreduce_groups(self) -> Sequence[Sequence[int]]:
        """Groups of workers for collectives.AllreduceOp: by zone with the pattern `hierarchical`, else one.

        In rank-map order a ring enters each zone once.
        """
        return group_ranks(self.workers, self.zones) if self.config.comm_pattern == "hierarchical" else [self.workers]

    @property
    def relative_weights(self) -> tuple[float, ...]:
        """Current weights of the workers' models, with mean 1."""
        count, weights = len(self.workers), self.model_weights()
        return tuple(weight * count / sum(weights) for weight in weights) or (1.0,) * count

    def relative_weights_of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        relative = self.relative_weights
        return tuple(relative[self.workers.index(rank)] for rank in ranks)


class Strategy(CheckpointedFields):
    """A synchronization strategy on one rank. Steps are counted from 0.

    Attributes:
        updates_locally: whether the worker's own optimizer updates the parameters; otherwise servers do.
        averages_gradients: whether each step uses the mean gradient of all workers, which keeps their models equal.
        identical_at_end: whether all models are equal after `finish`; otherwise they are averaged.
        survives_rank_failure: whether the other ranks can continue after a rank failure, see `without_failed_ranks`.
        overlaps_backward: whether gradients are sent during the backward pass (`on_gradients_ready`). If so,
            `finish_gradients` is called at its end, otherwise right before the optimizer step.
        model_weight: relative weight of this rank's model in the final average.
        lockstep: whether all workers are at the same step at a checkpoint.
        requested_checkpoint: on a server, the number of the checkpoint that the workers request, or None.
        ps_locality: share of the bytes between workers and servers within nodes, and within leaf zones; None without
            servers.
        exchanges, exchanges_skipped: exchanges made, and exchanges skipped by a trigger or to avoid blocking.
        replica_groups: groups of workers whose own optimizers apply the mean of the group's gradients, so that their
            models are equal after each step; the same on all ranks.
    """

    updates_locally = True
    averages_gradients = False
    identical_at_end = False
    survives_rank_failure = False
    overlaps_backward = False
    lockstep = True
    requested_checkpoint: int | None = None
    ps_locality: tuple[float, float] | None = None
    state_fields: tuple[str, ...] = ("exchanges", "exchanges_skipped", "model_weight")

    def __init__(self, ctx: StrategyContext) -> None:
        self._ctx = ctx
        self.exchanges = self.exchanges_skipped = 0
        self.model_weight = 1.0
        self.replica_groups: Sequence[Sequence[int]] = \
            [ctx.workers] if self.averages_gradients and self.updates_locally else []

    def on_gradients_ready(self, start: int) -> bool:
        """The gradients from index `start` on are ready; the backward pass goes from the last to the first.

        Returns whether some have been sent in this step.
        """
        return False

    def finish_gradients(self, step: int, skip_update: bool = False) -> None:
        """All gradients of the step are ready, and the optimizer is about to use them.

        Args:
            skip_update: this worker ignores its gradients, which have overflowed, but still takes part in the step.
        """

    def after_optimizer_step(self, step: int) -> None:
        """The optimizer has updated the parameters in this step."""

    def next_exchange(self, step: int) -> int:
        """The first step, from `step` on, in which workers may exchange; equal on all of them."""
        return step

    def serve_step(self, step: int) -> bool:
        """Serve a step of the workers, on a server; return False when all workers have ended."""
        return False

    def drain(self, checkpoint_number: int) -> None:
        """Complete all communication in flight, so that `state_dict` is the whole state, before a checkpoint.

        Collective over the workers, between two steps; they involve the servers.
        """

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        """Resume after `step` steps from an averaged model; `states` are those of the workers, or of the first."""
        first = states[0] if states else {}
        self.exchanges, self.exchanges_skipped = first.get("exchanges", 0), first.get("exchanges_skipped", 0)

    def abort(self) -> None:
        """Abandon communication in flight and shared resources after a rank failure, without other ranks."""

    def without_failed_ranks(self, ctx: StrategyContext) -> Strategy:
        """Return the replacement after `abort`, for the surviving workers and servers of `ctx`. Collective.

        Its steps are counted from 0. Strategies that mix models require equal models. Raises TrainError if the
        strategy cannot continue without the failed ranks.
        """
        return type(self)(ctx)

    def finish(self) -> None:
        """Complete all communication after the last step."""

    def close(self) -> None:
        """Free what ranks share, when all have finished. Collective."""


class TriggeredStrategy(Strategy):
    """Exchanges in the due steps of a trigger, if the ranks decide to.

    Some steps ahead each rank evaluates its model; the ranks decide in the background, and act in the due step. So
    decisions do not block, and runs with equal seeds make the same exchanges.

    Attributes:
        cost: of this rank's exchanges.
        exchange_index: number of due steps so far; equal on all ranks.
        overlap_tag: tag of exchanges that overlap with steps; several at the same time need different ones.
    """

    state_fields: tuple[str, ...] = ("_trigger", "_due_step", "_decision", "exchange_index")

    def __init__(self, ctx: StrategyContext, cost: CommCost) -> None:
        super().__init__(ctx)
        self.cost, self.overlap_tag = cost, int(Tag.FIRST_OVERLAPPED)
        self._trigger = (DriftTrigger if ctx.config.strategy == "adaptive-gossip" else Trigger)(
            ctx.config, ctx.parameters, ctx.sizes, ctx.learning_rate, cost)
        self._due_step = self._trigger.next_due(-1)
        self._decision_future: Future[bool] | None = None
        #: result of the decision, if a checkpoint precedes the due step
        self._decision: bool | None = None
        self.exchange_index = 0

    def after_optimizer_step(self, step: int) -> None:
        trigger = self._trigger
        if not trigger.is_unconditional(self._due_step) and step == trigger.decision_step(self._due_step):
            self._ctx.device_copies.copy_to_host()
            drift_ratio = trigger.drift_ratio(self._due_step)
            self._decision_future = self._ctx.comm_thread.submit(lambda: self.decide(drift_ratio))
        if self._ctx.config.overlap and step == self._due_step - self._ctx.config.overlap:
            self._ctx.device_copies.copy_to_host()
            self.start_exchange()
        if step != self._due_step:
            return
        wanted = trigger.is_unconditional(step) or self._await_decision()
        exchanged = False
        if wanted:
            self._ctx.device_copies.copy_to_host()
            exchanged = self.exchange()
        if exchanged:
            self._ctx.device_copies.copy_to_device()
        self.exchanges += exchanged
        self.exchanges_skipped += not wanted
        self.exchange_index += 1
        trigger.observe(step, exchanged)
        self._due_step = trigger.next_due(step)
        self._decision_future = self._decision = None

    def _await_decision(self) -> bool:
        """Wait for the decision on the due step; False if it has not been started."""
        if self._decision_future is not None:
            self._decision = bool(self._ctx.comm_thread.wait(self._decision_future))
        return bool(self._decision)

    def start_exchange(self) -> None:
        """Start the current exchange, `overlap` steps before it is due."""
        raise NotImplementedError

    def exchange(self) -> bool:
        """Make or complete the current exchange; return False if this rank has no partner in it."""
        raise NotImplementedError

    def decide(self, drift_ratio: float) -> bool:
        """Decide on the current exchange; an op on all ranks that take part in it."""
        raise NotImplementedError

    def next_exchange(self, step: int) -> int:
        return self._trigger.next_due(step - 1)

    def drain(self, checkpoint_number: int) -> None:
        self._await_decision()

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        self.exchange_index, self._due_step = states[0].get("exchange_index", 0), self._trigger.next_due(step - 1)
        self._trigger.reset_reference(step - 1)

    def finish(self) -> None:
        self.model_weight = self._ctx.relative_weights[self._ctx.worker_rank]
        self._await_decision()


class SideStream:
    """A stream of a GPU; for the CPU, whose work is done at once, nothing.

    Reference: PyTorch documentation, CUDA semantics, CUDA streams.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Context for work that follows all that the current stream has queued so far, and runs beside the rest."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the work so far."""
        if self._stream is not None:
            self._cuda.current_stream(self._device).wait_stream(self._stream)

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on the host, for the work so far."""
        if self._stream is None:
            return lambda: None
        done = self._cuda.Event()
        done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait
