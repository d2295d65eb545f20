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
from slurmdl.train.library import consistency
from slurmdl.train.library.replica import Replica
from slurmdl.train.strategies import Strategy, StrategyContext
from slurmdl.train.transports.transport import RankFailedError
from slurmdl.train.world import World

Result = TypeVar("Result")


class FailureRecovery:
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

    def __init__(self, world: World, replica: Replica, context: StrategyContext, strategy: Strategy, unrecoverable_reason: str,
                 resumable: bool) -> None:
        self._world, self._replica, self._context, self._unrecoverable_reason, self._resumable = world, replica, context, unrecoverable_reason, resumable
        self.strategy = strategy
        self.failed_ranks: list[dict[str, Any]] = []
        #: the step that is the strategy's first
        self._first_step = 0
        self._exchanges = self._exchanges_skipped = 0
        #: what was under way when a rank was lost: a partner may still write into its memory
        self._aborted_errors: list[RankFailedError] = []

    @property
    def exchange_counts(self) -> tuple[int, int]:
        """How many were made and left out in all, see Strategy.fired."""
        return self._exchanges + self.strategy.exchanges, self._exchanges_skipped + self.strategy.exchanges_skipped

    def after_optimizer_step(self, step: int) -> None:
        """The strategy's part after the update of a step; nothing where others are ahead, see above."""
        if step >= self._first_step:
            with self.recovering(step + 1):
                self.strategy.after_optimizer_step(step - self._first_step)

    @contextmanager
    def recovering(self, step: int) -> Iterator[None]:
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
        except RankFailedError as error:
            self._recover(error, step)

    def retry_until_agreed(self, action: Callable[[], Result], step: int) -> Result:
        """What a deed of all ranks returns; done anew by all that live, until none is lost meanwhile."""
        while True:
            lost: RankFailedError | None = None
            try:
                result = action()
            except RankFailedError as error:
                lost = error
            if lost is None and self._agree(True):
                return result
            self._recover(lost, step, agreed=lost is None)

    def _agree(self, done: bool) -> bool:
        return bool(self._context.comm_thread.call(lambda: self._world.transport.agree(done)))

    def _recover(self, error: RankFailedError | None, step: int, agreed: bool = False) -> None:
        before = self._world.transport.alive_ranks
        if self._unrecoverable_reason:
            raise self._unrecoverable(error.ranks if error else (), step, self._unrecoverable_reason)
        while True:
            if error:
                self._aborted_errors.append(error)
            self._context.comm_thread.reset()
            if not agreed:
                self._agree(False)
            for role in ("worker", "ps"):
                if role in self._world.roles and not self._world.alive_with_role(role):
                    raise self._unrecoverable(self._world.ranks_with_role(role), step, f"no {role} is left")
            try:
                self._rebuild_strategy(before, step)
                return
            except RankFailedError as another:
                error, agreed = another, False

    def _rebuild_strategy(self, previously_alive: tuple[int, ...], step: int) -> None:
        """Make the strategy of the living, `before` those of before; a call of all of them."""
        world, old, do = self._world, self.strategy, self._context.comm_thread.call
        transport, workers, servers = world.transport, world.alive_with_role("worker"), world.alive_with_role("ps")
        old.abort()
        told = do(lambda: transport.allgather((step, old.model_weight)))
        furthest = max(its[0] for its in told if its)
        if not old.identical_at_end:
            share = old.model_weight / sum(told[worker][1] for worker in workers)
            self._replica.copy_to_host()
            do(lambda: consistency.average_models(self._context.p2p, workers, self._replica.parameters, share))
            self._replica.copy_to_device()
        self._context = replace(self._context, workers=workers, servers=servers, parameters=self._replica.parameters)
        self.strategy = old.shrink(self._context)
        self._exchanges, self._exchanges_skipped = self._exchanges + \
            old.exchanges, self._exchanges_skipped + old.exchanges_skipped
        # who waits for nobody need not be waited for
        self._first_step = step if world.config.asynchronous else furthest
        lost = [rank for rank in previously_alive if rank not in transport.alive_ranks]
        self.failed_ranks += [{"rank": rank, "node": world.nodes[rank], "step": self._first_step} for rank in lost]
        if world.rank == transport.alive_ranks[0]:
            warn(f"train: {transport.recovery_name}: goes on without {self._format_ranks(lost)}, from step {self._first_step + 1}")

    def _unrecoverable(self, ranks: Sequence[int], step: int, reason: str) -> RankFailedError:
        return RankFailedError(ranks, f"{self._format_ranks(ranks)} is lost in step {step}; all ranks end, since {reason}",
                        self._resumable)

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {self._world.nodes[rank]}" for rank in ranks) or "a rank"
