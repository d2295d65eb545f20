"""Follows the backward passes of a step: which gradients are there, and when all are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica


@dataclass(frozen=True)
class Listener:
    """Whom a `Backward` tells.

    Attributes
    ----------
    begun : a pass has given its first gradient.
    ready : the gradients from this index of the buffer on are complete.
    complete : the last pass of the step is over.
    """

    begun: Callable[[], None]
    ready: Callable[[int], None]
    complete: Callable[[], None]


class Backward:
    """The backward passes of one step.

    Parameters
    ----------
    passes : of each step, whose gradients add up.
    strict : whether a pass more than these is an error, since the gradients may be on their way already.

    Attributes
    ----------
    step : number of the step, from 0.
    weight : factor of this step's gradients.
    over : whether the last pass of the step is over.
    """

    def __init__(self, replica: Replica, passes: int, strict: bool, listener: Listener) -> None:
        self._replica, self._passes, self._strict, self._listener = replica, passes, strict, listener
        self.step, self.weight, self.over = 0, 1.0, False
        self._begin()
        replica.watch(self._gathered)

    def _begin(self) -> None:
        self._counts = [0] * len(self._replica.tensors)
        self._complete_from = len(self._counts)
        self._passed, self._under_way = 0, False

    def next_step(self) -> None:
        """The optimizer has made its step."""
        self.step, self.weight, self.over = self.step + 1, 1.0, False
        self._begin()

    def end(self) -> None:
        """Bring in what no pass has reached: parameters that were not used, gradients that were set by hand."""
        for index, count in enumerate(self._counts):
            if not count:
                self._replica.gather(index)
        self.over = True

    def _gathered(self, index: int) -> None:
        if not self._under_way:
            self._start()
        self._counts[index] += 1
        name = self._replica.names[index]
        if self._counts[index] > self._passes and self._strict:
            raise TrainError(f"step {self.step + 1}: the gradient of {name} comes in a {self._counts[index]}. time "
                             f"before opt.step(); for several backward passes per step: init(passes=...)")
        if self._strict:
            self._replica.look(index)
        if self._counts[index] == self._passes:
            if self.weight != 1:
                self._replica.scale(index, self.weight)
            self._advance()

    def _advance(self) -> None:
        before = self._complete_from
        while self._complete_from and self._counts[self._complete_from - 1] >= self._passes:
            self._complete_from -= 1
        if self._complete_from < before:
            self._listener.ready(self._replica.starts[self._complete_from])

    def _start(self) -> None:
        from torch.autograd import Variable

        self._under_way = True
        # as torch's own DistributedDataParallel learns of the end of a pass
        Variable._execution_engine.queue_callback(self._pass_over)
        self._listener.begun()

    def _pass_over(self) -> None:
        self._under_way = False
        self._passed += 1
        if self._passed == self._passes:
            self._listener.complete()
