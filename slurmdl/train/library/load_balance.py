"""Load balancing: work in proportion to the measured speed of each worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.context import RunState
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.guided_scheduling import DynamicSampler
from slurmdl.train.library.sampling import (
    BalanceRound,
    BatchSlice,
    GlobalBatches,
    LockstepSampler,
    SliceSampler,
    WorkShares,
    even_rounds,
)
from slurmdl.train.mixing.collectives import bruck_allgather
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import Strategy
from slurmdl.train.world import World

Speeds = npt.NDArray[np.float32]

#: weight of the previous average in the moving average of a speed
EMA_DECAY = 0.8
#: steps between two exchanges of speeds among synchronous workers
SPEED_EXCHANGE_EVERY = 5


class ThroughputEstimator:
    """Moving average of a worker's samples per second of computation; 0 at first, plain mean of the first steps."""

    def __init__(self) -> None:
        self.value, self._steps = 0.0, 0

    def measure(self, samples: int, seconds: float) -> None:
        if samples and seconds > 0:
            decay = min(EMA_DECAY, self._steps / (self._steps + 1))
            self.value = decay * self.value + (1 - decay) * samples / seconds
            self._steps += 1


class LoadBalancer:
    """Rounds of synchronous workers, computed alike on all.

    At the end of some rounds the workers exchange their speeds in the background; the speeds apply from the round
    after the next one, so sends never block. Shares change only after an exchange of models.

    Args:
        rounds_ahead: rounds that may be assigned before a round is over, see DataSource.prefetch.
        gather_speeds: starts to exchange speeds; `wait` waits for them.
    """

    def __init__(self, global_batches: GlobalBatches, strategy: Strategy, rounds_ahead: int,
                 gather_speeds: Callable[[float], Future[Speeds]], wait: Callable[[Future[Speeds]], Speeds]) -> None:
        self._global_batches, self._strategy = global_batches, strategy
        self._rounds_ahead, self._gather_speeds, self._wait = rounds_ahead, gather_speeds, wait
        self._shares, self._model_weights = WorkShares(global_batches.worker_count), tuple[float, ...]()
        self._round_count, self._next_step = 0, 0
        #: rounds that end with an exchange of speeds, and the exchanges started so far, without those used already
        self._publishing_rounds: deque[int] = deque()
        self._pending_speeds: deque[Future[Speeds]] = deque()

    def next_round(self, step: int, max_steps: int) -> BalanceRound:
        """The round of at most `max_steps` steps that starts at a step of the run."""
        if step < self._next_step:  # rounds were assigned and not executed
            while len(self._publishing_rounds) > len(self._pending_speeds):
                self._publishing_rounds.pop()
        self._round_count += 1
        exchange = self._strategy.next_exchange
        if not step or exchange(step - 1) == step - 1:
            self._update_shares(step)
        length = min(max_steps, exchange(step) - step + 1)
        self._next_step = step + length
        publishes_speed = self._next_step // SPEED_EXCHANGE_EVERY > step // SPEED_EXCHANGE_EVERY
        if publishes_speed:
            self._publishing_rounds.append(self._round_count)
        return BalanceRound(length, self._shares.values, self._model_weights, publishes_speed)

    def publish_speed(self, speed: float) -> None:
        """Call at the end of a round with `publishes_speed`."""
        self._pending_speeds.append(self._gather_speeds(speed))

    def _update_shares(self, step: int) -> None:
        while self._publishing_rounds and self._publishing_rounds[0] + 1 < self._round_count - self._rounds_ahead:
            self._publishing_rounds.popleft()
            speeds = self._wait(self._pending_speeds.popleft()).tolist()
            if min(speeds) > 0 and self._shares.update(speeds, step):
                sizes = self._global_batches.worker_batch_sizes(self._shares.values)
                self._model_weights = tuple(size / self._global_batches.batch_size for size in sizes)


