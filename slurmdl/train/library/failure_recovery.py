"""Recovery from rank failures.

The surviving ranks agree on who they are and on the step from which all continue: that of the most advanced rank. The
others train by themselves until then. If models are mixed, all continue with the mean of the survivors' models, as at
the start with identical models, so that all state about peers can be rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from slurmdl.errors import warn
from slurmdl.train.library import consistency
from slurmdl.train.library.replica import Replica
from slurmdl.train.strategies import Strategy, StrategyContext
from slurmdl.train.transports.transport import RankFailedError
from slurmdl.train.world import World, no_recovery_reason

Result = TypeVar("Result")


class FailureRecovery:
    """Owner of the strategy, which is replaced when ranks fail.

    Attributes:
        strategy: this rank's current strategy; read it at each use.
        has_checkpoints: whether the run has checkpoints; if so, all ranks end after a failure, and the job restarts.
        failed_ranks: rank and node of each failed rank, and the step, from 0, from which the others continued.
    """

    def __init__(self, world: World, replica: Replica, optimizer: Any, context: StrategyContext, strategy: Strategy,
                 has_checkpoints: bool) -> None:
        self._world, self._replica, self._optimizer, self._context = world, replica, optimizer, context
        self.strategy, self.has_checkpoints = strategy, has_checkpoints
        self.failed_ranks: list[dict[str, Any]] = []
        #: run step that is the strategy's step 0
        self._first_step = 0
        self._exchanges = self._exchanges_skipped = 0
        #: keeps receive buffers of aborted requests alive: a peer may still write to them
        self._aborted_errors: list[RankFailedError] = []

    @property
    def exchange_counts(self) -> tuple[int, int]:
        """Total `exchanges` and `exchanges_skipped` of all strategies so far."""
        return self._exchanges + self.strategy.exchanges, self._exchanges_skipped + self.strategy.exchanges_skipped

    @property
    def policy(self) -> str:
        """Description of the consequences of a rank failure."""
        transport = self._world.transport
        reason = self._unrecoverable_reason if transport.recovery_name else no_recovery_reason()
        return f"all ranks end ({reason})" if reason else f"the others continue ({transport.recovery_name})"

    @property
    def _unrecoverable_reason(self) -> str:
        """Reason why all ranks end after a failure, "" if the others can continue."""
        if self.has_checkpoints:
            return "a checkpoint needs all ranks"
        if self._world.config.load_balance:
            return "--load-balance needs all ranks"
        return "" if self.strategy.survives_rank_failure else f"{self._world.strategy} needs all ranks"

    def is_behind(self, step: int) -> bool:
        """Whether other ranks are ahead of this one, which makes a step, after a failure."""
        return step < self._first_step

    def after_optimizer_step(self, step: int) -> None:
        """Run the strategy after the update of a step, unless other ranks are ahead after a failure."""
        if not self.is_behind(step):
            with self.recovering(step + 1):
                self.strategy.after_optimizer_step(step - self._first_step)

    @contextmanager
    def recovering(self, step: int) -> Iterator[None]:
        """Recover from rank failures inside, which abort the strategy's part in a step.

        `step` is the next step of this rank. Raises RankFailedError if the run cannot continue.
        """
        try:
            yield
        except RankFailedError as error:
            self._recover(error, step)

    def retry_until_agreed(self, action: Callable[[], Result], step: int) -> Result:
        """Run a collective action and return its result; repeat it on the survivors until no rank fails meanwhile."""
        while True:
            failure: RankFailedError | None = None
            try:
                result = action()
            except RankFailedError as error:
                failure = error
            if failure is None and self._agree(True):
                return result
            self._recover(failure, step, agreed=failure is None)

    def _agree(self, done: bool) -> bool:
        return bool(self._context.comm_thread.call(lambda: self._world.transport.agree(done)))

    def _recover(self, error: RankFailedError | None, step: int, agreed: bool = False) -> None:
        previously_alive = self._world.transport.alive_ranks
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
                self._rebuild_strategy(previously_alive, step)
                return
            except RankFailedError as further_error:
                error, agreed = further_error, False

    def _rebuild_strategy(self, previously_alive: tuple[int, ...], step: int) -> None:
        """Rebuild the strategy for the surviving ranks. Collective over them."""
        world, old, call = self._world, self.strategy, self._context.comm_thread.call
        transport, workers, servers = world.transport, world.alive_with_role("worker"), world.alive_with_role("ps")
        old.abort()
        entries = call(lambda: transport.allgather((step, old.model_weight)))
        most_advanced = max(entry[0] for entry in entries if entry)
        if not old.identical_at_end:
            weight = old.model_weight / sum(entries[worker][1] for worker in workers)
            self._replica.copy_to_host()
            call(lambda: consistency.average_models(self._context.p2p, workers, self._replica.parameters, weight))
            self._replica.copy_to_device()
        self._context = replace(self._context, workers=workers, servers=servers, parameters=self._replica.parameters)
        self.strategy = old.without_failed_ranks(self._context)
        for group in self.strategy.replica_groups:
            if world.rank in group:  # its ranks may differ by one step
                source = max(group, key=lambda rank: entries[rank][0])
                call(partial(consistency.broadcast_optimizer_state, self._context.p2p, source, group,
                             self._optimizer))
        self._exchanges += old.exchanges
        self._exchanges_skipped += old.exchanges_skipped
        # asynchronous ranks need not wait for the most advanced one
        self._first_step = step if world.config.asynchronous else most_advanced
        failed = [rank for rank in previously_alive if rank not in transport.alive_ranks]
        self.failed_ranks += [{"rank": rank, "node": world.nodes[rank], "step": self._first_step} for rank in failed]
        if world.rank == transport.alive_ranks[0]:
            warn(f"train: {transport.recovery_name}: continues without {self._format_ranks(failed)}, from step "
                 f"{self._first_step + 1}")

    def _unrecoverable(self, ranks: Sequence[int], step: int, reason: str) -> RankFailedError:
        message = f"{self._format_ranks(ranks)} failed in step {step}; all ranks end, since {reason}"
        return RankFailedError(ranks, message, self.has_checkpoints, self._world.nodes)

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._world.format_rank, ranks)) or "a rank"
