"""Cases for four ranks of any transport; over MPI and torch.distributed: `transport_program.py FOLDER`.

Pickles the results of all cases to a file per rank. test_train_transports.py also runs the cases on virtual ranks.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strategy_harness import GradientDescent, noise, run_server_rank, run_worker

from slurmdl import comm_layout
from slurmdl.train import init
from slurmdl.train.library.replica import Replica
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer import models, trainer
from slurmdl.train.trainer.data_readers import load_dataset
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.workloads import Classification
from slurmdl.train.transports.transport import Tag
from slurmdl.train.transports.window import ModelWindow, mix_pair
from slurmdl.train.world import init_transport

RANKS, STEPS = 4, 40
Transport = Any


def send_around_ring(transport: Transport) -> list[float]:
    """Numbers that this rank receives."""
    current, values = np.array([transport.rank], np.float32), []
    for _ in range(transport.size):
        received = np.empty_like(current)
        transport.waitall([transport.irecv((transport.rank - 1) % transport.size, received),
                           transport.isend((transport.rank + 1) % transport.size, current)])
        current = received
        values.append(float(current[0]))
    return values


def exchange_types(transport: Transport) -> list[bool]:
    """Whether arrays of several types and sizes arrive as they were, though the sender changes them afterwards."""
    correct = []
    for number, dtype in enumerate((np.uint8, np.float16, np.float32, np.float64, np.int64)):
        for size in (1, 7, 1000, 300_000):
            sent = (np.arange(size) % 99 + number).astype(dtype)
            received, peer = np.zeros_like(sent), transport.rank ^ 1
            transport.waitall([transport.isend(peer, sent), transport.irecv(peer, received)])
            correct.append(bool((received == np.arange(size) % 99 + number).all()))
            sent[:] = 0
    return correct


def keep_order_per_tag(transport: Transport) -> list[int]:
    numbers = np.arange(6)
    if transport.rank == 0:
        transport.waitall([transport.isend(1, numbers[number:number + 1], tag=number % 2) for number in range(6)])
    received = np.full(6, -1)
    if transport.rank == 1:
        transport.waitall([transport.irecv(0, received[index:index + 1], tag=index // 3) for index in range(6)])
    return received.tolist()


def probe(transport: Transport) -> list[int]:
    """Ranks of which rank 0 finds a message."""
    array, found = np.zeros(1), list[int]()
    if transport.rank:
        transport.emulate_compute(transport.rank * 1e-3)
        transport.waitall([transport.isend(0, array, Tag.PUSH)])
    while transport.rank == 0 and len(found) < transport.size - 1:
        if (source := transport.iprobe(Tag.PUSH)) is not None:
            transport.waitall([transport.irecv(source, array, Tag.PUSH)])
            found.append(source)
    return sorted(found)


def wait_for_any(transport: Transport) -> list[Any]:
    """Rank 1 sends before rank 2, which first waits for rank 0."""
    array, other = np.zeros(1), np.zeros(1)
    if transport.rank == 0:
        groups = [[transport.irecv(2, array, 51)], [transport.irecv(1, other, 51)]]
        first = transport.wait_any_group(groups, lambda: False)
        transport.waitall([transport.isend(2, array, 52)])
        transport.wait_any_or_message([], Tag.PUSH)
        source = transport.iprobe(Tag.PUSH)
        transport.waitall([*groups[0], transport.irecv(source, other, Tag.PUSH)])
        return [first, source]
    if transport.rank == 1:
        transport.waitall([transport.isend(0, array, 51)])
    if transport.rank == 2:
        transport.waitall([transport.irecv(0, array, 52)])
        transport.waitall([transport.isend(0, array, 51), transport.isend(0, array, Tag.PUSH)])
    return []


def collect(transport: Transport) -> tuple[Any, ...]:
    own = [transport.rank]
    gathered = transport.allgather(own)
    assert gathered[transport.rank] is not own
    transport.barrier()
    return gathered, transport.gather(str(transport.rank)), transport.broadcast(own)


STRATEGIES = {
    "gossip": StrategyConfig("gossip", "base-2"),
    "random": StrategyConfig("gossip", "random-matching", compression="fp16", period=3),
    "drift": StrategyConfig("adaptive-gossip", "base-2", compression="int4", comm_budget=0.02),
    "push": StrategyConfig("gossip", "random-matching", asynchronous=True),
    "zone-aware push": StrategyConfig("gossip", "zone-aware", asynchronous=True, compression="fp16"),
    "local-sgd": StrategyConfig("local-sgd", "ring", compression="int8", period=4),
    "shared": StrategyConfig("gossip", "base-2", shared_memory=True),
    "shared, third": StrategyConfig("gossip", "base-2", shared_memory=True, period=3),
    "shared push": StrategyConfig("gossip", "random-matching", shared_memory=True, asynchronous=True)}


def run_configured(config: StrategyConfig) -> Callable[[Transport], dict[str, Any]]:
    """Steps of a strategy on two zones, or on two nodes if it shares memory."""
    def case(transport: Transport) -> dict[str, Any]:
        nodes = "aabb" if config.shared_memory else "abcd"
        steps = 300 if config.shared_memory and config.asynchronous else STEPS
        log = run_worker(transport, config, steps, size=20_000, nodes=nodes, zones="aabb",
                         update=noise(0.0 if config.shared_memory else 0.01), step_seconds=lambda rank: 1e-3)
        return {"initial": log.initial, "final": log.final, "total_update": log.total_update, "sent": log.bytes_sent,
                "weight": log.strategy.model_weight, "exchange_steps": log.exchange_steps}
    return case


def serve_asynchronously(transport: Transport) -> tuple[Any, float]:
    """Two servers, and workers of unequal speed and number of steps; the model, and its change that is expected."""
    rank, expected = transport.rank, list[float]()

    class RecordingDescent(GradientDescent):
        def __call__(self, hyperparameters: Any) -> None:
            super().__call__(hyperparameters)
            expected.append(float(hyperparameters[1] * self._gradients[0]))

    parameters, _ = run_server_rank(transport, StrategyConfig("ps", "shards", asynchronous=True), 2, [
        rank * 1e-3 * random.Random(step).random() for step in range(60 + 40 * (rank == 2))],
        lambda worker, model: np.full_like(model, 1e-3), make_optimizer=RecordingDescent, size=60_000)
    return parameters, sum(expected)


TRAINED = {
    "ring": "--strategy allreduce --comm-pattern ring",
    "hierarchical": "--strategy allreduce --comm-pattern hierarchical --optimizer adam --lr 0.003",
    "skewed": "--strategy gossip --dirichlet-alpha 0.3",
    "base": "--strategy gossip --comm-pattern base-2",
    "exponential": "--strategy gossip --comm-pattern one-peer-exponential --optimizer adamw --lr 0.003",
    "ps": "--strategy ps --ps 2",
    "adaptive": "--strategy adaptive-gossip --comm-pattern base-2 --compression int4 --comm-budget 2%",
    "outer step": "--strategy local-sgd --compression int8 --period 8"}
COMMON = ("--steps", "24", "--model", "mlp:16", "--seed", "3", "--virtual-ranks", str(RANKS),
          "--virtual-zones", "A:1x2,B:2x1", "--lr-schedule", "cosine", "--batch-size", "16")


class LoggingP2P(MeteredP2P):
    """Logs target, bytes and tag of all messages sent."""

    log: list[tuple[int, int, int]]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        self.log.append((peer, array.nbytes, tag))
        return super().isend(peer, array, tag)


def train(words: str) -> Callable[[Transport], dict[str, Any]]:
    """A run of the trainer: messages, bytes by locality level, and final parameters."""
    def case(transport: Transport) -> dict[str, Any]:
        options = parse_train_options([*COMMON, *words.split()], {})
        nodes, zones = trainer.rank_places(options)
        environ = trainer.rank_environ(nodes[transport.rank], zones[transport.rank])
        run = init(options.strategy_config, seed=options.seed, environ=environ, transport=transport)
        run.p2p.__class__ = LoggingP2P
        run.p2p.log = []
        workload = Classification(options, load_dataset(options.data, options.seed,
                                                        dirichlet_alpha=options.dirichlet_alpha))
        optimizer = models.build_optimizer(options.optimizer, workload.module.parameters(), options.lr,
                                               options.momentum, 0.0)
        scheduler = models.build_lr_scheduler(optimizer, options.lr_schedule, options.steps)
        run.attach(workload.module, optimizer)
        if run.is_server:
            run.serve()
        else:
            batches = workload.batches(run.worker_rank, run.worker_count)
            for _ in range(options.steps):
                optimizer.zero_grad()
                workload.loss(next(batches)).backward()
                optimizer.step()
                scheduler.step()
        run.finish()
        return {"log": run.p2p.log, "sent": dict(run.p2p.bytes_sent), "is_server": run.is_server,
                "parameters": np.array(run.replica.parameters)}
    return case


def mix_in_window(transport: Transport) -> int:
    """Number of wrong results of pairs, which change, that mix their models in place, half of both each."""
    rank, size, ranks = transport.rank, 50_000, tuple(range(transport.size))
    window = ModelWindow(transport.allocate_shared, rank, ranks, size)
    model, wrong, jitter = window.live_model(rank), 0, random.Random(rank)
    for step in range(300):
        peer = rank ^ (1 + step % (len(ranks) - 1))
        model.fill(1000 * step + rank)
        window.set_flag("ready", step)
        if jitter.random() < 0.2:
            transport.emulate_compute(jitter.random() * 1e-3)
        window.wait_flag(peer, "ready", step)
        half = slice(0, size // 2) if rank < peer else slice(size // 2, size)
        mix_pair(model[half], window.live_model(peer)[half], (0.25, 0.25))
        window.set_flag("mixed", step)
        window.wait_flag(peer, "mixed", step)
        wrong += bool((model != 1000 * step + 0.75 * rank + 0.25 * peer).any())
    transport.barrier()
    window.close()
    return wrong


def read_window(transport: Transport) -> dict[str, int]:
    """Even ranks write continuously; odd ones read the newest version, whose elements are equal if it is whole."""
    rank, size = transport.rank, 50_000
    window = ModelWindow(transport.allocate_shared, rank, tuple(range(transport.size)), size)
    versions, torn, version, jitter = set[float](), 0, 0, random.Random(rank)
    model, end = np.zeros(size, np.float32), transport.now() + 1.0
    while transport.now() < end:
        version += 1
        if rank % 2 == 0:
            model.fill(version)
            window.publish(version, model)
        else:
            model.fill(0)
            window.mix_newest(version, model, rank - 1, 1.0)
            torn += bool((model != model[0]).any())
            versions.add(float(model[0]))
        if jitter.random() < 0.1:
            time.sleep(jitter.random() * 1e-3)
    transport.barrier()
    window.close()
    return {"read": len(versions - {0.0}), "torn": torn}


def small_layers(run: Any) -> tuple[Any, Any]:
    """Four layers of 20 parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    wrapped: tuple[Any, Any] = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return wrapped


