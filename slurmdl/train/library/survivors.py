"""What is left of a run where ranks are lost, and how it goes on.

The living agree on who they are, and on the step from which all go on: that of the one which is furthest. Those
behind train by themselves until then. Where models are mixed, all begin with the mean of the living's models, as at
the start with the first model, so that whatever ranks keep of each other can be made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from slurmdl.errors import warn
from slurmdl.train.library import agreement
from slurmdl.train.library.replica import Replica
from slurmdl.train.runtime import World
from slurmdl.train.strategies import Setting, Strategy
from slurmdl.train.transports.transport import LostRank

Result = TypeVar("Result")


class Survivors:
    """The ranks that live, as one of them sees them.

    Parameters
    ----------
    ends : why all end where one is lost; "" where the others go on.
    kept : see LostRank.

    Attributes
    ----------
    strategy : this rank's part in it, with the others that live.
    lost : rank, node and step of each lost rank, as the summary has them; the step is that from which the others went
        on, counted from 0.
    """

    def __init__(self, world: World, replica: Replica, setting: Setting, strategy: Strategy, ends: str,
                 kept: bool) -> None:
        self._world, self._replica, self._setting, self._ends, self._kept = world, replica, setting, ends, kept
        self.strategy = strategy
        self.lost: list[dict[str, Any]] = []
        #: the step that is the strategy's first
        self._begin = 0
        self._fired = self._skipped = 0
        #: what was under way when a rank was lost: a partner may still write into its memory
        self._broken_off: list[LostRank] = []

    @property
    def exchanges(self) -> tuple[int, int]:
        """How many were made and left out in all, see Strategy.fired."""
        return self._fired + self.strategy.fired, self._skipped + self.strategy.skipped

    def after_update(self, step: int) -> None:
        """The strategy's part after the update of a step; nothing where others are ahead, see above."""
        if step >= self._begin:
            with self.staying(step + 1):
                self.strategy.after_update(step - self._begin)

    @contextmanager
    def staying(self, step: int) -> Iterator[None]:
        """Around the strategy's part in a step: where a rank is lost meanwhile, it is broken off.

        Parameters
        ----------
        step : the next one of this rank then.

        Raises
        ------
        TrainError : the run cannot go on without that rank.
        """
        try:
            yield
        except LostRank as error:
            self._go_on(error, step)

    def all_do(self, deed: Callable[[], Result], step: int) -> Result:
        """What a deed of all ranks returns; done anew by all that live, until none is lost meanwhile."""
        while True:
            lost: LostRank | None = None
            try:
                result = deed()
            except LostRank as error:
                lost = error
            if lost is None and self._agree(True):
                return result
            self._go_on(lost, step, agreed=lost is None)

    def _agree(self, done: bool) -> bool:
        return bool(self._setting.courier.do(lambda: self._world.transport.agree(done)))

    def _go_on(self, error: LostRank | None, step: int, agreed: bool = False) -> None:
        before = self._world.transport.living
        if self._ends:
            raise self._end_of_all(error.ranks if error else (), step, self._ends)
        while True:
            if error:
                self._broken_off.append(error)
            self._setting.courier.forgive()
            if not agreed:
                self._agree(False)
            for role in ("worker", "ps"):
                if role in self._world.roles and not self._world.living(role):
                    raise self._end_of_all(self._world.ranks(role), step, f"no {role} is left")
            try:
                self._begin_anew(before, step)
                return
            except LostRank as another:
                error, agreed = another, False

    def _begin_anew(self, before: tuple[int, ...], step: int) -> None:
        """Make the strategy of the living, `before` those of before; a call of all of them."""
        world, old, do = self._world, self.strategy, self._setting.courier.do
        transport, workers, servers = world.transport, world.living("worker"), world.living("ps")
        old.leave()
        told = do(lambda: transport.allgather((step, old.weight)))
        furthest = max(its[0] for its in told if its)
        if not old.alike:
            share = old.weight / sum(told[worker][1] for worker in workers)
            self._replica.fetch_parameters()
            do(lambda: agreement.average(self._setting.messages, workers, self._replica.parameters, share))
            self._replica.store_parameters()
        self._setting = replace(self._setting, workers=workers, servers=servers, parameters=self._replica.parameters)
        self.strategy = old.without(self._setting)
        self._fired, self._skipped = self._fired + old.fired, self._skipped + old.skipped
        # who waits for nobody need not be waited for
        self._begin = step if world.method.asynchronous else furthest
        lost = [rank for rank in before if rank not in transport.living]
        self.lost += [{"rank": rank, "node": world.nodes[rank], "step": self._begin} for rank in lost]
        if world.rank == transport.living[0]:
            warn(f"train: {transport.recovery}: goes on without {self._words(lost)}, from step {self._begin + 1}")

    def _end_of_all(self, ranks: Sequence[int], step: int, why: str) -> LostRank:
        return LostRank(ranks, f"{self._words(ranks)} is lost in step {step}; all ranks end, since {why}",
                        self._kept)

    def _words(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {self._world.nodes[rank]}" for rank in ranks) or "a rank"
