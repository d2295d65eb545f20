"""The built-in trainer, top to bottom."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import wholefile
from slurmdl.errors import BadOptions, TrainError, UnavailableError, warn
from slurmdl.output import show
from slurmdl.train.library import agreement, halt
from slurmdl.train.library.run import CHECKPOINT, Run, init
from slurmdl.train.report import meters
from slurmdl.train.runtime import connect
from slurmdl.train.trainer import optimizers, simulation
from slurmdl.train.trainer.data import Data, read
from slurmdl.train.trainer.options import Options
from slurmdl.train.trainer.progress import Progress, writable
from slurmdl.train.trainer.task import Images, StandIn
from slurmdl.train.transports.transport import Transport

FloatArray = npt.NDArray[np.float32]

#: seconds in which the virtual ranks that are as far as the first one finish their step before all are evaluated
MOMENT = 1e-9

#: difference of the workers' labels (Data.label_skew) that is warned of; up to 0.2 is chance
SKEWED = 0.3

#: steps where neither --steps nor --epochs is given
STEPS = 200


def train(options: Options) -> dict[str, Any] | None:
    """Train as `options` say, as one rank of an MPI program or with virtual ranks.

    The log is on the first worker's and rank 0's stdout.

    Returns
    -------
    The summary of the run (meters.summarise) on rank 0, None on the others.

    Raises
    ------
    SlurmdlError : the run cannot start or cannot go on.
    """
    if options.checkpoint or os.environ.get(CHECKPOINT):
        halt.listen()  # before torch is imported, which takes seconds
    _load_torch()
    if options.simulate:
        data = _data(options)
        models: dict[int, FloatArray] = {}
        return simulation.run(options, lambda transport, environ: one_rank(
            options, data, environ, transport, models))[0]
    transport = connect()  # before the data, so that a rank that cannot read them ends the others
    return one_rank(options, _data(options), os.environ, transport)


def one_rank(options: Options, data: Data | None, environ: Mapping[str, str], transport: Transport,
             models: dict[int, FloatArray] | None = None) -> dict[str, Any] | None:
    """One rank's part in a run.

    Parameters
    ----------
    models : where virtual workers find each other's parameters, so that their mean can be evaluated on the way; None
        where ranks do not share their memory.
    """
    run = init(options.method, seed=options.seed, alike=options.alike(), same=options.same(), trace=options.trace,
               plot=options.plot, checkpoint=options.checkpoint, checkpoint_every=options.checkpoint_every,
               check_every=options.check_every, environ=environ, transport=transport)
    beyond = [slow.rank for slow in options.slow if slow.rank >= len(run.world.nodes)]
    if beyond:
        raise BadOptions(f"--slow {beyond[0]}=: no such rank; valid: 0 to {len(run.world.nodes) - 1}")
    if run.rank == 0:
        if options.summary:
            _check_writable(options.summary)
        show(f"ranks: {run.world}")
    compute = run.world.transport.compute
    takes = _seconds(options)

    def seconds(images: int) -> float:
        """Of this rank's computation of a step."""
        factor = next((slow.factor for slow in options.slow
                       if slow.rank == run.rank and slow.begin <= run.done < slow.end), 1.0)
        return takes * factor * images / options.batch

    task: Images | StandIn
    if data is None:
        task = StandIn(_size(options), seconds, compute, options.seed)
    else:
        task = Images(options, data)
        agreement.compare(run.world, [("data", f"{options.data} {zlib.crc32(data.train_x):x}")])
    optimizer = optimizers.build(options.optimizer, task.module.parameters(), options.lr, options.momentum,
                                 options.weight_decay)
    an_epoch = task.steps_per_epoch(run.workers)
    steps = options.steps or (options.epochs or 0) * an_epoch or STEPS
    schedule = optimizers.schedule(optimizer, options.lr_schedule, steps, lambda: run.done)

    run.attach(task.module, optimizer)
    run.keep("schedule", schedule)
    if takes and isinstance(task, Images):
        task.pace(seconds, compute)
    meter, run.batch = run.meter, options.batch
    score, skew = None, task.label_skew(run.workers)
    if run.worker is None:
        run.serve()
        run.finish()
    else:
        run.keep("data", task)
        progress = Progress(steps, options.log_every, options.metrics, options.tensorboard, run.step) \
            if run.first else None
        if run.first:
            show(f"if a rank is lost: {run.outlook}")
            _warn_of_skew(run, skew)
        if models is not None:
            models[run.worker] = run.replica.parameters
        loader = run.deal(task.source, options.batch) if task.source else None
        batches = loader.until(steps) if loader else _own(run, task.batches(run.worker, run.workers), steps)
        for number, batch in enumerate(batches, run.step + 1):
            optimizer.zero_grad()
            loss = task.loss(batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.record(float(loss.detach()))
            if run.first and progress is None:
                progress = Progress(steps, options.log_every)  # the files went with the first worker
            if progress:
                figures = _figures(number, run.done, meter)
                if options.evaluate_every and number % options.evaluate_every == 0:
                    if models is not None:
                        compute(MOMENT)
                    figures |= _evaluate(task, run.replica.parameters, models)
                progress.step(figures)
        if progress:
            progress.close()
        run.finish(task.score)
        if run.first and not run.strategy.alike:
            task.renew(run.worker, run.workers)
        score = task.score() if run.first else None

    summary = run.summary(score)
    if summary is None:
        return None
    summary |= {"model": options.model, "data": options.data, "lr": options.lr, "momentum": options.momentum,
                "label_skew": skew}
    show(meters.table(summary))
    if options.summary:
        with writable(options.summary) as file:
            json.dump(summary, file, indent=1)
            file.write("\n")
    return summary


def _evaluate(task: Images | StandIn, mine: FloatArray,
              models: Mapping[int, FloatArray] | None) -> dict[str, float]:
    """Figures on the test images of the task's module, whose parameters are `mine`, and of the mean of `models`."""
    score = task.score()
    if score is None:
        return {}
    figures = {"test_loss": score[0], "accuracy": score[1]}
    if models:
        kept = mine.copy()
        mine[:] = np.mean(list(models.values()), axis=0)
        score = task.score()
        mine[:] = kept
        figures |= {"accuracy_of_mean": score[1]} if score else {}
    return figures


def _load_torch() -> None:
    """Import torch with one thread per rank: ranks share a node's cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"no PyTorch: {error} (pip install 'slurmdl[train]')") from error
    torch.set_num_threads(1)


def _data(options: Options) -> Data | None:
    """The data set; None for a stand-in, which needs none."""
    if options.compute and options.compute.size:
        return None
    return read(options.data, options.seed, options.fold, options.skew)


def _seconds(options: Options) -> float:
    """Of a step's computation, where it is waited for; 0 where it takes as long as it takes."""
    if options.compute:
        return options.compute.seconds
    return simulation.STEP if options.simulate else 0.0


def _size(options: Options) -> int:
    return (options.compute.size if options.compute else None) or 0


def _warn_of_skew(run: Run, skew: float) -> None:
    if skew > SKEWED and not run.strategy.in_step and not run.world.method.quasi_global:
        gossip = run.world.strategy in ("gossip", "adaptive-gossip")
        warn(f"train: the workers' labels differ by {skew:.2f} (0: alike, 1: none in common), so that models which "
             "are not averaged in every step stray; "
             f"valid: {'--quasi-global, ' * gossip}a shorter --period, allreduce")


def _own(run: Run, batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Batches of images that are this worker's own, for so many steps."""
    for _ in range(run.step, steps):
        with run.fetching():
            batch = next(batches)
        yield batch


def _figures(number: int, done: int, meter: meters.Meter) -> dict[str, float]:
    """Of the step that the meter has just seen."""
    wall, comm = meter.wall.last, meter.comm.last
    return {"step": number, "done": done, "loss": meter.loss.last, "seconds": wall, "compute_seconds": wall - comm,
            "comm_seconds": comm, "images_per_second": meter.samples.last / wall if wall else 0.0}


def _check_writable(path: str) -> None:
    """Say now, not after the training, that a file cannot be written."""
    try:
        wholefile.check(path)
    except OSError as error:
        raise TrainError(f"--summary {os.path.abspath(path)}: cannot be written ({error.strerror})") from error
