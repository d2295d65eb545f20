"""Boundary between two steps, when a batch is requested: checkpoints, restored positions and time accounting."""

from __future__ import annotations

from slurmdl.errors import Preempted
from slurmdl.train.library import checkpoint_coordinator, shutdown
from slurmdl.train.library.checkpointer import Checkpointer
from slurmdl.train.library.context import RunContext, RunState
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.load_balance import WorkAssignment
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.sampling import BatchSlice
from slurmdl.train.library.slow_rank_monitor import SlowRankMonitor
from slurmdl.train.library.step_hooks import StepHooks


class BatchBoundary:
    """Callbacks of the loaders. Before `bind`, i.e. without a model, only the work assignment is updated."""

    def __init__(self, state: RunState, work_assignment: WorkAssignment) -> None:
        self._state, self._work_assignment = state, work_assignment
        self._hooks: StepHooks | None = None
        self._checkpointer: Checkpointer | None = None
        self._ctx: RunContext
        self._recovery: FailureRecovery
        self._replica_check: ReplicaCheck
        self._slow_rank_monitor: SlowRankMonitor

    def bind(self, ctx: RunContext, recovery: FailureRecovery, hooks: StepHooks, replica_check: ReplicaCheck,
             slow_rank_monitor: SlowRankMonitor, checkpointer: Checkpointer | None) -> None:
        self._ctx, self._recovery, self._hooks = ctx, recovery, hooks
        self._replica_check, self._slow_rank_monitor = replica_check, slow_rank_monitor
        self._checkpointer = checkpointer

    @property
    def _active_hooks(self) -> StepHooks | None:
        return None if self._state.finished else self._hooks

    def on_fetch(self) -> None:
        """A batch is requested."""
        if self._active_hooks:
            self.checkpoint_if_due()
            self._active_hooks.timer.enter("data")
            self._work_assignment.start_fetch()

    def checkpoint_if_due(self, last: bool = False) -> None:
        """Write a checkpoint between two steps if due; `last` after the last step."""
        if not self._checkpointer or not self._hooks or self._ctx.world.is_server:
            return
        start, self._state.last_checkpoint_check = self._ctx.world.transport.now(), self._state.step
        with self._recovery.recovering(self._state.step):
            due = self._checkpointer.due_checkpoint(last)
            if due:
                stops = self._checkpointer.save(*due)
                self._hooks.timer.add_checkpoint(start)
                if stops:
                    self._stop(self._checkpointer, due[0])

    def serve_checkpoint(self, number: int) -> None:
        """Write a checkpoint that the workers have requested from this server."""
        if self._checkpointer and self._checkpointer.save(number):
            self._stop(self._checkpointer, number)

    def _stop(self, checkpointer: Checkpointer, number: int) -> None:
        """End all ranks after a checkpoint. Collective.

        Returns only if the stop was to leave slow nodes, and the job cannot be requeued without them.
        """
        cause = f"train: stopped on request: checkpoint of step {number} in {checkpointer.path}"
        left_nodes = self._leave_slow_nodes(cause)
        if left_nodes and not left_nodes[0]:
            self._slow_rank_monitor.continue_with_all_nodes(left_nodes[1])
            return
        self._state.finished = self._state.closed = True
        self._replica_check.close()
        transport = self._ctx.world.transport
        self._ctx.comm_thread.close()
        transport.barrier()
        job_ending, outcome = left_nodes or transport.broadcast(
            shutdown.requeue_job(cause) if self._ctx.world.rank == 0 else None)
        raise Preempted(f"{cause}; {outcome}", job_ending)

    def _leave_slow_nodes(self, cause: str) -> tuple[bool, str] | None:
        """If the stop was to leave slow nodes: whether the job is requeued without them, and why not. Collective.

        None if there was another reason, too: a signal means that the job ends.
        """
        ctx, nodes = self._ctx, self._slow_rank_monitor.nodes_to_leave
        reasons = ctx.all_gather_object((checkpoint_coordinator.has_received_signal(), bool(nodes)))
        if any(signaled for signaled, _ in reasons) or not any(leaves for _, leaves in reasons):
            return None
        outcomes = ctx.all_gather_object(shutdown.requeue_job_without(nodes, cause) if nodes else None)
        job_ending, text = next(outcome for outcome in outcomes if outcome)
        return job_ending, text

    def on_resume(self) -> None:
        """The iteration has reached the restored position, so random numbers follow."""
        if self._checkpointer:
            self._checkpointer.restore_rng()

    def on_epoch_end(self) -> None:
        """No batch follows the last request."""
        if self._active_hooks:
            self._active_hooks.timer.discard_empty_step()

    def on_batch(self, batch_slice: BatchSlice) -> None:
        """The batch of a slice is ready."""
        self.start_forward()
        self._work_assignment.begin_step(batch_slice)
        if self._active_hooks:
            self._active_hooks.set_gradient_weight(batch_slice.gradient_weight)

    def start_forward(self) -> None:
        self.on_resume()
        if self._active_hooks:
            self._active_hooks.timer.enter("forward")
            self._work_assignment.end_fetch()
