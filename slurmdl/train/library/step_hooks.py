"""What happens around each step of the optimizer: by hooks, so that model and optimizer stay of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from slurmdl.errors import TrainError
from slurmdl.train.library import consistency
from slurmdl.train.library.gradient_tracker import BackwardCallbacks, GradientTracker
from slurmdl.train.library.load_balance import WorkAssignment
from slurmdl.train.library.quasi_global import QuasiGlobalMomentum
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.mixing.drift_estimator import DriftEstimator
from slurmdl.train.report.meters import PhaseTimer
from slurmdl.train.trace import Trace

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class StepHooks:
    """The steps of one rank: its gradients leave for the others, and its model is mixed with theirs.

    Parameters
    ----------
    passes : backward passes for each step, whose gradients add up.
    drift : whether the way of the model since the last exchange is to be measured.

    Attributes
    ----------
    watch : of the phases of a step.
    looked : number of the step before which a checkpoint was thought of last.
    """

    def __init__(self, run: Run, work_assignment: WorkAssignment, backward_passes: int, trace: Trace | None, measure_drift: bool,
                 replica_check: ReplicaCheck) -> None:
        self._run, self._work_assignment, self._backward_passes, self._replica_check = run, work_assignment, backward_passes, replica_check
        replica, world, courier = run.replica, run.world, run.comm_thread
        self.timer = PhaseTimer(run.meter, world.transport.now, lambda: courier.peer_wait_seconds, trace)
        self.last_checkpoint_check = 0
        self._overlapped_comm = 0.0
        self._momentum = consistency.call_on_all(world, lambda: QuasiGlobalMomentum(replica, run.optimizer)) \
            if world.config.quasi_global_momentum else None
        self._drift_estimator = DriftEstimator(replica.parameters, replica.sizes) if measure_drift else None
        self._gradient_tracker = GradientTracker(replica, backward_passes, run.strategy.overlaps_backward,
                                  BackwardCallbacks(lambda: self.timer.enter("backward"), self._on_gradients_ready, self._on_backward_complete))
        self._group_count = len(run.optimizer.param_groups)
        #: whether the step that is under way leaves the model as it is, since its gradients have overflowed
        self._skips_update = False
        #: a parameter whose mean gradient is not finite, "" for none
        self._nonfinite_parameter = ""
        self._trained_ids = {id(tensor) for tensor in replica.tensors}

    def install(self) -> None:
        """Follow the model and the optimizer from now on."""
        run = self._run
        if self._momentum:
            run.register_for_checkpointing("quasi-global momentum", self._momentum)
        self._hook_optimizer(run.optimizer)
        try:
            run.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        except TypeError:  # PyTorch before 2.0
            run.model.register_forward_pre_hook(self._before_forward)
        run.model.register_forward_hook(self._after_forward)

    def _hook_optimizer(self, optimizer: Any) -> None:
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(self._before_optimizer_step)
            optimizer.register_step_post_hook(self._after_optimizer_step)
            # torch.amp.GradScaler then leaves it to the step to unscale gradients, and to do nothing at an overflow:
            # so the hooks are called in each step, also where this rank skips the update alone
            optimizer._step_supports_amp_scaling = True
            return
        step = optimizer.step  # PyTorch before 2.0

        @wraps(step)
        def between(*arguments: Any, **named: Any) -> Any:
            self._before_optimizer_step(optimizer, arguments, named)
            made = step(*arguments[1:], **named)
            self._after_optimizer_step(optimizer, arguments, named)
            return made

        optimizer.step = MethodType(between, optimizer)  # a method, since schedules of learning rates look into it

    @property
    def completed(self) -> int:
        """How many the optimizer has made."""
        return self._gradient_tracker.step

    def resume_at(self, step: int) -> None:
        """So many have been made already."""
        self._gradient_tracker.step = self.last_checkpoint_check = step

    def set_gradient_weight(self, weight: float) -> None:
        """Count the gradients of the step to come `weight` times, where they go to others as they are."""
        strategy = self._run.strategy
        if self._backward_passes == 1 and (strategy.averages_gradients or not strategy.updates_locally):
            self._gradient_tracker.set_gradient_weight(weight)

    def _on_gradients_ready(self, start: int) -> None:
        # without a thread of its own the courier would hold up the backward pass
        if self._run.strategy.overlaps_backward and self._run.world.transport.supports_comm_thread:
            self._run.strategy.on_gradients_ready(start)

    def _before_forward(self, model: Any, args: Any, kwargs: Any = None) -> None:
        import torch

        if torch.is_grad_enabled() and not self._run.finished:
            if self.timer.is_between_steps:
                self.timer.enter("forward")
            if not self._work_assignment.current_slice:
                self._replica_check.record_batch(args, kwargs)

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if not self.timer.is_between_steps and getattr(output, "requires_grad", False):
            output.register_hook(self._enter_backward)

    def _enter_backward(self, gradient: Any) -> None:
        self.timer.enter("backward")

    def _on_backward_complete(self) -> None:
        if self._run.strategy.overlaps_backward:
            self._complete_gradients()
        self.timer.enter("optimizer")

    def _complete_gradients(self) -> None:
        run = self._run
        self.timer.enter("communication")
        self._gradient_tracker.collect_missing()
        if not (run.strategy.overlaps_backward or self._skips_update):
            self._reject_nonfinite(run.replica.nonfinite_parameter())
        with run.recovery.recovering(self.completed):
            run.strategy.before_optimizer_step(self.completed, self._skips_update)
        if self._momentum:
            self._momentum.before_optimizer_step()
        if run.strategy.overlaps_backward:
            self._nonfinite_parameter = run.replica.nonfinite_parameter()

    def _apply_grad_scaler(self, optimizer: Any) -> None:
        """Unscale the gradients, and learn whether they have overflowed, where a torch.amp.GradScaler makes the step.

        It hands over by two attributes, as to optimizers that do both in one kernel on a GPU.
        """
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return
        self._skips_update = bool(float(found))
        if optimizer.grad_scale is not None and not self._skips_update:
            self._run.replica.unscale_gradients(optimizer.grad_scale)
        optimizer.grad_scale = optimizer.found_inf = None

    def _reject_nonfinite(self, name: str) -> None:
        """Refuse an update with a gradient that is not finite; with the mean of all, all ranks do.

        Parameters
        ----------
        name : of the parameter, "" for none.
        """
        if not name:
            return
        run = self._run

        def fault(whose: str) -> TrainError:
            return TrainError(f"step {self.completed + 1}: {whose} has entries that are infinite or no numbers; valid: "
                              "a smaller learning rate, or with float16 torch.amp.GradScaler")

        def check() -> None:
            """Name the ranks that have brought it in."""
            own = run.replica.recorded_nonfinite_parameter()
            if own:
                raise fault(f"the gradient of {own}")

        if not run.strategy.overlaps_backward:
            raise fault(f"the gradient of {name}")
        run.comm_thread.call(lambda: consistency.call_on_all(run.world, check))
        raise fault(f"the mean of the ranks' gradients of {name}")

    def _before_optimizer_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        run = self._run
        if run.finished:
            raise TrainError("opt.step() after the run was finished; valid: run.finish() after the last step")
        if kwargs.get("closure") or any(argument is not None for argument in args[1:]):
            raise TrainError("opt.step(closure): not supported; valid: loss.backward(), then opt.step()")
        moved = run.replica.relocated_parameter()
        if moved or len(optimizer.param_groups) != self._group_count:
            what = f"parameter {moved} was laid elsewhere" if moved else "the optimizer got another group"
            raise TrainError(f"step {self.completed + 1}: {what} after run.wrap(); move, load (with assign=True) and add "
                             "parameters before it")
        thawed = self._unfrozen_parameter()
        if thawed:
            raise TrainError(f"step {self.completed + 1}: parameter {thawed} is trained now, but was not at run.wrap(); "
                             "valid: requires_grad=True before run.wrap(), and a learning rate of 0 for its "
                             "parameter group until it is to be trained")
        if run.checkpointer and self.last_checkpoint_check < self.completed:
            raise TrainError(f"step {self.completed + 1}: checkpoints are made where a batch is asked for; valid: batches "
                             "of run.loader(), or `with run.data_phase():` around what makes them")
        if run.is_load_balanced and not self._work_assignment.current_slice:
            raise TrainError(f"step {self.completed + 1}: --load-balance {run.world.config.load_balance} shares out the batches of "
                             "run.loader(), and this one is none; valid: a batch of it for each step, or "
                             "--load-balance off")
        run.replica.mark_changed()
        self._apply_grad_scaler(optimizer)
        if not self._gradient_tracker.done:
            self._complete_gradients()
        if not self._skips_update:
            self._reject_nonfinite(self._nonfinite_parameter)
        self.timer.enter("optimizer")
        if not run.strategy.updates_locally:
            run.replica.copy_to_device()
        if self._skips_update or not run.strategy.updates_locally:
            run.replica.hide_gradients()

    def _unfrozen_parameter(self) -> str:
        """Name of a parameter that the optimizer is about to train and the replica does not hold, "" for none."""
        run, its = self._run, self._trained_ids
        found = next((tensor for group in run.optimizer.param_groups for tensor in group["params"]
                      if id(tensor) not in its and tensor.requires_grad), None)
        if found is None:
            return ""
        return next((name for name, tensor in run.model.named_parameters() if tensor is found),
                    f"of shape {tuple(found.shape)}")

    def _after_optimizer_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        run = self._run
        if self._skips_update or not run.strategy.updates_locally:
            run.replica.show_gradients()
        self._skips_update, self._nonfinite_parameter = False, ""
        run.replica.mark_changed()
        self.timer.enter("communication")
        if run.strategy.averages_gradients:
            run.recovery.after_optimizer_step(self.completed)
        else:
            self._exchange_models()
        with run.recovery.recovering(self.completed + 1):
            self._replica_check.after_step(self.completed + 1)
        self._gradient_tracker.next_step()
        self.timer.end_step()
        meter, courier = run.meter, run.comm_thread
        meter.samples.add(self._work_assignment.end_step(meter.wall.last - meter.exposed_comm.last))
        hidden = courier.busy_seconds - courier.blocked_seconds
        meter.overlapped_comm += hidden - self._overlapped_comm
        self._overlapped_comm = hidden

    def _exchange_models(self) -> None:
        """Bring the model together with others', where that is due."""
        run = self._run
        if self._drift_estimator:
            run.replica.copy_to_host()
            run.meter.add_drift(self._drift_estimator.relative_drift())
        if self._momentum:
            self._momentum.after_optimizer_step()
        fired = run.strategy.exchanges
        for number in self._work_assignment.strategy_steps(self.completed):
            run.recovery.after_optimizer_step(number)
        if self._drift_estimator and run.strategy.exchanges > fired:
            self._drift_estimator.reset()
        if self._momentum:
            self._momentum.after_mixing()
