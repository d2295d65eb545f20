"""Tracks the backward passes of a step: which gradients are complete, and when all are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from slurmdl.errors import TrainError
from slurmdl.train.library.context import RunState
from slurmdl.train.library.replica import Replica


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

    def __init__(self, replica: Replica, state: RunState, backward_passes: int, forbid_repeats: bool,
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
