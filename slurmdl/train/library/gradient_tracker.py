"""Follows the backward passes of a step: which gradients are there, and when all are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica


@dataclass(frozen=True)
class BackwardCallbacks:
    """Whom a `Backward` tells.

    Attributes
    ----------
    begun : a pass has given its first gradient.
    ready : the gradients from this index of the buffer on are complete.
    complete : the last expected pass of the step is over, or a further one.
    """

    on_start: Callable[[], None]
    on_ready: Callable[[int], None]
    on_complete: Callable[[], None]


class GradientTracker:
    """The backward passes of one step.

    Parameters
    ----------
    passes : of each step, whose gradients add up. More may follow: each then ends with `complete`, too.
    once : whether a pass may bring a gradient only once, since it may be on its way already.

    Attributes
    ----------
    step : number of the step, from 0.
    over : whether `end` has brought in all gradients so far.
    """

    def __init__(self, replica: Replica, backward_passes: int,
                 forbid_repeats: bool, callbacks: BackwardCallbacks) -> None:
        self._replica, self._backward_passes, self._forbid_repeats, self._callbacks = replica, backward_passes, forbid_repeats, callbacks
        self.step = 0
        self._weight_hooks: list[Any] = []
        self._reset()
        replica.register_gradient_hook(self._on_gradient)

    def _reset(self) -> None:
        self.done = False
        #: the pass, from 1, that brought each gradient last
        self._last_pass = [0] * len(self._replica.tensors)
        self._complete_from = len(self._last_pass)
        self._passes_done, self._in_pass = 0, False

    def next_step(self) -> None:
        """The optimizer has made its step."""
        self.step += 1
        self.set_gradient_weight(1.0)
        self._reset()

    def set_gradient_weight(self, weight: float) -> None:
        """Count the gradients of the passes to come in this step `weight` times."""
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks = self._replica.register_gradient_scale(weight) if weight != 1 else []

    def collect_missing(self) -> None:
        """Bring in what the last pass has not: parameters that were not used, gradients that were set by hand."""
        latest = max(self._passes_done, 1)
        for index, brought in enumerate(self._last_pass):
            if brought < latest:
                self._replica.collect_gradient(index)
        self.done = True

    def _on_gradient(self, index: int) -> None:
        if not self._in_pass:
            self._start_pass()
        self.done = False
        name, number = self._replica.names[index], self._passes_done + 1
        if self._last_pass[index] == number and self._forbid_repeats:
            raise TrainError(f"step {self.step + 1}: one backward pass brings the gradient of {name} twice, as where "
                             "several re-entrant checkpoints share a parameter; valid: "
                             "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        self._last_pass[index] = number
        if self._forbid_repeats:
            self._replica.record_gradient_sum(index)
        if number == self._backward_passes:
            self._report_ready()

    def _report_ready(self) -> None:
        before = self._complete_from
        while self._complete_from and self._last_pass[self._complete_from - 1] == self._backward_passes:
            self._complete_from -= 1
        if self._complete_from < before:
            self._callbacks.on_ready(self._replica.starts[self._complete_from])

    def _start_pass(self) -> None:
        self._in_pass = True
        self._queue_end_callback()
        self._callbacks.on_start()

    def _on_pass_end(self) -> None:
        following = _outer_pass_nodes()
        if following:
            def go_on(gradients: Any) -> None:
                handle.remove()
                self._queue_end_callback()

            # a re-entrant checkpoint makes a pass inside another one: that one's end counts
            handle = following[0].register_prehook(go_on)
            return
        self._in_pass = False
        self._passes_done += 1
        if self._passes_done >= self._backward_passes:
            self._callbacks.on_complete()

    def _queue_end_callback(self) -> None:
        """Learn of the end of the pass that is under way; of several inside each other, of the innermost."""
        from torch.autograd import Variable

        # as torch's own DistributedDataParallel learns of the end of a pass
        Variable._execution_engine.queue_callback(self._on_pass_end)


def _outer_pass_nodes() -> list[Any]:
    """At the end of a pass inside another one: nodes of that one's graph that are still to come; else none.

    None either before PyTorch 2.1, where gradients are exchanged at the end of each pass inside another one, too.
    """
    import torch

    current = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return [node for node, _ in current.next_functions if node] if current else []
