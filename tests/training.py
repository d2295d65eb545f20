"""Plays strategies with made-up updates instead of gradients, on virtual ranks or real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.load_balance import even_rounds
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, LockstepSampler
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, Strategy, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Transport
from slurmdl.train.transports.virtual import NetworkModel, run_virtual_ranks

FloatArray = npt.NDArray[np.float32]
#: change of the model that a step's optimizer makes: (worker, step, parameters) -> what is added to them
Update = Callable[[int, int, FloatArray], FloatArray]


class Drawn:
    """A network whose messages take any time from 0 to `longest` seconds, in their order for each pair of ranks."""

    def __init__(self, seed: int, longest: float) -> None:
        self._random, self._longest = np.random.default_rng(seed), longest
        self._last: dict[tuple[int, int], float] = {}

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        there = clock + self._longest * float(self._random.random())
        there = self._last[source, target] = max(there, self._last.get((source, target), 0.0))
        return there, there


@dataclass
class Played:
    """What one worker has seen.

    Attributes
    ----------
    first, last : its parameters before and after all steps, `finish` included.
    added : the sum of its updates, each with the weight of its model.
    sent : bytes by step.
    exchanges : steps in which it has exchanged.
    """

    strategy: Strategy
    first: FloatArray
    last: FloatArray
    added: npt.NDArray[np.float64]
    sent: list[int]
    exchanges: list[int]


def noise(scale: float) -> Update:
    """Independent normal numbers."""
    def update(worker: int, step: int, parameters: FloatArray) -> FloatArray:
        drawn = np.random.default_rng((worker, step)).standard_normal(parameters.size)
        return (scale * drawn).astype(np.float32)
    return update


def still(worker: int, step: int, parameters: FloatArray) -> FloatArray:
    """No change at all."""
    return np.zeros_like(parameters)


def play(method: StrategyConfig, count: int, steps: int, *,
         network: NetworkModel | None = None, **further: Any) -> list[Played]:
    """Let `count` virtual workers play a strategy; further arguments as for `live`."""
    return run_virtual_ranks(count, lambda virtual: live(virtual, method, steps, **further), network)


def live(transport: Transport, method: StrategyConfig, steps: int, *, size: int = 300, update: Update = still,
         apart: float = 1.0, zones: Sequence[str] | None = None, seed: int = 5,
         rate: Callable[[int], float] = lambda step: 0.1,
         seconds: Callable[[int], float] = lambda rank: 1.0, weights: tuple[float, ...] = ()) -> Played:
    """One worker's life; all ranks of the transport are workers.

    Parameters
    ----------
    apart : each worker's model is moved away from the common first one by normal numbers of this size, after the
        strategy was made.
    rate : step -> learning rate.
    seconds : rank -> mean time that it computes in a step; the times differ from step to step.
    weights : see Setting.
    """
    now, count, rank = 0, transport.size, transport.rank
    common = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    messages, courier = MeteredP2P(transport, ("zone",) * count), CommThread(transport.supports_comm_thread)
    workers, leaves = tuple(range(count)), tuple(zones or ("",) * count)
    setting = StrategyContext(messages, courier, workers, (), common.copy(), np.zeros_like(common),
                      (size // 3, 0, 1, size - size // 3 - 1), method, seed, leaves, leaves, {}, lambda: rate(now),
                      lambda part: lambda numbers: None, model_weights=lambda: weights)
    strategy = STRATEGIES[method.strategy or ""](setting)
    parameters = setting.parameters
    random = np.random.default_rng((seed, rank))
    parameters += np.float32(apart) * random.standard_normal(size).astype(np.float32)
    played = Played(strategy, parameters.copy(), parameters, np.zeros(size), [], [])
    for now in range(steps):
        transport.emulate_compute(seconds(rank) * float(random.exponential()))
        change = update(rank, now, parameters)
        parameters += change
        played.added += strategy.model_weight * change
        before, fired = sum(messages.bytes_sent.values()), strategy.exchanges
        strategy.after_optimizer_step(now)
        played.sent.append(sum(messages.bytes_sent.values()) - before)
        if strategy.exchanges > fired:
            played.exchanges.append(now)
    strategy.finish()
    courier.close()
    return replace(played, last=parameters.copy())


def evenly(deal: GlobalBatches, worker: int, cursor: int = 0) -> Iterator[BatchSlice]:
    """What a worker takes of an epoch, from a position on, where all take as much."""
    return LockstepSampler(deal, worker, False, even_rounds(deal.worker_count), lambda: 0).slices(0, cursor, None)


def whole(deal: GlobalBatches, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of all workers' samples together, step by step."""
    order, cursor = deal.order(epoch), 0
    while total := deal.size_at(cursor):
        yield order[cursor:cursor + total]
        cursor += total


def lost(played: Sequence[Played]) -> float:
    """How far the sum of the models, each with its weight, is from what it was and what was added, relative."""
    before = sum(its.first.astype(np.float64) + its.added for its in played)
    after = sum(its.last.astype(np.float64) * its.strategy.model_weight for its in played)
    return float(np.abs(after - before).max() / np.abs(before).max())


def spread(models: Sequence[FloatArray]) -> float:
    """The largest distance of a model from the mean of all."""
    stacked = np.array(models, np.float64)
    return float(np.linalg.norm(stacked - stacked.mean(0), axis=1).max())
