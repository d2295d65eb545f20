"""Gossip: every worker updates by itself, then averages its parameters with those of one other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.plan import by_zone
from slurmdl.train.mixing.edges import Edge, mixer
from slurmdl.train.mixing.graphs import GRAPHS, Members, Weighted
from slurmdl.train.mixing.sums import Sum
from slurmdl.train.strategies.push import Push
from slurmdl.train.strategies.shared import Shared
from slurmdl.train.strategies.strategy import Setting, Strategy
from slurmdl.train.strategies.triggered import Triggered
from slurmdl.train.triggers import Cost


def gossip(setting: Setting) -> Strategy:
    """This rank's part: in step with its partners, or asynchronous; by messages alone, or in shared memory, too."""
    method = setting.method
    by_messages = Push if method.asynchronous else Gossip
    return Shared(setting, by_messages) if method.shared_memory else by_messages(setting)


class Gossip(Triggered):
    """A weighted mean of two models in every exchange; the graph says of whose (slurmdl.graphs). Keeps the sum.

    Where a trigger looks at the models, the two of a pair tell each other by one byte whether they want to exchange,
    and do so if either wants.

    References
    ----------
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    Y. Chen et al.: Accelerating gossip SGD with periodic global averaging. ICML 2021. arXiv:2105.09080
    """

    survives = True
    kept: tuple[str, ...] = ("_mixer",)

    def __init__(self, setting: Setting) -> None:
        self._mixer = mixer(setting.method.compress, setting.parameters, self._swap)
        count = len(setting.workers)
        once = 8.0 * setting.parameters.size * (count - 1) / count
        every = setting.method.global_every
        super().__init__(setting, Cost(self._mixer.size, 1.0, once, once / every if every else 0.0))
        zones = [setting.zones[worker] for worker in setting.workers]
        graph = GRAPHS[setting.method.traffic or ""](Members(zones, setting.seed, setting.costs))
        self._plain, self._weights = graph, (1.0,) * count
        self._graph = Weighted(graph, self._weights, self._mixer.most)
        self._place = setting.place
        self._all: Sum | None = None
        if every:
            # not in place: where a rank is lost meanwhile, the model must still be there
            self._mean = np.empty_like(setting.parameters)
            self._all = Sum(setting.messages, by_zone(setting.workers, setting.zones), self._mean)
        self._flag, self._theirs = np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def after_update(self, number: int) -> None:
        super().after_update(number)
        every = self._its.method.global_every
        if self._all and (number + 1) % every == 0:
            self._its.copies.fetch_parameters()
            np.multiply(self._its.parameters, np.float32(self._its.share), out=self._mean)
            self._its.courier.do(self._all.run)
            self._its.parameters[:] = self._mean
            self._its.copies.store_parameters()
            self._trigger.joined(number)

    def next_exchange(self, number: int) -> int:
        every = self._its.method.global_every
        due = super().next_exchange(number)
        return min(due, (number // every + 1) * every - 1) if every else due

    def exchange(self) -> bool:
        edge = self._edge()
        if edge.to == self._its.messages.rank:
            return False
        random = np.random.default_rng((self._its.seed, self._place, self.turn))
        self._mixer.mix(edge, random)
        return True

    def agree(self, urgency: float) -> bool:
        edge, messages = self._edge(), self._its.messages
        if edge.to == messages.rank:
            return False
        self._flag[0] = urgency >= 1
        messages.exchange([(edge.to, self._flag)], [(edge.source, self._theirs)])
        return bool(self._flag[0] or self._theirs[0])

    def _edge(self) -> Edge:
        weights = self._its.weights() or self._weights
        if weights != self._weights:
            self._graph, self._weights = Weighted(self._plain, weights, self._mixer.most), weights
        turn, workers = self._graph.round(self.turn), self._its.workers
        return Edge(workers[turn.target[self._place]], workers[turn.source[self._place]],
                    float(turn.weight[self._place]))

    def _swap(self, to: int, goes: npt.NDArray[np.generic], source: int, comes: npt.NDArray[np.generic]) -> None:
        sends, receives, messages = [(to, goes)], [(source, comes)], self._its.messages

        def swap() -> None:
            messages.invited(sends, receives)
            messages.swap(sends, receives)

        self._its.courier.do(swap)
