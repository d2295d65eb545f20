"""Hooks around each optimizer step, so that model and optimizer keep their classes.

A tracker of the backward passes knows which gradients are complete, and when all are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any

from slurmdl.errors import TrainError
from slurmdl.train import optimizer_hooks
from slurmdl.train.collectives import bruck_allgather
from slurmdl.train.library import consistency
from slurmdl.train.library.context import Context, Counters
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.load_balance import SampleAssignment
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.meters import PhaseTimer, Trace
from slurmdl.train.optimizer_hooks import StepArguments
from slurmdl.train.slow_ranks import SlowRankMonitor


class GradientTracker:
    """Backward passes of one step.

    Args:
        backward_passes: passes per step, whose gradients add up.
        forbid_repeats: whether a pass may produce each gradient only once, since it may be in flight already.
        on_start: called when a pass has produced its first gradient.
        on_ready: called when the gradients from a buffer index on are complete; returns whether any have been sent.
        on_complete: called after the last expected pass of the step, and after further ones.

    Attributes:
        passes_done: backward passes of the current step so far.
    """

    def __init__(self, replica: Replica, state: Counters, backward_passes: int, forbid_repeats: bool,
                 on_start: Callable[[], None], on_ready: Callable[[int], bool],
                 on_complete: Callable[[], None]) -> None:
        self._replica, self._state = replica, state
        self._backward_passes, self._forbid_repeats = backward_passes, forbid_repeats
        self._on_start, self._on_ready, self._on_complete = on_start, on_ready, on_complete
        self._weight_hooks: list[Any] = []
        #: of the parameters, at the first gradient of a pass
        self._version = 0
        #: whether passes accumulate gradients only (Run.no_sync)
        self.accumulates_only = False
        self.next_step()
        self._hooks = replica.register_gradient_hook(self._on_gradient)

    def remove(self) -> None:
        """Leave all further backward passes to PyTorch."""
        for handle in [*self._hooks, *self._weight_hooks]:
            handle.remove()

    def next_step(self) -> None:
        """Start tracking the next step."""
        self.set_gradient_weight(1.0)
        #: whether `collect_missing` has collected all gradients so far
        self.done = False
        #: number, from 1, of the last pass that produced each gradient
        self._last_pass = [0] * len(self._replica.tensors)
        self._complete_from = len(self._last_pass)
        self.passes_done = 0
        #: held by autograd until the current pass ends or raises an error; None after its end
        self._pass_end: weakref.ref[Any] | None = None
        self._has_sent = False
        #: number of the first pass after which all gradients are exchanged
        self._sync_pass = self._backward_passes

    def set_gradient_weight(self, weight: float) -> None:
        """Scale the gradients of the following passes of this step."""
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks = self._replica.register_gradient_scale(weight) if weight != 1 else []

    def collect_missing(self) -> None:
        """Collect gradients that the last pass did not produce: unused parameters, and gradients set by hand."""
        self._forget_failed_pass()
        latest = max(self.passes_done, 1)
        for index, last_pass in enumerate(self._last_pass):
            if last_pass < latest:
                self._replica.collect_gradient(index)
        self.done = True

    def _on_gradient(self, index: int) -> None:
        name, number = self._replica.names[index], self.passes_done + 1
        if not (self._pass_end and self._pass_end()):
            self._forget_failed_pass()
            if self.accumulates_only:
                self._sync_pass = max(self._sync_pass, number + 1)
            self._version = self._replica.version
            self._queue_end_callback()
            self._on_start()
        self.done = False
        if self._last_pass[index] == number and self._forbid_repeats:
            raise TrainError(f"step {self._state.step + 1}: one backward pass produces the gradient of {name} twice, "
                             "e.g. if re-entrant checkpoints share a parameter; expected "
                             "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        self._last_pass[index] = number
        if self._forbid_repeats:
            self._replica.record_gradient_sum(index)
        if number == self._sync_pass:
            self._report_ready()

    def _report_ready(self) -> None:
        before = self._complete_from
        while self._complete_from and self._last_pass[self._complete_from - 1] == self._sync_pass:
            self._complete_from -= 1
        if self._complete_from < before:
            self._has_sent = self._on_ready(self._replica.starts[self._complete_from])

    def _forget_failed_pass(self) -> None:
        """Forget a pass that has raised an error, e.g. out of memory, which the script has caught."""
        if self._pass_end is None:
            return
        if self._has_sent:
            raise TrainError(f"step {self._state.step + 1}: a backward pass raised an error after it had sent a part "
                             "of the gradients; expected `with run.no_sync():` around passes that may fail, so that "
                             "opt.step() sends the gradients")
        self._pass_end = None
        failed = self.passes_done + 1
        self._last_pass = [0 if last_pass == failed else last_pass for last_pass in self._last_pass]
        self._complete_from = len(self._last_pass)
        self._sync_pass = min(self._sync_pass, max(self._backward_passes, failed))

    def _on_pass_end(self) -> None:
        outer_nodes = _outer_pass_nodes()
        if outer_nodes:
            pass_end = self._pass_end and self._pass_end()

            def requeue(gradients: Any, pass_end: Any = pass_end) -> None:
                handle.remove()
                self._queue_end_callback()

            # a re-entrant checkpoint runs a pass inside another one, whose end counts
            handle = outer_nodes[0].register_prehook(requeue)
            return
        self._pass_end = None
        self._check_parameters_unchanged()
        self.passes_done += 1
        if self.passes_done >= self._sync_pass:
            self._on_complete()

    def _check_parameters_unchanged(self) -> None:
        """Reject an optimizer that steps in gradient hooks: the gradients of a parameter are exchanged after them."""
        if self._replica.version != self._version:
            raise TrainError(f"step {self._state.step + 1}: the backward pass changed parameters, e.g. by an "
                             "optimizer that steps in register_post_accumulate_grad_hook; expected opt.step() of the "
                             "wrapped optimizer after backward()")

    def _queue_end_callback(self) -> None:
        """Call `_on_pass_end` at the end of the current pass, of the innermost if nested."""
        from torch.autograd import Variable

        # as torch's DistributedDataParallel does
        pass_end = partial(self._on_pass_end)
        Variable._execution_engine.queue_callback(pass_end)
        self._pass_end = weakref.ref(pass_end)


def _outer_pass_nodes() -> list[Any]:
    """At the end of a nested pass: pending graph nodes of the outer pass, else [].

    Always [] before PyTorch 2.1, where gradients are exchanged at the end of each nested pass, too.
    """
    import torch

    current = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return [node for node, _ in current.next_functions if node] if current else []


class TrainingStep:
    """Steps of one rank: communication of gradients, and mixing of models."""

    def __init__(self, ctx: Context, state: Counters, recovery: FailureRecovery, sample_assignment: SampleAssignment,
                 replica_check: ReplicaCheck, slow_rank_monitor: SlowRankMonitor, backward_passes: int,
                 trace: Trace | None) -> None:
        self._ctx, self._state, self._recovery = ctx, state, recovery
        self._sample_assignment, self._replica_check = sample_assignment, replica_check
        self._slow_rank_monitor = slow_rank_monitor
        self.timer = PhaseTimer(ctx.meter, ctx.world.transport.now, lambda: ctx.comm_thread.peer_wait_seconds, trace)
        self._overlapped_comm = 0.0
        self._gradient_tracker = GradientTracker(
            ctx.replica, state, backward_passes, recovery.strategy.overlaps_backward,
            lambda: self.timer.enter("backward"), self._on_gradients_ready, self._on_backward_complete)
        self._group_count = len(ctx.optimizer.param_groups)
        self._sparse_ids = optimizer_hooks.sparse_parameter_ids(ctx.optimizer)
        #: whether the current step leaves the model unchanged, because gradients have overflowed
        self._skips_update = False
        #: whether it does so to let the others catch up after a rank failure
        self._is_behind = False
        #: name of a parameter with a non-finite mean gradient, or ""
        self._nonfinite_parameter = ""
        self._model_hooks: list[Any] = []

    def install(self) -> None:
        """Install the hooks of model and optimizer."""
        model, optimizer = self._ctx.model, self._ctx.optimizer
        try:
            self._model_hooks = [model.register_forward_pre_hook(_ModuleHook(self._before_forward), with_kwargs=True)]
        except TypeError:  # PyTorch before 2.0
            self._model_hooks = [model.register_forward_pre_hook(_ModuleHook(self._before_forward))]
        self._model_hooks.append(model.register_forward_hook(_ModuleHook(self._after_forward)))
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer_hooks.install(optimizer, self._finish_gradients, self._after_optimizer_step)
            return
        original_step = optimizer.step  # PyTorch before 2.0

        @wraps(original_step)
        def step(*arguments: Any, **kwargs: Any) -> Any:
            arguments, kwargs = self._finish_gradients(optimizer, arguments, kwargs)
            result = original_step(*arguments[1:], **kwargs)
            self._after_optimizer_step(optimizer, arguments, kwargs)
            return result

        optimizer.step = MethodType(step, optimizer)  # must be a bound method: LR schedulers wrap optimizer.step

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass was made since the last step."""
        return self._gradient_tracker.passes_done > 0

    def leave_model(self) -> None:
        """Remove the hooks of the model: a backward pass on one rank alone is possible from now on."""
        for handle in self._model_hooks:
            handle.remove()
        self._gradient_tracker.remove()

    def set_gradient_weight(self, weight: float) -> None:
        """Weight the gradients of the next passes of this step if they are sent to others unchanged."""
        strategy = self._recovery.strategy
        if strategy.averages_gradients or strategy.replica_groups or not strategy.updates_locally:
            self._gradient_tracker.set_gradient_weight(weight)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context for backward passes whose gradients are not exchanged yet."""
        tracker = self._gradient_tracker
        before, tracker.accumulates_only = tracker.accumulates_only, True
        try:
            yield
        finally:
            tracker.accumulates_only = before

    def _on_gradients_ready(self, start: int) -> bool:
        # without a communication thread sends would block the backward pass
        strategy, recovery = self._recovery.strategy, self._recovery
        if strategy.overlaps_backward and self._ctx.world.transport.supports_comm_thread \
                and not recovery.is_behind(self._state.step):
            return strategy.on_gradients_ready(start)
        return False

    def _before_forward(self, model: Any, args: Any, kwargs: Any = None) -> None:
        import torch

        if torch.is_grad_enabled() and not self._state.finished:
            if self.timer.is_between_steps:
                self.timer.enter("forward")
            if not self._sample_assignment.current_slice:
                self._replica_check.record_batch(args, kwargs)

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if not self.timer.is_between_steps and getattr(output, "requires_grad", False):
            output.register_hook(lambda gradient: self.timer.enter("backward"))

    def _on_backward_complete(self) -> None:
        # costs nothing: the next phase reads the gradients on the host; its time is computation, not communication
        self._ctx.replica.wait_for_device()
        if self._recovery.strategy.overlaps_backward:
            self._complete_gradients()
        self.timer.enter("optimizer")

    def _complete_gradients(self) -> None:
        replica, step = self._ctx.replica, self._state.step
        self.timer.enter("communication")
        self._gradient_tracker.collect_missing()
        if not (self._recovery.strategy.overlaps_backward or self._skips_update):
            self._check_finite(replica.nonfinite_parameter())
        self._exchange_gradients(step)
        if self._recovery.strategy.overlaps_backward and not self._is_behind:
            self._nonfinite_parameter = replica.nonfinite_parameter()

    def _exchange_gradients(self, step: int) -> None:
        """Let the strategy exchange the gradients; after a rank failure, once more on the surviving ranks.

        Incomplete sums are then dropped. A rank that is behind the others leaves its model as it is, as they have
        agreed on it, until it has reached them.
        """
        recovery = self._recovery
        while True:
            strategy = recovery.strategy
            if strategy.replica_groups and recovery.is_behind(step):
                self._is_behind = True
                return
            with recovery.recovering(step):
                strategy.finish_gradients(step, self._skips_update)
            if recovery.strategy is strategy or not strategy.replica_groups:
                return
            self._ctx.replica.drop_gradients()

    def _check_finite(self, nonfinite_parameter: str, gradient: str = "the gradient") -> None:
        """Reject an update with a non-finite gradient of a parameter, unless its name is ""."""
        if nonfinite_parameter:
            raise TrainError(f"step {self._state.step + 1}: {gradient} of {nonfinite_parameter} has infinite or NaN "
                             "entries; expected finite ones (a smaller learning rate, or torch.amp.GradScaler with "
                             "float16)")

    def _report_nonfinite_mean(self) -> None:
        """Reject a non-finite mean gradient, and name the rank that caused it. Collective over its group."""
        ctx, strategy, own = self._ctx, self._recovery.strategy, self._ctx.replica.recorded_nonfinite_parameter()
        if len(strategy.replica_groups) == 1:
            ctx.comm_thread.call(lambda: consistency.call_on_all(ctx.world, lambda: self._check_finite(own)))
        else:  # the ranks of other groups are elsewhere
            group = next(group for group in strategy.replica_groups if ctx.p2p.rank in group)
            found = ctx.comm_thread.call(lambda: bruck_allgather(ctx.p2p, group, float(bool(own))))
            self._check_finite(own)
            if found.any():
                culprit = ctx.world.format_rank(group[int(found.argmax())])
                self._check_finite(self._nonfinite_parameter, f"{culprit}: the gradient")
        self._check_finite(self._nonfinite_parameter, "the mean of the ranks' gradients")

    def _finish_gradients(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
        """Everything before the optimizer's own step; returns the arguments of that."""
        replica, strategy = self._ctx.replica, self._recovery.strategy
        replica.mark_changed()
        self._check_step(self._ctx.optimizer)
        args, kwargs = _call_closure(optimizer, args, kwargs)
        replica.mark_changed()
        self._skips_update = optimizer_hooks.apply_grad_scaler(optimizer, replica.tensors)
        if not self._gradient_tracker.done:
            self._complete_gradients()
        if self._nonfinite_parameter and not self._skips_update:
            self._report_nonfinite_mean()
        self.timer.enter("optimizer")
        if not strategy.updates_locally:
            replica.copy_to_device()
        if self._skips_update or self._is_behind or not strategy.updates_locally:
            replica.stash_gradients()
        else:
            replica.make_gradients_sparse(self._sparse_ids)
        return args, kwargs

    def _check_step(self, optimizer: Any) -> None:
        """Reject a step that breaks the rules of `Run.wrap`."""
        state = self._state
        if state.finished:
            raise TrainError("opt.step() after the run was finished; expected run.finish() after the last step")
        if state.step == state.first_step:
            consistency.reject_ddp(self._ctx.replica.tensors)
        prefix, relocated = f"step {state.step + 1}: ", self._ctx.replica.relocated_parameter()
        if not relocated and not self.has_gradients:
            relocated = self._replaced_parameter()
        if relocated or len(optimizer.param_groups) != self._group_count:
            change = f"parameter {relocated} was relocated" if relocated else "the optimizer got another group"
            raise TrainError(f"{prefix}{change} after run.wrap(); move, load (with assign=True) and add parameters "
                             "before it")
        unfrozen = self._unfrozen_parameter()
        if unfrozen:
            raise TrainError(f"{prefix}parameter {unfrozen} is trained now, but was not at run.wrap(); expected "
                             "requires_grad=True before run.wrap(), and a learning rate of 0 for its parameter group "
                             "until it is to be trained")
        if self._recovery.has_checkpoints and state.last_checkpoint_check < state.step:
            raise TrainError(f"{prefix}checkpoints are written when a batch is requested; expected batches of "
                             "run.loader(), or `with run.data_phase():` around the code that makes a batch")
        if self._ctx.world.config.load_balance and not self._sample_assignment.current_slice:
            raise TrainError(f"{prefix}--load-balance requires a batch of run.loader() for each step; expected such "
                             "batches, or no --load-balance")

    def _replaced_parameter(self) -> str:
        """Name of a parameter that the model no longer has, as after load_state_dict(assign=True), or ""."""
        replica, current = self._ctx.replica, {id(tensor) for tensor in self._ctx.model.parameters()}
        return next((name for name, tensor in zip(replica.names, replica.tensors, strict=True)
                     if id(tensor) not in current), "")

    def _unfrozen_parameter(self) -> str:
        """Name of a parameter that the optimizer would train outside the replica, or ""."""
        trained_ids = self._ctx.replica.trained_ids
        unfrozen = next((tensor for group in self._ctx.optimizer.param_groups for tensor in group["params"]
                         if id(tensor) not in trained_ids and tensor.requires_grad), None)
        if unfrozen is None:
            return ""
        return next((name for name, tensor in self._ctx.model.named_parameters() if tensor is unfrozen),
                    f"of shape {tuple(unfrozen.shape)}")

    def _after_optimizer_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ctx, state, recovery = self._ctx, self._state, self._recovery
        if self._skips_update or self._is_behind or not recovery.strategy.updates_locally:
            ctx.replica.restore_gradients()
        else:
            ctx.replica.make_gradients_dense(self._sparse_ids)
        self._skips_update, self._is_behind, self._nonfinite_parameter = False, False, ""
        ctx.replica.mark_changed()
        self.timer.enter("communication")
        recovery.after_optimizer_step(state.step)
        with recovery.recovering(state.step + 1):
            self._replica_check.after_step(state.step + 1)
        state.step += 1
        self._gradient_tracker.next_step()
        self.timer.end_step()
        meter, comm_thread = ctx.meter, ctx.comm_thread
        compute_seconds = meter.wall.last - meter.exposed_comm.last
        meter.samples.add(self._sample_assignment.end_step(compute_seconds))
        self._slow_rank_monitor.after_step(state.step, compute_seconds)
        overlapped_comm = comm_thread.busy_seconds - comm_thread.blocked_seconds
        meter.overlapped_comm += overlapped_comm - self._overlapped_comm
        self._overlapped_comm = overlapped_comm


class _ModuleHook:
    """Hook of a module; in a copy of the module, pickled or not, it does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and exists where slurmdl is not installed


def _call_closure(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Call the closure of a step, which computes the gradients, before they are exchanged.

    Returns the arguments of the optimizer's own step: there the closure only returns the loss.
    """
    import torch

    closure = kwargs.get("closure") or next((argument for argument in args[1:] if argument is not None), None)
    if closure is None:
        return args, kwargs
    if not callable(closure):
        raise TrainError(f"opt.step({closure!r}): expected a closure that computes the gradients, or no argument")
    with torch.enable_grad():
        results = [closure()]

    def return_loss() -> Any:
        if not results:
            raise TrainError(f"opt.step(closure): {type(optimizer).__name__} computes several gradients in a step, "
                             "and only the first one is exchanged; expected an optimizer that calls the closure once")
        return results.pop()

    return (args[0], return_loss), {name: value for name, value in kwargs.items() if name != "closure"}
