"""What one worker is dealt of the work, and how quick it is with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slurmdl.errors import TrainError
from slurmdl.train.library.balance import LoadBalancer, ThroughputEstimator, even_rounds
from slurmdl.train.library.deal import BatchSlice, GlobalBatches, LockstepSampler, SliceSampler
from slurmdl.train.library.leases import DynamicSampler
from slurmdl.train.mixing.votes import bruck_allgather

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class WorkAssignment:
    """One worker's share.

    Attributes
    ----------
    hand : what the step that is under way was dealt; None between steps, and where a batch is none of `run.loader`.
    weights : entry i, how many models that of worker i stands for; () where all stand for as many.
    done : steps that the workers have made in the mean, where each makes as many as it can.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.current_slice: BatchSlice | None = None
        self.model_weights: tuple[float, ...] = ()
        self.global_step = 0
        self._throughput = ThroughputEstimator()
        self._balancer: LoadBalancer | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        self._blocked_seconds = 0.0

    def make_sampler(self, global_batches: GlobalBatches, prefetch: int) -> SliceSampler:
        """What deals out to this worker.

        Parameters
        ----------
        ahead : batches that are fetched before they are asked for.
        """
        run, method = self._run, self._run.world.config
        worker, by_steps = run.worker_rank or 0, method.load_balance == "steps"
        if not run.is_load_balanced or run.is_server:
            return LockstepSampler(global_batches, worker, False, even_rounds(
                run.worker_count), lambda: run.global_step)
        if not run.attached or self._balancer or self._dynamic_sampler:
            raise TrainError(f"--balance {method.load_balance}: one run.loader() deals out all samples; valid: one, after "
                             "run.wrap()")
        courier, workers, messages = run.comm_thread, run.world.ranks_with_role("worker"), run.p2p
        if method.asynchronous:
            self._dynamic_sampler = DynamicSampler(
    messages,
    courier,
    workers,
    global_batches,
    by_steps,
     lambda: self._throughput.value)
            return self._dynamic_sampler
        self._balancer = LoadBalancer(
            global_batches, by_steps, run.strategy, 1 + prefetch + (method.max_staleness or 0),
            lambda speed: courier.submit(lambda: bruck_allgather(messages, workers, speed)), courier.wait)
        return LockstepSampler(global_batches, worker, by_steps, self._balancer.next_round, lambda: run.global_step)

    def start_fetch(self) -> None:
        """A batch is asked for; waiting for the communication thread meanwhile is no work."""
        self._blocked_seconds = self._run.comm_thread.blocked_seconds

    def end_fetch(self) -> None:
        self._blocked_seconds = self._run.comm_thread.blocked_seconds - self._blocked_seconds

    def begin_step(self, batch_slice: BatchSlice) -> None:
        """This is what the step to come was dealt."""
        self.current_slice, self.model_weights = batch_slice, batch_slice.model_weights

    def strategy_steps(self, step: int) -> Iterable[int]:
        """Steps of the strategy that end with step `step` of the optimizer."""
        return self.current_slice.steps if self._balancer and self.current_slice else (step,)

    def end_step(self, seconds: float) -> int:
        """The step is over; returns its samples.

        The others hear how quick this worker is.

        Parameters
        ----------
        seconds : that it took, without communication.
        """
        run, hand, self.current_slice = self._run, self.current_slice, None
        samples = hand.stop - hand.start if hand else run.batch_size
        self._throughput.measure(samples, seconds - self._blocked_seconds)
        self._blocked_seconds = 0.0
        if hand:
            self.global_step = hand.steps.stop
            if self._balancer and hand.publishes_speed:
                self._balancer.publish_speed(self._throughput.value)
        if self._dynamic_sampler and not run.world.transport.supports_comm_thread:
            self._dynamic_sampler.answer_requests()
        return samples

    def finish(self) -> None:
        if self._dynamic_sampler:
            self._dynamic_sampler.finish()
