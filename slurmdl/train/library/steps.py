"""What happens around each step of the optimizer: by hooks, so that model and optimizer stay of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from slurmdl.errors import TrainError
from slurmdl.train.library import agreement
from slurmdl.train.library.backward import Backward, Listener
from slurmdl.train.library.quasi_global import QuasiGlobal
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.share import Share
from slurmdl.train.mixing.moved import Moved
from slurmdl.train.report.meters import Stopwatch
from slurmdl.train.trace import Trace

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class Steps:
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

    def __init__(self, run: Run, share: Share, passes: int, trace: Trace | None, drift: bool,
                 check: ReplicaCheck) -> None:
        self._run, self._share, self._passes, self._check = run, share, passes, check
        replica, world, courier = run.replica, run.world, run.courier
        self.watch = Stopwatch(run.meter, world.transport.now, lambda: courier.waiting, trace)
        self.looked = 0
        self._hidden = 0.0
        self._momentum = agreement.on_all(world, lambda: QuasiGlobal(replica, run.optimizer)) \
            if world.method.quasi_global else None
        self._moved = Moved(replica.parameters, replica.sizes) if drift else None
        self._backward = Backward(replica, passes, run.strategy.overlaps,
                                  Listener(lambda: self.watch.enter("backward"), self._ready, self._passes_over))
        self._groups = len(run.optimizer.param_groups)
        #: whether the step that is under way leaves the model as it is, since its gradients have overflowed
        self._skips = False
        #: a parameter whose mean gradient is not finite, "" for none
        self._infinite = ""
        self._trained = {id(tensor) for tensor in replica.tensors}

    def begin(self) -> None:
        """Follow the model and the optimizer from now on."""
        run = self._run
        if self._momentum:
            run.keep("quasi-global momentum", self._momentum)
        self._hook(run.optimizer)
        try:
            run.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        except TypeError:  # PyTorch before 2.0
            run.model.register_forward_pre_hook(self._before_forward)
        run.model.register_forward_hook(self._after_forward)

    def _hook(self, optimizer: Any) -> None:
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
            # torch.amp.GradScaler then leaves it to the step to unscale gradients, and to do nothing at an overflow:
            # so the hooks are called in each step, also where this rank skips the update alone
            optimizer._step_supports_amp_scaling = True
            return
        step = optimizer.step  # PyTorch before 2.0

        @wraps(step)
        def between(*arguments: Any, **named: Any) -> Any:
            self._before(optimizer, arguments, named)
            made = step(*arguments[1:], **named)
            self._after(optimizer, arguments, named)
            return made

        optimizer.step = MethodType(between, optimizer)  # a method, since schedules of learning rates look into it

    @property
    def made(self) -> int:
        """How many the optimizer has made."""
        return self._backward.step

    def begin_at(self, step: int) -> None:
        """So many have been made already."""
        self._backward.step = self.looked = step

    def weigh(self, weight: float) -> None:
        """Count the gradients of the step to come `weight` times, where they go to others as they are."""
        strategy = self._run.strategy
        if self._passes == 1 and (strategy.in_step or not strategy.updates):
            self._backward.weigh(weight)

    def _ready(self, start: int) -> None:
        # without a thread of its own the courier would hold up the backward pass
        if self._run.strategy.overlaps and self._run.world.transport.threaded:
            self._run.strategy.ready(start)

    def _before_forward(self, model: Any, arguments: Any, named: Any = None) -> None:
        import torch

        if torch.is_grad_enabled() and not self._run.finished:
            if self.watch.between:
                self.watch.enter("forward")
            if not self._share.hand:
                self._check.see(arguments, named)

    def _after_forward(self, model: Any, arguments: Any, output: Any) -> None:
        if not self.watch.between and getattr(output, "requires_grad", False):
            output.register_hook(self._enter_backward)

    def _enter_backward(self, gradient: Any) -> None:
        self.watch.enter("backward")

    def _passes_over(self) -> None:
        if self._run.strategy.overlaps:
            self._complete()
        self.watch.enter("optimizer")

    def _complete(self) -> None:
        run = self._run
        self.watch.enter("communication")
        self._backward.end()
        if not (run.strategy.overlaps or self._skips):
            self._refuse_infinite(run.replica.infinite())
        with run.survivors.staying(self.made):
            run.strategy.before_update(self.made, self._skips)
        if self._momentum:
            self._momentum.lead()
        if run.strategy.overlaps:
            self._infinite = run.replica.infinite()

    def _take_scale(self, optimizer: Any) -> None:
        """Unscale the gradients, and learn whether they have overflowed, where a torch.amp.GradScaler makes the step.

        It hands over by two attributes, as to optimizers that do both in one kernel on a GPU.
        """
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return
        self._skips = bool(float(found))
        if optimizer.grad_scale is not None and not self._skips:
            self._run.replica.unscale(optimizer.grad_scale)
        optimizer.grad_scale = optimizer.found_inf = None

    def _refuse_infinite(self, name: str) -> None:
        """Refuse an update with a gradient that is not finite; with the mean of all, all ranks do.

        Parameters
        ----------
        name : of the parameter, "" for none.
        """
        if not name:
            return
        run = self._run

        def fault(whose: str) -> TrainError:
            return TrainError(f"step {self.made + 1}: {whose} has entries that are infinite or no numbers; valid: "
                              "a smaller learning rate, or with float16 torch.amp.GradScaler")

        def check() -> None:
            """Name the ranks that have brought it in."""
            own = run.replica.noted()
            if own:
                raise fault(f"the gradient of {own}")

        if not run.strategy.overlaps:
            raise fault(f"the gradient of {name}")
        run.courier.do(lambda: agreement.on_all(run.world, check))
        raise fault(f"the mean of the ranks' gradients of {name}")

    def _before(self, optimizer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        run = self._run
        if run.finished:
            raise TrainError("opt.step() after the run was finished; valid: run.finish() after the last step")
        if named.get("closure") or any(argument is not None for argument in arguments[1:]):
            raise TrainError("opt.step(closure): not supported; valid: loss.backward(), then opt.step()")
        moved = run.replica.moved()
        if moved or len(optimizer.param_groups) != self._groups:
            what = f"parameter {moved} was laid elsewhere" if moved else "the optimizer got another group"
            raise TrainError(f"step {self.made + 1}: {what} after run.wrap(); move, load (with assign=True) and add "
                             "parameters before it")
        thawed = self._thawed()
        if thawed:
            raise TrainError(f"step {self.made + 1}: parameter {thawed} is trained now, but was not at run.wrap(); "
                             "valid: requires_grad=True before run.wrap(), and a learning rate of 0 for its "
                             "parameter group until it is to be trained")
        if run.saver and self.looked < self.made:
            raise TrainError(f"step {self.made + 1}: checkpoints are made where a batch is asked for; valid: batches "
                             "of run.loader(), or `with run.fetching():` around what makes them")
        if run.balanced and not self._share.hand:
            raise TrainError(f"step {self.made + 1}: --balance {run.world.method.balance} shares out the batches of "
                             "run.loader(), and this one is none; valid: a batch of it for each step, or "
                             "--balance off")
        run.replica.changed()
        self._take_scale(optimizer)
        if not self._backward.over:
            self._complete()
        if not self._skips:
            self._refuse_infinite(self._infinite)
        self.watch.enter("optimizer")
        if not run.strategy.updates:
            run.replica.store_parameters()
        if self._skips or not run.strategy.updates:
            run.replica.hide_gradients()

    def _thawed(self) -> str:
        """Name of a parameter that the optimizer is about to train and the replica does not hold, "" for none."""
        run, its = self._run, self._trained
        found = next((tensor for group in run.optimizer.param_groups for tensor in group["params"]
                      if id(tensor) not in its and tensor.requires_grad), None)
        if found is None:
            return ""
        return next((name for name, tensor in run.model.named_parameters() if tensor is found),
                    f"of shape {tuple(found.shape)}")

    def _after(self, optimizer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        run = self._run
        if self._skips or not run.strategy.updates:
            run.replica.show_gradients()
        self._skips, self._infinite = False, ""
        run.replica.changed()
        self.watch.enter("communication")
        if run.strategy.in_step:
            run.survivors.after_update(self.made)
        else:
            self._mix()
        with run.survivors.staying(self.made + 1):
            self._check.after(self.made + 1)
        self._backward.next_step()
        self.watch.end_step()
        meter, courier = run.meter, run.courier
        meter.samples.add(self._share.account(meter.wall.last - meter.comm.last))
        hidden = courier.busy - courier.seconds
        meter.hidden += hidden - self._hidden
        self._hidden = hidden

    def _mix(self) -> None:
        """Bring the model together with others', where that is due."""
        run = self._run
        if self._moved:
            run.replica.fetch_parameters()
            run.meter.add_drift(self._moved.far())
        if self._momentum:
            self._momentum.stepped()
        fired = run.strategy.fired
        for number in self._share.numbers(self.made):
            run.survivors.after_update(number)
        if self._moved and run.strategy.fired > fired:
            self._moved.mark()
        if self._momentum:
            self._momentum.follow()
