"""What a strategy is given, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.stateful import Stateful
from slurmdl.train.strategy_config import StrategyConfig

FloatArray = npt.NDArray[np.float32]
Hyperparameters = npt.NDArray[np.float64]


def _cannot_relocate(memory: FloatArray) -> None:
    raise TrainError("parameters that cannot be moved cannot be shared")


class ShardOptimizer(Protocol):
    """An optimizer for a part of the parameters."""

    def __call__(self, hyperparameters: Hyperparameters, /) -> None:
        """Turn the part's gradients into new parameters, with these `numbers` of a worker's optimizer."""

    def state_bytes(self) -> npt.NDArray[np.uint8]:
        """What it remembers from step to step, as momentum."""

    def load_state_bytes(self, state: npt.NDArray[np.uint8]) -> None:
        """Remember this instead."""

    def shard_states(self) -> list[ShardState]:
        """The same, by the places in the parameters to which it belongs, so that it can be cut otherwise."""

    def load_shard_states(self, states: Sequence[ShardState]) -> None:
        """Remember what pieces say that cover the part."""


class DeviceCopies:
    """Between the buffers that a strategy sees and the model's own, where it is on another device than the CPU.

    A strategy calls these where it needs them, so that only what an exchange needs is copied. Here the buffers are
    the model's own, and nothing is to be done.
    """

    def copy_to_host(self) -> None:
        """Before parameters are read: bring them up to date with the model's."""

    def copy_to_device(self) -> None:
        """After parameters have changed: bring the model's up to date with them."""

    def copy_gradients_to_host(self, part: slice) -> Callable[[], None]:
        """Begin to bring a part of the gradients up to date; what is returned waits until they are."""
        return lambda: None

    def copy_gradients_to_device(self) -> None:
        """After gradients have changed, before the optimizer uses them."""


@dataclass(frozen=True)
class StrategyContext:
    """This rank's part of a run.

    Attributes
    ----------
    messages : of this rank; once the training runs, only the courier's errands use them.
    courier : the communication thread.
    workers, servers : ranks by role, each in rank order.
    parameters, gradients : shape (D,), the replica's flat buffers; parameters start alike on all ranks. Written to
        by the training thread only, between the update and the next forward pass.
    sizes : elements of each tensor, in the order of the buffers.
    method : how the replicas are kept together; its strategy and traffic are set.
    seed : the same on all ranks.
    nodes, zones : entry i is the node and the leaf zone of rank i, "" where the zone is not known.
    costs : "leafA|leafB" (names sorted) -> seconds per byte between two leaf zones, as plan.Plan has them.
    rate : the optimizer's learning rate now.
    updater : makes an optimizer of the user's kind for a part of the parameters. For servers.
    numbers : the numbers of the optimizer now, as learning rates and betas, always as many.
    rates : where among the numbers the learning rates stand.
    weights : gives now, entry i, how many models that of worker i stands for; () where all stand for as many.
    settle : moves the replica's parameters into other memory, of shape (D,), where they are from then on. For shared
        memory.
    copies : between the buffers and the model.
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
    device_copies: DeviceCopies = field(default=DeviceCopies())

    @property
    def worker_rank(self) -> int:
        """This rank's index among the workers."""
        return self.workers.index(self.p2p.rank)

    @property
    def relative_weights(self) -> tuple[float, ...]:
        """The weights of the workers' models now, 1 in the mean."""
        count, weights = len(self.workers), self.model_weights()
        return tuple(weight * count / sum(weights) for weight in weights) or (1.0,) * count

    def relative_weights_of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Those of some of the workers, see `relative`."""
        relative = self.relative_weights
        return tuple(relative[self.workers.index(rank)] for rank in ranks)

    @property
    def own_weight_share(self) -> float:
        """What the mean of all models takes of this worker's now."""
        return self.relative_weights[self.worker_rank] / len(self.workers)


class Strategy(Stateful):
    """One rank's part in a strategy; a new one overrides what it needs. Steps are counted from 0.

    What decides how it goes on it names in `kept`.

    Attributes
    ----------
    updates : whether the worker's own optimizer updates the parameters; else servers do.
    in_step : whether each step uses the mean of all workers' gradients, so that their models stay the same.
    alike : whether the workers' models are the same once all have finished; else their mean is taken.
    survives : whether it can go on without a rank that is lost (`without`).
    overlaps : whether gradients are sent as they come in (`ready`); then `before_update` is called at the end of the
        backward pass, else right before the optimizer's step.
    weight : of this rank's model in the average of all at the end, relative to the others'.
    meets : whether all workers make the same step at a checkpoint; else each is there with a step of its own.
    called : on a server: the number of the checkpoint to which the workers have called it, None for none.
    aggregation : share of the bytes between workers and servers within nodes, and within leaf zones; None where
        there are no servers.
    fired, skipped : exchanges made, and those left out: held back by a trigger, or so as not to wait.
    """

    updates_locally = True
    averages_gradients = False
    identical_at_end = False
    survives_rank_failure = False
    overlaps_backward = False
    lockstep = True
    requested_checkpoint: int | None = None
    ps_locality: tuple[float, float] | None = None
    state_fields: tuple[str, ...] = ("fired", "skipped", "weight")

    def __init__(self, ctx: StrategyContext) -> None:
        self._ctx = ctx
        self.exchanges = self.exchanges_skipped = 0
        self.model_weight = 1.0

    def on_gradients_ready(self, start: int) -> None:
        """The gradients from index `start` on are complete: the backward pass goes from the last to the first."""

    def before_optimizer_step(self, step: int, skip_update: bool = False) -> None:
        """All gradients of step `number` are there; the optimizer is about to use them.

        Parameters
        ----------
        skips : this worker leaves them unused, since they have overflowed; it takes part in the step all the same.
        """

    def after_optimizer_step(self, step: int) -> None:
        """The optimizer has turned the gradients of step `number` into new parameters."""

    def next_exchange(self, step: int) -> int:
        """The first step, from step `number` on, at whose end workers may exchange, alike on all of them."""
        return step

    def serve_step(self, step: int) -> bool:
        """A server's part in the workers' step `number`; False where all workers have ended."""
        return False

    def quiesce(self, checkpoint_number: int) -> None:
        """A checkpoint is made of which this is the number: end what is under way, so that `state` is all there is.

        A call of all workers, between two steps; they bring the servers along.
        """

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        """Go on after `number` steps from the mean of other workers' models, the first of which had this state."""
        self.exchanges, self.exchanges_skipped = state.get("fired", 0), state.get("skipped", 0)

    def abort(self) -> None:
        """A rank is lost: give up what is under way, and what is shared with other ranks, without their help."""

    def shrink(self, ctx: StrategyContext) -> Strategy:
        """What goes on in this one's place after `leave`, with the workers and servers of `setting`; a call of all of
        them. Its steps are counted from 0 again, and where models are mixed they are alike when it is called.

        Raises
        ------
        TrainError : it cannot go on without these ranks.
        """
        return type(self)(ctx)

    def finish(self) -> None:
        """After the last step: end what is still under way, so that nothing is lost and nobody waits."""

#: begin and end in the parameters, and by name tensors of that length, or what holds for all of it
ShardState = tuple[int, int, Mapping[str, Any]]
