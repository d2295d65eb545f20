"""Asynchronous gossip: a worker pushes its model to another one, and nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.graphs import GRAPHS, Members
from slurmdl.train.mixing.sums import Sum
from slurmdl.train.strategies.strategy import Setting, Strategy
from slurmdl.train.triggers import TRIGGERS, Cost

#: of messages that carry a model
_TAG = 1
_HEADER = 8
#: the part of its weight that a model gives away at most, and how many times as much as one that is to weigh more
_PART, _RATIO = 0.5, 4
#: the power of its weight by which a light model gives away less
_POWER = 3
#: a model of less weight is not halved any more: others have hardly anything to gain from it
_LEAST = 2.0 ** -20


class Push(Strategy):
    """Each model has a weight, 1 at first. A sender keeps one half and sends the model with the other; the receiver
    takes the weighted mean of its own and of what came, and the sum of the weights. So the weighted sum of all
    models, those under way included, stays what it is.

    What is sent to a slow worker lies there until its step is over. Were always halves sent, most of the weight would
    lie there where one of eight is 4 times slower, and the others' steps count for little. So a model that weighs
    less than it is to weigh gives away less: w^3 / 2 of its weight w. Where as much flows from each to the others,
    a rank that sends r times as often weighs 1 / r^(1/4) as much. One that is to weigh more than others, since it
    stands for several ranks or for larger batches, gives away less in that ratio, too; then, where all send as often,
    weights are in the mean what they are to be.

    A push that would have to wait for the one before it is left out. Messages are received while the rank computes,
    and mixed in between the optimizer's step and the next forward pass.

    References
    ----------
    M. Blot, D. Picard, M. Cord, N. Thome: Gossip training for deep learning. 2016. arXiv:1611.09726
    M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning. ICML 2019.
    arXiv:1811.10792
    """

    meets = False
    survives = True
    kept: tuple[str, ...] = ("_trigger", "_due", "_turn")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        method, size = setting.method, setting.parameters.size
        zones = [setting.zones[worker] for worker in setting.workers]
        self._graph = GRAPHS[method.traffic or ""](Members(zones, setting.seed, setting.costs))
        self._compressor = COMPRESSORS[method.compress]
        message = _HEADER + self._compressor.size(size)
        count = len(setting.workers)
        cost = Cost(message, 0.0, 8.0 * (size + count) * (count - 1) / count)
        self._trigger = TRIGGERS[method.when](method, setting.parameters, setting.sizes, setting.rate, cost)
        self._due = self._trigger.next(-1)
        self._turn = 0
        self.weight = setting.relative[setting.place]
        self._goes, self._comes = np.empty(message, np.uint8), np.empty(message, np.uint8)
        #: one for each of the two threads
        self._left_out, self._came = np.empty_like(setting.parameters), np.empty_like(setting.parameters)
        #: weighted sum of what came, and its weight; the spare one is empty
        self._box, self._spare, self._boxed = np.zeros(size, np.float32), np.zeros(size, np.float32), 0.0
        self._leaving: Any = None
        self._arriving: Any = None
        self._sent = np.zeros(count, np.float32)
        self._received = 0
        setting.courier.attend(self._progress)

    def after_update(self, number: int) -> None:
        free, changed = self._take_in()
        if number == self._due:
            changed |= self._exchange(number, free)
        if changed:
            self._its.copies.store_parameters()

    def _exchange(self, number: int, free: bool) -> bool:
        """Push in a step that is due, where that is wanted and a push can leave at once; whether it has."""
        trigger, its = self._trigger, self._its
        its.copies.fetch_parameters()
        wanted = trigger.sure(number) or trigger.urgency(number) >= 1
        to = int(self._graph.round(self._turn).target[its.place])
        self._turn += 1
        going = wanted and free and to != its.place and self.weight >= _LEAST
        if going:
            self._push(to)
        self.fired += going
        self.skipped += not going and to != its.place
        trigger.settle(number, going)
        self._due = trigger.next(number)
        return going

    def pause(self, number: int) -> None:
        """Receive all that was sent to this rank: the ranks tell each other how much that is."""
        its = self._its
        arriving = self._sent
        its.courier.do(Sum(its.messages, [its.workers], arriving).run)
        its.courier.do(lambda: self._drain(int(arriving[its.place])))
        self._take_in()
        self._sent.fill(0)
        self._received = 0

    def renew(self, state: Mapping[str, Any], number: int) -> None:
        super().renew(state, number)
        self._turn, self._due = state.get("_turn", 0), self._trigger.next(number - 1)
        self._trigger.joined(number - 1)

    def finish(self) -> None:
        self.pause(0)
        self._its.courier.neglect(self._progress)

    def _push(self, to: int) -> None:
        its, parameters = self._its, self._its.parameters
        weights = its.relative
        its_own = weights[its.place]
        part = _PART * min(1.0, self.weight / its_own) ** _POWER * max(min(weights) / its_own, 1 / _RATIO)
        self._goes[:_HEADER].view(np.float64)[0] = part * self.weight
        self.weight -= part * self.weight
        self._goes[_HEADER:] = self._compressor.pack(parameters, np.random.default_rng((its.seed, its.place)))
        # what the compressor leaves out stays here, with the weight that stays
        self._compressor.unpack(self._goes[_HEADER:], self._left_out)
        np.subtract(parameters, self._left_out, out=self._left_out)
        self._left_out *= np.float32(part / (1 - part))
        parameters += self._left_out
        self._sent[to] += 1
        its.courier.give(lambda: self._leave(its.workers[to]))

    def _leave(self, peer: int) -> None:
        self._leaving = self._its.messages.send(peer, self._goes, _TAG)

    def _take_in(self) -> tuple[bool, bool]:
        """Mix in what came; whether a push can leave at once, and whether any came."""
        box, weight, free = self._its.courier.do(self._hand_over)
        if weight:
            self._its.copies.fetch_parameters()
            parameters = self._its.parameters
            parameters *= np.float32(self.weight / (self.weight + weight))
            box *= np.float32(1 / (self.weight + weight))
            parameters += box
            self.weight += weight
            box.fill(0)
        return bool(free), bool(weight)

    def _hand_over(self) -> tuple[Any, float, bool]:
        """What came, its weight, and whether nothing is leaving; an errand."""
        self._progress()
        full, weight = self._box, self._boxed
        if weight:
            self._box, self._spare, self._boxed = self._spare, full, 0.0
        return full, weight, self._leaving is None

    def _progress(self) -> bool:
        """Help messages on; an errand, or between errands. Whether any came, or is under way."""
        transport = self._its.messages.transport
        moved = False
        if self._leaving is not None and transport.test([self._leaving]):
            self._leaving, moved = None, True
        if self._arriving is None:
            peer = transport.probe(_TAG)
            if peer is not None:
                self._arriving, moved = transport.receive(peer, self._comes, _TAG), True
        if self._arriving is not None and transport.test([self._arriving]):
            weight = float(self._comes[:_HEADER].view(np.float64)[0])
            self._compressor.unpack(self._comes[_HEADER:], self._came)
            self._came *= np.float32(weight)
            self._box += self._came
            self._boxed += weight
            self._received += 1
            self._arriving, moved = None, True
        return moved or self._leaving is not None or self._arriving is not None

    def _drain(self, expected: int) -> None:
        """Nobody sends any more: what is under way arrives without a wait for anybody."""
        while self._received < expected or self._leaving is not None:
            self._progress()
