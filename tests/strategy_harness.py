"""Run strategies with synthetic updates instead of gradients, on virtual ranks or over MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.stub_models import PlainParameters
from slurmdl.train import triggers
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, LockstepSampler, even_rounds
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, Strategy, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Transport
from slurmdl.train.transports.virtual import NetworkModel, run_virtual_ranks
from slurmdl.train.world import message_levels

FloatArray = npt.NDArray[np.float32]
#: update(worker, step, parameters) -> change of the parameters by the optimizer in this step
Update = Callable[[int, int, FloatArray], FloatArray]


class RandomDelayNetwork:
    """Delay each message by 0 to `max_delay` seconds; messages between two ranks stay in order."""

    def __init__(self, seed: int, max_delay: float) -> None:
        self._random, self._max_delay = np.random.default_rng(seed), max_delay
        self._last: dict[tuple[int, int], float] = {}

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        arrives_at = clock + self._max_delay * float(self._random.random())
        arrives_at = self._last[source, target] = max(arrives_at, self._last.get((source, target), 0.0))
        return arrives_at, arrives_at


@dataclass
class WorkerLog:
    """Observations of one worker.

    Attributes:
        initial, final: parameters before the first step and after `finish`.
        total_update: sum of the updates, each multiplied by the weight of the model.
        bytes_per_step: bytes sent in each step.
        bytes_sent: bytes sent by locality level, with those of `finish`.
        exchange_steps: steps with an exchange.
    """

    strategy: Strategy
    initial: FloatArray
    final: FloatArray
    total_update: npt.NDArray[np.float64]
    bytes_per_step: list[int]
    bytes_sent: dict[str, int]
    exchange_steps: list[int]


def noise(scale: float) -> Update:
    """Return independent, normally distributed updates."""
    def update(worker: int, step: int, parameters: FloatArray) -> FloatArray:
        values = np.random.default_rng((worker, step)).standard_normal(parameters.size)
        return (scale * values).astype(np.float32)
    return update


def zero_update(worker: int, step: int, parameters: FloatArray) -> FloatArray:
    return np.zeros_like(parameters)


def fix_threshold(threshold: float, warmup_steps: int, patch: Callable[[Any, str, float], None] = setattr) -> None:
    """Let adaptive gossip exchange by a fixed drift, whatever its budget, except in the first steps."""
    for name, value in (("INITIAL_THRESHOLD", threshold), ("MAX_WARMUP_STEPS", warmup_steps), ("GAIN", 0.0),
                        ("MAX_GAP_FACTOR", 1e3)):
        patch(triggers, name, value)


def run_strategy(config: StrategyConfig, count: int, steps: int, *,
                 network: NetworkModel | None = None, **worker_options: Any) -> list[WorkerLog]:
    """Run a strategy on `count` virtual workers; `worker_options` are passed to `run_worker`."""
    return run_virtual_ranks(count, lambda transport: run_worker(transport, config, steps, **worker_options), network)


def run_worker(transport: Transport, config: StrategyConfig, steps: int, *, size: int = 300,
               update: Update = zero_update, initial_spread: float = 1.0, zones: Sequence[str] | None = None,
               nodes: Sequence[str] = (), seed: int = 5, learning_rate: Callable[[int], float] = lambda step: 0.1,
               step_seconds: Callable[[int], float] = lambda rank: 1.0,
               model_weights: tuple[float, ...] = ()) -> WorkerLog:
    """Run one worker; all ranks of the transport are workers.

    Args:
        initial_spread: standard deviation of the noise added to each worker's model after the strategy is created.
        learning_rate: learning rate of a step.
        step_seconds: mean compute time of a rank's steps; actual times vary.
        nodes: node of each rank, () for one node without levels of locality.
        model_weights: see StrategyContext.
    """
    step, count, rank = 0, transport.size, transport.rank
    initial = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    leaves = tuple(zones or ("",) * count)
    levels = message_levels(rank, nodes, leaves) if nodes else ("intra_zone",) * count
    p2p, model = MeteredP2P(transport, levels), PlainParameters(initial.copy())
    comm_thread = CommThread(transport.supports_comm_thread)
    ctx = StrategyContext(p2p, comm_thread, tuple(range(count)), (), model.parameters, np.zeros_like(initial),
                          (size // 3, 0, 1, size - size // 3 - 1), config, seed, tuple(nodes or leaves), leaves, {},
                          lambda: learning_rate(step), lambda part: lambda hyperparameters: None,
                          model_weights=lambda: model_weights, relocate_parameters=model.relocate_parameters)
    strategy = STRATEGIES[config.strategy or ""](ctx)
    parameters = model.parameters
    random = np.random.default_rng((seed, rank))
    parameters += np.float32(initial_spread) * random.standard_normal(size).astype(np.float32)
    log = WorkerLog(strategy, parameters.copy(), parameters, np.zeros(size), [], p2p.bytes_sent, [])
    for step in range(steps):
        transport.emulate_compute(step_seconds(rank) * float(random.exponential()))
        change = update(rank, step, parameters)
        parameters += change
        log.total_update += strategy.model_weight * change
        sent_before, exchanges_before = sum(p2p.bytes_sent.values()), strategy.exchanges
        strategy.after_optimizer_step(step)
        log.bytes_per_step.append(sum(p2p.bytes_sent.values()) - sent_before)
        if strategy.exchanges > exchanges_before:
            log.exchange_steps.append(step)
    strategy.finish()
    comm_thread.close()
    return replace(log, final=model.parameters.copy())


class GradientDescent:
    """Gradient descent with the sum of all gradients as state; a ShardOptimizer. Hyperparameter 1 is the rate."""

    def __init__(self, parameters: Any, gradients: Any) -> None:
        self._parameters, self._gradients = parameters, gradients
        self.learning_rates: list[float] = []
        self.gradient_sum = np.zeros_like(gradients)

    def __call__(self, hyperparameters: Any) -> None:
        self.learning_rates.append(float(hyperparameters[1]))
        self.gradient_sum += self._gradients
        self._parameters -= np.float32(hyperparameters[1]) * self._gradients

    def state_bytes(self) -> Any:
        return np.frombuffer(self.gradient_sum.tobytes(), np.uint8)

    def load_state_bytes(self, state: Any) -> None:
        self.gradient_sum[:] = state.view(np.float32)


def server_context(transport: Transport, config: StrategyConfig, servers: int, costs: dict[str, float] | None = None,
                   zones: Sequence[str] = (), nodes: Sequence[str] = (), size: int = 40, rate: float = 0.5,
                   make_optimizer: Callable[[Any, Any], Any] = GradientDescent) -> StrategyContext:
    """Context of a rank; the first `servers` ranks are parameter servers. All parameters are 1 at the start."""
    ranks, unknown = tuple(range(transport.size)), ("",) * transport.size
    parameters, gradients = np.ones(size, np.float32), np.zeros(size, np.float32)
    return StrategyContext(
        MeteredP2P(transport, ("intra_zone",) * transport.size), CommThread(transport.supports_comm_thread),
        ranks[servers:], ranks[:servers], parameters, gradients, (size,), config, 1, tuple(nodes) or unknown,
        tuple(zones) or unknown, costs or {}, lambda: rate,
        lambda part: make_optimizer(parameters[part], gradients[part]), lambda: np.array([0.9, rate]), (1,))


def run_server_rank(transport: Transport, config: StrategyConfig, servers: int, work: Sequence[float],
                    gradient: Callable[[int, Any], Any],
                    on_step: Callable[[int, int], None] = lambda worker, step: None,
                    **options: Any) -> tuple[FloatArray, Any]:
    """Run a rank; a worker computes `work[step]` seconds per step. Returns its parameters and its strategy."""
    ctx = server_context(transport, config, servers, **options)
    strategy, worker, step = STRATEGIES["ps"](ctx), transport.rank - servers, 0
    while worker < 0 and strategy.serve_step(step):
        step += 1
    for step, seconds in enumerate(work if worker >= 0 else ()):
        on_step(worker, step)
        transport.emulate_compute(seconds)
        ctx.gradients[:] = gradient(worker, ctx.parameters)
        strategy.finish_gradients(step)
    strategy.finish()
    ctx.comm_thread.close()
    return ctx.parameters, strategy


def even_slices(batches: GlobalBatches, worker: int, cursor: int = 0) -> Iterator[BatchSlice]:
    """Yield a worker's slices of an epoch from sample `cursor` on, if all workers have equal shares."""
    sampler = LockstepSampler(batches, worker, even_rounds(batches.worker_count), lambda: 0)
    return sampler.slices(0, cursor, None)


def global_batches(batches: GlobalBatches, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the sample indices of all workers for each step."""
    order, cursor = batches.order(epoch), 0
    while total := batches.size_at(cursor):
        yield order[cursor:cursor + total]
        cursor += total


def sum_error(logs: Sequence[WorkerLog]) -> float:
    """Return the relative error of the weighted sum of the models, compared with initial models plus updates."""
    expected = sum(log.initial.astype(np.float64) + log.total_update for log in logs)
    actual = sum(log.final.astype(np.float64) * log.strategy.model_weight for log in logs)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def consensus_spread(models: Sequence[FloatArray]) -> float:
    """Return the largest distance of a model from the mean of all models."""
    stacked = np.array(models, np.float64)
    return float(np.linalg.norm(stacked - stacked.mean(0), axis=1).max())