def overlapped(program: Callable[[Any], Any]) -> Callable[[Transport], Any]:
    """A run with buckets of up to 16 elements, whose communication thread works beside the backward passes."""
    def case(transport: Transport) -> Any:
        assert transport.supports_comm_thread
        bucket, comm_layout.MAX_BUCKET_ELEMENTS = comm_layout.MAX_BUCKET_ELEMENTS, 16
        run = init(StrategyConfig("allreduce"), environ={}, transport=transport)
        result = program(run)
        run.finish()
        comm_layout.MAX_BUCKET_ELEMENTS = bucket
        return result
    return case


def record_starts(run: Any) -> list[int]:
    """Start indices that the strategy receives in one backward pass."""
    (model, opt), ready = small_layers(run), list[int]()
    on_ready = run.strategy.on_gradients_ready
    run.strategy.on_gradients_ready = lambda start: (ready.append(start), on_ready(start))[1]
    model(torch.ones(1, 4)).sum().backward()
    starts = ready[:]
    opt.step()
    return starts


def record_copies(run: Any) -> list[tuple[int, int]]:
    """Elements of each copy of a staged replica in one backward pass, and how many gradients were ready before."""
    init_replica, copy = Replica.__init__, Replica._copy
    copies, ready = list[tuple[int, int]](), list[str]()
    Replica.__init__ = lambda self, *arguments, **options: init_replica(  # type: ignore[method-assign]
        self, *arguments, **options, staged=True)
    Replica._copy = lambda self, target, source: (  # type: ignore[method-assign, assignment]
        copies.append((source.numel(), len(ready))), copy(self, target, source))
    model, opt = small_layers(run)
    for name, tensor in model.named_parameters():
        tensor.register_post_accumulate_grad_hook(lambda tensor, name=name: ready.append(name))
    copies.clear()
    model(torch.ones(1, 4)).sum().backward()
    in_backward = copies[:]
    opt.step()
    Replica.__init__, Replica._copy = init_replica, copy  # type: ignore[method-assign]
    return in_backward


