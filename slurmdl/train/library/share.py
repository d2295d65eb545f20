"""What one worker is dealt of the work, and how quick it is with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slurmdl.errors import TrainError
from slurmdl.train.library.balance import Balance, Speed, alike
from slurmdl.train.library.deal import Deal, Hand, Hands, InRounds
from slurmdl.train.library.leases import Leases
from slurmdl.train.mixing.votes import gathered

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class Share:
    """One worker's share.

    Attributes
    ----------
    hand : what the step that is under way was dealt; None between steps, and where a batch is none of `run.loader`.
    weights : entry i, how many models that of worker i stands for; () where all stand for as many.
    done : steps that the workers have made in the mean, where each makes as many as it can.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.hand: Hand | None = None
        self.weights: tuple[float, ...] = ()
        self.done = 0
        self._speed = Speed()
        self._balance: Balance | None = None
        self._leases: Leases | None = None
        self._stood = 0.0

    def hands(self, deal: Deal, ahead: int) -> Hands:
        """What deals out to this worker.

        Parameters
        ----------
        ahead : batches that are fetched before they are asked for.
        """
        run, method = self._run, self._run.world.method
        worker, by_steps = run.worker or 0, method.balance == "steps"
        if not run.balanced or run.serves:
            return InRounds(deal, worker, False, alike(run.workers), lambda: run.done)
        if not run.attached or self._balance or self._leases:
            raise TrainError(f"--balance {method.balance}: one run.loader() deals out all samples; valid: one, after "
                             "run.wrap()")
        courier, workers, messages = run.courier, run.world.ranks("worker"), run.messages
        if method.asynchronous:
            self._leases = Leases(messages, courier, workers, deal, by_steps, lambda: self._speed.value)
            return self._leases
        self._balance = Balance(
            deal, by_steps, run.strategy, 1 + ahead + (method.staleness or 0),
            lambda speed: courier.give(lambda: gathered(messages, workers, speed)), courier.wait)
        return InRounds(deal, worker, by_steps, self._balance.round, lambda: run.done)

    def fetch(self) -> None:
        """A batch is asked for; waiting for the communication thread meanwhile is no work."""
        self._stood = self._run.courier.seconds

    def fetched(self) -> None:
        self._stood = self._run.courier.seconds - self._stood

    def deal(self, hand: Hand) -> None:
        """This is what the step to come was dealt."""
        self.hand, self.weights = hand, hand.weights

    def numbers(self, step: int) -> Iterable[int]:
        """Steps of the strategy that end with step `step` of the optimizer."""
        return self.hand.steps if self._balance and self.hand else (step,)

    def account(self, seconds: float) -> int:
        """The step is over; returns its samples.

        The others hear how quick this worker is.

        Parameters
        ----------
        seconds : that it took, without communication.
        """
        run, hand, self.hand = self._run, self.hand, None
        samples = hand.stop - hand.start if hand else run.batch
        self._speed.measure(samples, seconds - self._stood)
        self._stood = 0.0
        if hand:
            self.done = hand.steps.stop
            if self._balance and hand.tells:
                self._balance.tell(self._speed.value)
        if self._leases and not run.world.transport.threaded:
            self._leases.help()
        return samples

    def finish(self) -> None:
        if self._leases:
            self._leases.finish()
