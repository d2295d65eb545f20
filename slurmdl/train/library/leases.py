"""Samples for workers that do not wait for each other: whoever needs some asks the first worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.courier import Courier
from slurmdl.train.library.balance import Shares, batches
from slurmdl.train.library.deal import Deal, Hand, Hands
from slurmdl.train.messages import Messages

Numbers = npt.NDArray[np.float64]

#: of messages that ask, and of those that answer
_ASK, _ANSWER = 5, 6
#: steps that a worker gets at a time at most, and the part at most of what it is yet expected to make until the end
LONGEST, PART = 8, 0.25
#: what an answer begins with
_GRANTED, _EPOCH_OVER, _RUN_OVER = range(3)
#: what a worker asks that needs no more
_LEAVES = -1


class Dealer:
    """Deals out an epoch, and then the next, to whoever asks.

    So each worker makes as many steps as its speed lets it make. What it gets at a time becomes less towards the end
    of the run, and it gets nothing any more once the others would be through with the rest before it: so all end at
    about the same time.

    Parameters
    ----------
    by_steps : whether all batches are alike; else they are in proportion to speed.

    References
    ----------
    C. D. Polychronopoulos, D. J. Kuck: Guided self-scheduling: a practical scheduling scheme for parallel
    supercomputers. IEEE Trans. Computers C-36 (1987). doi:10.1109/TC.1987.5009495
    """

    def __init__(self, deal: Deal, by_steps: bool) -> None:
        self._deal, self._by_steps = deal, by_steps
        self._epoch = self._cursor = 0
        self._speeds = [0.0] * deal.workers
        self._going = set(range(deal.workers))
        self._shares, self._sizes = Shares(deal.workers), [deal.batch] * deal.workers

    def answer(self, worker: int, epoch: int, cursor: int, until: float, speed: float) -> Numbers:
        """What a worker gets.

        Parameters
        ----------
        epoch : that the worker is in; the first one to be in a new one begins it, at `cursor`.
        until : steps of the run; infinite for no end.
        speed : of the worker, 0 where it is not known yet.

        Returns
        -------
        shape (4 + workers,): whether there is something, and why not; start and stop in the epoch's order; steps that
        it is for; and the batches of all workers.
        """
        deal, sizes = self._deal, self._sizes
        self._epoch, self._cursor = max((epoch, cursor), (self._epoch, self._cursor))
        self._speeds[worker] = speed
        speeds = self._known()
        if not self._by_steps and self._shares.follow(speeds, position(deal, self._epoch, self._cursor)):
            sizes = self._sizes = batches(deal, self._shares.values)
        found = np.array([_GRANTED, self._cursor, self._cursor, 0, *sizes], np.float64)
        rest = self._until(until)
        if rest <= 0 or self._late(worker, rest, speeds):
            found[0] = _RUN_OVER
            self._going.discard(worker)
        elif epoch < self._epoch or self._cursor == deal.count:
            found[0] = _EPOCH_OVER
        else:
            share = PART * rest * speeds[worker] / fsum(speeds) / sizes[worker]
            samples = int(min(deal.count - self._cursor, rest, max(1, int(min(LONGEST, share))) * sizes[worker]))
            self._cursor += samples
            # the last samples of an epoch need not fill their batches
            found[2:4] = self._cursor, max(1, round(samples / sizes[worker]))
        return found

    def _known(self) -> list[float]:
        """The workers' speeds; those not known yet are as the others' mean."""
        known = [speed for speed in self._speeds if speed]
        return [speed or (fsum(known) / len(known) if known else 1.0) for speed in self._speeds]

    def _until(self, until: float) -> float:
        """Samples that are left until so many steps of the run."""
        if until == math.inf:
            return until
        deal = self._deal
        epochs, steps = divmod(until, deal.steps)
        return (epochs - self._epoch) * deal.count + steps * deal.whole - self._cursor

    def _late(self, worker: int, rest: float, speeds: Sequence[float]) -> bool:
        """Whether those who go on make all the rest, and the quickest a step more, while this one makes a step."""
        going = self._going | {worker}
        takes = {its: self._sizes[its] / speeds[its] for its in going}
        return takes[worker] > rest / fsum(speeds[its] for its in going) + min(takes.values())


def position(deal: Deal, epoch: int, cursor: int) -> int:
    """Steps that the workers have made in the mean when so much is dealt."""
    return epoch * deal.steps + cursor // deal.whole


class Leases(Hands):
    """One worker's side; the first worker's also answers the others, in its communication thread.

    A worker asks for the next samples as soon as it has some, so that the answer is there when it needs it.

    Parameters
    ----------
    speed : of this worker now.
    """

    def __init__(self, messages: Messages, courier: Courier, workers: Sequence[int], deal: Deal, by_steps: bool,
                 speed: Callable[[], float]) -> None:
        self._messages, self._courier, self._workers = messages, courier, workers
        self._deal, self._by_steps, self._speed = deal, by_steps, speed
        self._place = workers.index(messages.rank)
        self._dealer = Dealer(deal, by_steps) if self._place == 0 else None
        #: what this worker asks and is answered, and what is under way of it
        self._asks, self._answer = np.empty(4), np.empty(4 + len(workers))
        self._asked: list[Any] = []
        self._over = False
        #: worker -> the last answer to it, on its way; and how many need no more
        self._answers: dict[int, tuple[Any, Numbers]] = {}
        self._left = 0
        if self._dealer:
            courier.attend(self._help)

    def deal(self, epoch: int, cursor: int, until: int | None) -> Iterator[Hand]:
        if self._asked:  # in an epoch that was broken off
            self._take()
        self._ask(epoch, cursor, until)
        while True:
            kind, start, stop, steps, *sizes = (int(number) for number in self._take())
            if kind != _GRANTED:
                self._over = kind == _RUN_OVER
                return
            self._ask(epoch, cursor, until)
            batch = self._deal.batch
            weights = () if self._by_steps else tuple(size / batch for size in sizes)
            for number in range(steps):
                begin, end = (start + (stop - start) * each // steps for each in (number, number + 1))
                made = position(self._deal, epoch, end)
                yield Hand(begin, end, end, range(made, made), (end - begin) / batch, weights)

    def over(self, until: int) -> bool:
        return self._over

    def help(self) -> None:
        """Answer those who have asked, after each step, where no thread does it meanwhile."""
        if self._dealer:
            self._courier.do(self._help_all)

    def finish(self) -> None:
        """This worker needs no more; the first one answers the others until they need no more, either."""
        if self._dealer:
            self._courier.do(self._serve)
            self._courier.neglect(self._help)
        else:
            if self._asked:
                self._take()
            self._ask(_LEAVES, 0, None)
            self._take()

    def _ask(self, epoch: int, cursor: int, until: int | None) -> None:
        self._asks[:] = epoch, cursor, math.inf if until is None else until, self._speed()
        if not self._dealer:
            self._asked = self._courier.do(self._send)

    def _send(self) -> list[Any]:
        first, messages = self._workers[0], self._messages
        return [messages.send(first, self._asks, _ASK), messages.transport.receive(first, self._answer, _ANSWER)]

    def _take(self) -> Numbers:
        if self._dealer:
            self._answer = self._courier.do(lambda: self._granted(0, self._asks))
        else:
            self._courier.do(self._arrive)
            self._asked = []
        return self._answer

    def _arrive(self) -> None:
        with self._messages.awaiting():
            self._messages.transport.wait(self._asked)

    def _help_all(self) -> None:
        while self._help():
            pass

    def _help(self) -> bool:
        """Answer one who has asked; an errand, or between errands."""
        transport = self._messages.transport
        peer = transport.probe(_ASK)
        if peer is None:
            return False
        worker, asks = self._workers.index(peer), np.empty_like(self._asks)
        transport.wait([transport.receive(peer, asks, _ASK)])
        answer = self._granted(worker, asks)
        # the answer before this one was there, or the worker would not have asked
        self._answers[worker] = self._messages.send(peer, answer, _ANSWER), answer
        self._left += asks[0] == _LEAVES
        return True

    def _granted(self, worker: int, asks: Numbers) -> Numbers:
        assert self._dealer
        epoch, cursor, until, speed = asks.tolist()
        return self._dealer.answer(worker, int(epoch), int(cursor), until, speed)

    def _serve(self) -> None:
        transport = self._messages.transport
        while self._left < len(self._workers) - 1:
            transport.first([], _ASK)
            self._help()
        transport.wait([request for request, _ in self._answers.values()])