def accumulate(run: Any) -> tuple[int, list[float]]:
    """Four backward passes per step, two of them in `no_sync`: number of exchanges, and the model."""
    torch.manual_seed(3)
    x, y = (data[run.rank::run.worker_count] for data in (torch.randn(80, 6), torch.randint(3, (80,))))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.wrap(model, opt)
    for _ in range(3):
        opt.zero_grad()
        for part in range(4):
            with run.no_sync() if part in (0, 2) else nullcontext():
                torch.nn.functional.cross_entropy(model(x[part::4]), y[part::4]).div(4).backward()
        opt.step()
    return run.strategy.exchanges, torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


MESSAGES = {function.__name__: function for function in (
    send_around_ring, exchange_types, keep_order_per_tag, probe, wait_for_any, collect)}
CASES: dict[str, Callable[[Transport], Any]] = {
    **MESSAGES, **{name: run_configured(config) for name, config in STRATEGIES.items()},
    **{name: train(words) for name, words in TRAINED.items()}, "servers": serve_asynchronously}
#: cases of shared memory, and those with threads
WITH_MEMORY = {"mix_in_window": mix_in_window, "read_window": read_window}
WITH_THREADS = {function.__name__: overlapped(function) for function in (record_starts, record_copies, accumulate)}


class RecordingComm:
    """A communicator that records calls of all methods except point-to-point messages."""

    LOCAL = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size", "Get_group")

    def __init__(self, comm: Any) -> None:
        self._comm, self.collectives = comm, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in self.LOCAL:
            self.collectives.add(name)
        return getattr(self._comm, name)


def add_jitter(transport: Transport) -> None:
    """Sleep before some calls, so that messages are observed in any state."""
    draw = random.Random(transport.rank)

    def delay(method: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*arguments: Any, **options: Any) -> Any:
            if draw.random() < 0.05:
                time.sleep(2e-3 * draw.random())
            return method(*arguments, **options)
        return delayed

    for name in ("isend", "irecv", "iprobe", "testall"):
        setattr(transport, name, delay(getattr(transport, name)))


def main() -> None:
    torch.set_num_threads(1)
    transport, results = init_transport(), {}
    over_mpi = not hasattr(transport, "start_thread")
    add_jitter(transport)
    for name, case in {**CASES, **(WITH_MEMORY if over_mpi else {}), **WITH_THREADS}.items():
        if name in STRATEGIES and STRATEGIES[name].shared_memory and not over_mpi:
            continue
        transport.barrier()
        if over_mpi:
            comm = transport._comm
            transport._comm = recording = RecordingComm(comm)
        results[name] = case(transport)
        if over_mpi:
            transport._comm, results[f"collectives of {name}"] = comm, sorted(recording.collectives)
    (Path(sys.argv[1]) / str(transport.rank)).write_bytes(pickle.dumps(results))
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    main()
