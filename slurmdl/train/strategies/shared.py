"""Gossip through shared memory inside each node, and by messages between one leader per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from slurmdl.plan import by_zone
from slurmdl.train.mixing.graphs import GRAPHS, Members, Weighted
from slurmdl.train.strategies.strategy import Copies, Setting, Strategy
from slurmdl.train.transports.window import Window, mean, mix_both
from slurmdl.train.triggers import TRIGGERS, Cost


def leaders(workers: Sequence[int], nodes: Sequence[str], zones: Sequence[str]) -> tuple[int, ...]:
    """The first worker of each node, ordered by zone."""
    first = [group[0] for group in by_zone(workers, nodes)]
    return tuple(leader for zone in by_zone(first, zones) for leader in zone)


class Shared(Strategy):
    """Every step mixes models inside the nodes; where an exchange between nodes is due, leaders make it for all.

    The models themselves are in shared memory until the end. In a step without an exchange, the ranks of a node play
    the graph `base`: once both of a pair are there, each mixes one half of both models, in place, so that nothing is
    copied. Where an exchange is due, each node's mean is made in shared memory, a part by each of its ranks; the
    leaders, ordered by zone, play the strategy `between` with these means; and all ranks of the node go on with what
    came of it. All this keeps the sum of the models, to the rounding of fp32; where they have weights, the weighted
    sum, and a leader's is that of its node.

    Asynchronous, a rank mixes in the newest whole copy of a model that a rank of its node has published, and the
    leader plays `between` with its own model. Nobody waits, and the sum is not kept: one of two partners may mix in
    what the other has left behind. A new model is always a weighted mean of models, so none leaves their range.

    Parameters
    ----------
    between : what makes the leader's part between nodes; its workers are the leaders.

    Attributes
    ----------
    fired, skipped : exchanges between nodes; where there is one node, and asynchronous, those inside nodes, too.

    References
    ----------
    X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous decentralized parallel stochastic gradient descent. ICML 2018.
    arXiv:1710.06952
    """

    survives = True
    kept: tuple[str, ...] = ("_between", "_trigger", "_due", "_dues")

    def __init__(self, setting: Setting, between: Callable[[Setting], Strategy]) -> None:
        super().__init__(setting)
        self.meets = not setting.method.asynchronous
        self._play = between
        rank, groups = setting.messages.rank, by_zone(setting.workers, setting.nodes)
        self._group = next(group for group in groups if rank in group)
        leading = leaders(setting.workers, setting.nodes, setting.zones)
        self._base, self._weights = GRAPHS["base"](Members([""] * len(self._group))), (1.0,) * len(self._group)
        self._inside = Weighted(self._base, self._weights)
        self._place = self._group.index(rank)
        self._weights_of = setting.weights_of
        share, size = setting.messages.transport.share, setting.parameters.size
        self._window = setting.courier.do(lambda: Window(share, rank, self._group, size))
        if not setting.method.asynchronous:
            setting.settle(self._window.model(rank))
            setting = self._its = replace(setting, parameters=self._window.model(rank))
        self._between = None
        self._alone = len(leading) == 1
        method = setting.method
        # what is sent is the leaders' alone; steps are due for all alike
        self._trigger = TRIGGERS[method.when](method, setting.parameters, setting.sizes, setting.rate, Cost(0.0))
        self._due, self._dues = self._trigger.next(-1), 0
        if rank in leading and not self._alone:
            nodes = [group for leader in leading for group in groups if leader in group]
            its = replace(setting, workers=leading,
                          weights=lambda: tuple(sum(self._weights_of(group)) for group in nodes))
            if not method.asynchronous:
                self._window.common[:] = setting.parameters
                its = replace(its, parameters=self._window.common, copies=Copies())
            self._between = between(its)

    def after_update(self, number: int) -> None:
        self._its.copies.fetch_parameters()
        if self._its.method.asynchronous:
            self._mix_without_waiting(number)
        elif self._is_due(number) and not self._alone:
            self._mix_between(number)
        else:
            self._its.courier.do(lambda: self._mix_inside(number))
        self._its.copies.store_parameters()

    def _is_due(self, number: int) -> bool:
        """Whether the leaders need their nodes' means in this step: to exchange them, or to look at them."""
        trigger, due, every = self._trigger, self._due, self._its.method.global_every
        if number == due:
            self._dues += 1
            self._due = trigger.next(number)
            return True
        looks = not trigger.sure(due) and number == trigger.look(due)
        return looks or (bool(every) and (number + 1) % every == 0)

    def _mix_inside(self, number: int) -> None:
        weights = self._weights_of(self._group)
        if weights != self._weights:
            self._inside, self._weights = Weighted(self._base, weights), weights
        turn = self._inside.round(number)
        other = turn.target[self._place]
        rank, peer = self._its.messages.rank, self._group[other]
        if peer == rank:
            return
        with self._meeting([peer], number):
            size = self._its.parameters.size
            half = slice(0, size // 2) if rank < peer else slice(size // 2, size)
            mix_both(self._window.model(rank)[half], self._window.model(peer)[half],
                     (float(turn.weight[self._place]), float(turn.weight[other])))
        self._await([peer], "mixed", number)
        self.fired += self._alone

    @contextmanager
    def _meeting(self, peers: Sequence[int], number: int) -> Iterator[None]:
        """Around what reads and writes models of peers, all of which are in this step, too."""
        self._window.tell("ready", number)
        self._await(peers, "ready", number)
        yield
        self._window.tell("mixed", number)

    def _await(self, peers: Sequence[int], word: str, number: int) -> None:
        with self._its.messages.awaiting():
            for peer in peers:
                self._window.wait(peer, word, number)

    def _mix_between(self, number: int) -> None:
        courier, window = self._its.courier, self._window
        courier.do(lambda: self._mean(number))
        if self._between:
            courier.do(lambda: self._await(self._group, "mixed", number))
            self._between.after_update(number)
            self.fired = self._between.fired
            courier.do(lambda: window.tell("made", self.fired))
            courier.do(lambda: window.tell("arrived", number))
        else:
            courier.do(lambda: self._await(self._group[:1], "arrived", number))
            self.fired = courier.do(lambda: window.told(self._group[0], "made"))
        self.skipped = self._dues - self.fired
        # it stays as it is until all are ready for another mean
        self._its.parameters[:] = window.common

    def _mean(self, number: int) -> None:
        """This rank's part of the node's mean."""
        size, count = self._its.parameters.size, len(self._group)
        part = slice(size * self._place // count, size * (self._place + 1) // count)
        with self._meeting(self._group, number):
            mean([self._window.model(peer)[part] for peer in self._group], self._window.common[part],
                 self._weights_of(self._group))

    def _mix_without_waiting(self, number: int) -> None:
        if len(self._group) > 1:
            draw = np.random.default_rng((self._its.seed, self._its.messages.rank, number))
            peer = self._group[self._place - int(draw.integers(1, len(self._group)))]
            own, its = self._weights_of((self._its.messages.rank, peer))
            taken = self._its.courier.do(lambda: self._window.blend(number, self._its.parameters, peer,
                                                                    its / (own + its)))
            self.fired += taken
            self.skipped += not taken
        if self._between:
            before = self._between.fired, self._between.skipped
            self._between.after_update(number)
            self.fired += self._between.fired - before[0]
            self.skipped += self._between.skipped - before[1]

    def pause(self, number: int) -> None:
        if self._between:
            self._between.pause(number)

    def renew(self, state: Mapping[str, Any], number: int) -> None:
        super().renew(state, number)
        self._due = self._trigger.next(number - 1)
        if self._between:
            self._between.renew(state["_between"] or {}, number)

    def leave(self) -> None:
        """The window stays until the process ends, as it takes all of its ranks to give it back."""
        self._move_out()

    def without(self, setting: Setting) -> Strategy:
        return Shared(setting, self._play)

    def finish(self) -> None:
        [self.weight] = self._weights_of((self._its.messages.rank,))
        if self._between:
            self._between.finish()
        self._move_out()
        self._its.courier.do(self._window.close)

    def _move_out(self) -> None:
        if not self._its.method.asynchronous:
            self._its.settle(np.empty_like(self._its.parameters))
