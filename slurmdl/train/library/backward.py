"""Follows the backward passes of a step: which gradients are there, and when all are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica


@dataclass(frozen=True)
class Listener:
    """Whom a `Backward` tells.

    Attributes
    ----------
    begun : a pass has given its first gradient.
    ready : the gradients from this index of the buffer on are complete.
    complete : the last expected pass of the step is over, or a further one.
    """

    begun: Callable[[], None]
    ready: Callable[[int], None]
    complete: Callable[[], None]


class Backward:
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

    def __init__(self, replica: Replica, passes: int, once: bool, listener: Listener) -> None:
        self._replica, self._passes, self._once, self._listener = replica, passes, once, listener
        self.step = 0
        self._weights: list[Any] = []
        self._begin()
        replica.watch(self._gathered)

    def _begin(self) -> None:
        self.over = False
        #: the pass, from 1, that brought each gradient last
        self._brought = [0] * len(self._replica.tensors)
        self._complete_from = len(self._brought)
        self._passed, self._under_way = 0, False

    def next_step(self) -> None:
        """The optimizer has made its step."""
        self.step += 1
        self.weigh(1.0)
        self._begin()

    def weigh(self, weight: float) -> None:
        """Count the gradients of the passes to come in this step `weight` times."""
        for handle in self._weights:
            handle.remove()
        self._weights = self._replica.weigh(weight) if weight != 1 else []

    def end(self) -> None:
        """Bring in what the last pass has not: parameters that were not used, gradients that were set by hand."""
        latest = max(self._passed, 1)
        for index, brought in enumerate(self._brought):
            if brought < latest:
                self._replica.gather(index)
        self.over = True

    def _gathered(self, index: int) -> None:
        if not self._under_way:
            self._start()
        self.over = False
        name, number = self._replica.names[index], self._passed + 1
        if self._brought[index] == number and self._once:
            raise TrainError(f"step {self.step + 1}: one backward pass brings the gradient of {name} twice, as where "
                             "several re-entrant checkpoints share a parameter; valid: "
                             "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
        self._brought[index] = number
        if self._once:
            self._replica.look(index)
        if number == self._passes:
            self._advance()

    def _advance(self) -> None:
        before = self._complete_from
        while self._complete_from and self._brought[self._complete_from - 1] == self._passes:
            self._complete_from -= 1
        if self._complete_from < before:
            self._listener.ready(self._replica.starts[self._complete_from])

    def _start(self) -> None:
        self._under_way = True
        self._await_end()
        self._listener.begun()

    def _pass_over(self) -> None:
        following = _following_nodes()
        if following:
            def go_on(gradients: Any) -> None:
                handle.remove()
                self._await_end()

            # a re-entrant checkpoint makes a pass inside another one: that one's end counts
            handle = following[0].register_prehook(go_on)
            return
        self._under_way = False
        self._passed += 1
        if self._passed >= self._passes:
            self._listener.complete()

    def _await_end(self) -> None:
        """Learn of the end of the pass that is under way; of several inside each other, of the innermost."""
        from torch.autograd import Variable

        # as torch's own DistributedDataParallel learns of the end of a pass
        Variable._execution_engine.queue_callback(self._pass_over)


def _following_nodes() -> list[Any]:
    """At the end of a pass inside another one: nodes of that one's graph that are still to come; else none.

    None either before PyTorch 2.1, where gradients are exchanged at the end of each pass inside another one, too.
    """
    import torch

    current = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return [node for node, _ in current.next_functions if node] if current else []