class WorkAssignment:
    """One worker's assigned work and its measured speed.

    Attributes:
        current_slice: samples of the current step; None between steps, and for batches that no Loader made.
        model_weights: entry i is the weight of worker i's model; () if all are equal.
    """

    def __init__(self, world: World, p2p: MeteredP2P, state: RunState) -> None:
        self._world, self._p2p, self._state = world, p2p, state
        self.current_slice: BatchSlice | None = None
        self.model_weights: tuple[float, ...] = ()
        self._comm_thread: CommThread
        self._recovery: FailureRecovery | None = None
        self._throughput = ThroughputEstimator()
        self._balancer: LoadBalancer | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        self._assigned_step = 0
        self._blocked_seconds = 0.0
        #: of the batches of the current step, several if gradients are accumulated
        self._samples = 0

    def bind(self, comm_thread: CommThread, recovery: FailureRecovery) -> None:
        """Connect to a run that has a model; needed for load balancing."""
        self._comm_thread, self._recovery = comm_thread, recovery

    @property
    def global_step(self) -> int:
        """Mean number of steps of the workers; differs from the local step if workers make different numbers."""
        config = self._world.config
        return self._assigned_step if config.load_balance and config.asynchronous else self._state.step

    def make_sampler(self, global_batches: GlobalBatches, prefetch: int) -> SliceSampler:
        """Make the sampler of this worker; `prefetch` batches are fetched ahead."""
        world, config = self._world, self._world.config
        worker = world.worker_rank or 0
        if not config.load_balance or world.is_server:
            return LockstepSampler(global_batches, worker, even_rounds(world.worker_count),
                                   lambda: self.global_step, self._averaged_workers)
        if self._recovery is None or self._balancer or self._dynamic_sampler:
            raise TrainError("--load-balance: requires one run.loader() for all samples, after run.wrap()")
        comm_thread, workers, p2p = self._comm_thread, world.ranks_with_role("worker"), self._p2p
        if config.asynchronous:
            self._dynamic_sampler = DynamicSampler(p2p, comm_thread, workers, global_batches,
                                                   lambda: self._throughput.value)
            return self._dynamic_sampler
        self._balancer = LoadBalancer(
            global_batches, self._recovery.strategy, 1 + prefetch,
            lambda speed: comm_thread.submit(lambda: bruck_allgather(p2p, workers, speed)), comm_thread.wait)
        return LockstepSampler(global_batches, worker, self._balancer.next_round, lambda: self.global_step,
                               self._averaged_workers)

    def _averaged_workers(self) -> Sequence[int]:
        """The workers of this worker's island; () without islands, or before the run has a model."""
        workers = self._world.ranks_with_role("worker")
        groups = self._recovery.strategy.replica_groups if self._recovery else []
        return [workers.index(rank) for group in groups if self._p2p.rank in group for rank in group]

    def start_fetch(self) -> None:
        """Call before a batch is fetched; blocked time while fetching does not count as work."""
        self._blocked_seconds = self._comm_thread.blocked_seconds

    def end_fetch(self) -> None:
        self._blocked_seconds = self._comm_thread.blocked_seconds - self._blocked_seconds

    def begin_step(self, batch_slice: BatchSlice) -> None:
        self.current_slice, self.model_weights = batch_slice, batch_slice.model_weights
        self._samples += batch_slice.stop - batch_slice.start

    def end_step(self, seconds: float) -> int:
        """End the current step of a duration without communication; return the number of its samples."""
        batch_slice, self.current_slice = self.current_slice, None
        samples, self._samples = self._samples if batch_slice else self._state.batch_size, 0
        self._throughput.measure(samples, seconds - self._blocked_seconds)
        self._blocked_seconds = 0.0
        if batch_slice:
            self._assigned_step = batch_slice.end_step
            if self._balancer and batch_slice.publishes_speed:
                self._balancer.publish_speed(self._throughput.value)
        if self._dynamic_sampler and not self._world.transport.supports_comm_thread:
            self._dynamic_sampler.answer_requests()
        return samples

    def finish(self) -> None:
        if self._dynamic_sampler:
            self._dynamic_sampler.finish()
