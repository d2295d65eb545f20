"""The built-in trainer, top to bottom."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError, UnavailableError
from slurmdl.train import meters, models
from slurmdl.train.courier import Courier
from slurmdl.train.data import Data, read
from slurmdl.train.graphs import GRAPHS, Members, spectral_gap
from slurmdl.train.messages import Messages
from slurmdl.train.options import Options
from slurmdl.train.replica import Replica
from slurmdl.train.runtime import Refused, World, connect, join
from slurmdl.train.strategies import STRATEGIES, Setting
from slurmdl.train.strategies.strategy import Numbers
from slurmdl.train.sums import Sum

FloatArray = npt.NDArray[np.float32]

#: steps where neither --steps nor --epochs is given
STEPS = 200


def train(options: Options) -> None:
    """Train as `options` say, as one rank of an MPI program. The log is on the first worker's and rank 0's stdout.

    Raises
    ------
    SlurmdlError : the run cannot start or cannot go on.
    """
    transport = connect()
    _load_torch()
    data = read(options.data, options.seed)
    transport.meet()
    world = join(options.method, transport, alike=options.shared())
    if world.rank == 0:
        _check_writable(options.summary)
        print(f"ranks: {world}", flush=True)

    replica = Replica(models.build(options.model, data.shape, data.classes, options.seed))
    _compare(world, replica.parameters, data)
    workers, servers = world.ranks("worker"), world.ranks("ps")
    messages = Messages(transport, world.levels())
    courier = Courier(transport.threaded)

    def updater(part: slice) -> Callable[[Numbers], None]:
        step = replica.optimizer(part, options.lr, options.momentum)
        return lambda numbers: step()

    strategy = STRATEGIES[world.strategy](Setting(
        messages, courier, workers, servers, replica.parameters, replica.gradients, replica.sizes, world.method,
        options.seed, world.nodes, world.zones, world.costs, lambda: options.lr, updater))
    per_epoch = data.steps_per_epoch(len(workers), options.batch)
    steps = options.steps or (options.epochs or 0) * per_epoch or STEPS
    meter = meters.Meter()
    courier.do(transport.meet)
    if world.rank in servers:
        for number in range(steps):
            with meter.step(courier):
                strategy.serve(number)
        strategy.serve(steps)  # the workers say that they have ended
    else:
        update = replica.optimizer(slice(None), options.lr, options.momentum) if strategy.updates else lambda: None
        batches = data.batches(workers.index(world.rank), len(workers), options.batch, options.seed)
        with ExitStack() as files:
            log = None
            if world.rank == workers[0]:
                log = Log(options, files.enter_context(_open(options.metrics)) if options.metrics else None)
            for number in range(steps):
                with meter.step(courier):
                    loss = replica.backward(*next(batches))
                    strategy.before_update(number)
                    update()
                    strategy.after_update(number)
                if not np.isfinite(loss):
                    raise TrainError(f"step {number + 1}: the loss is {loss}; a smaller --lr may help")
                meter.loss.append(loss)
                if log:
                    log.step(meter)
    strategy.finish()
    courier.close()

    transport.meet()
    consensus = _agree(world, messages, replica.parameters)
    score = replica.evaluate(data.test_x, data.test_y) if world.rank == workers[0] else None
    reports = transport.gather(meters.Report(meter, messages.sent, consensus, score))
    if reports is not None:
        summary = _describe(world, options, replica.parameters.size) | meters.summarise(
            reports, world.roles, options.batch)
        print(meters.table(summary), flush=True)
        if options.summary:
            with _open(options.summary) as file:
                json.dump(summary, file, indent=1)
                file.write("\n")


class Log:
    """The first worker's log: a line on stdout now and then, a JSON object per step in a file."""

    def __init__(self, options: Options, metrics: TextIO | None) -> None:
        self._every = options.log_every
        self._batch = options.batch
        self._metrics = metrics

    def step(self, meter: meters.Meter) -> None:
        """Write down the step that `meter` has just seen."""
        done = len(meter.wall)
        if self._metrics:
            print(json.dumps({"step": done, "loss": meter.loss[-1], "seconds": meter.wall[-1],
                              "compute_seconds": meter.wall[-1] - meter.comm[-1], "comm_seconds": meter.comm[-1],
                              "images_per_second": self._batch / meter.wall[-1]}), file=self._metrics)
        if done % self._every == 0:
            if self._metrics:
                self._metrics.flush()
            recent = slice(-self._every, None)
            wall, comm = sum(meter.wall[recent]), sum(meter.comm[recent])
            print(f"step {done}: loss {np.mean(meter.loss[recent]):.4f}, {wall / self._every:.4f} s/step, "
                  f"communication {comm / wall:.0%}", flush=True)


def _load_torch() -> None:
    """Import torch with one thread per rank: ranks share a node's cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"no PyTorch: {error} (pip install 'slurmdl[train]')") from error
    torch.set_num_threads(1)


def _compare(world: World, parameters: FloatArray, data: Data) -> None:
    """Refuse ranks whose first parameters or data differ, as with different library versions on the nodes."""
    mine = (parameters.size, zlib.crc32(parameters), zlib.crc32(data.train_x), zlib.crc32(data.test_x))
    for rank, theirs in enumerate(world.transport.allgather(mine)):
        if theirs != mine:
            what = "other data" if theirs[:2] == mine[:2] else "another model"
            other = rank if world.rank == 0 else 0
            raise Refused(f"rank {other} on {world.nodes[other]} starts with {what} than rank {world.rank}: "
                          "the same versions of slurmdl, torch and the data are needed on all nodes")


def _agree(world: World, messages: Messages, parameters: FloatArray) -> float:
    """Replace the workers' models by their mean, where they differ.

    Returns the distance of this rank's model from the mean, relative to the mean's norm.
    """
    workers = world.ranks("worker")
    marks = world.transport.allgather(zlib.crc32(parameters))
    if world.rank not in workers or len({marks[worker] for worker in workers}) == 1:
        return 0.0
    mean = parameters.copy()
    Sum(messages, [workers], mean).run()
    mean /= np.float32(len(workers))
    distance = float(np.linalg.norm(parameters - mean) / np.linalg.norm(mean))
    parameters[:] = mean
    return distance


def _describe(world: World, options: Options, size: int) -> dict[str, Any]:
    """What ran, where; `nodes` and `zones` are counts (0 zones where none is known).

    `spectral_gap` is that of the graph of gossip, None for other strategies.
    """
    places = [{"rank": rank, "node": node, "zone": zone, "role": role} for rank, (node, zone, role) in enumerate(
        zip(world.nodes, world.zones, world.roles, strict=True))]
    workers = len(world.ranks("worker"))
    members = Members([world.zones[rank] for rank in world.ranks("worker")], options.seed, world.costs)
    gap = spectral_gap(world.traffic, members) if world.traffic in GRAPHS else None
    return {"strategy": world.strategy, "traffic": world.traffic, "spectral_gap": gap, "ranks": len(world.nodes),
            "workers": workers, "ps": len(world.ranks("ps")),
            "nodes": len(set(world.nodes)), "zones": len(set(world.zones) - {""}),
            "map": places, "model": options.model, "parameters": size, "data": options.data,
            "batch": options.batch, "lr": options.lr, "momentum": options.momentum, "seed": options.seed}


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}") from error


def _check_writable(path: str) -> None:
    """Say now, not after the training, that a file cannot be written."""
    folder = os.path.dirname(path) or "."
    if path and not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise TrainError(f"--summary {os.path.abspath(path)}: cannot be written")
