"""The built-in trainer, top to bottom."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import files
from slurmdl.errors import InvalidOptionsError, TrainError, UnavailableError, warn
from slurmdl.text import print_escaped
from slurmdl.train.library import checkpoint_coordinator, consistency
from slurmdl.train.library.run import CHECKPOINT_DIR_VARIABLE, Run, init
from slurmdl.train.report import meters
from slurmdl.train.trainer import optimizers, virtual_run
from slurmdl.train.trainer.data import ImageDataset, load_dataset
from slurmdl.train.trainer.options import Options
from slurmdl.train.trainer.progress import Progress, open_for_writing
from slurmdl.train.trainer.workloads import ImageClassification, SyntheticWorkload
from slurmdl.train.transports.transport import Transport
from slurmdl.train.world import init_mpi

FloatArray = npt.NDArray[np.float32]

#: seconds in which the virtual ranks that are as far as the first one finish their step before all are evaluated
SYNC_SECONDS = 1e-9

#: difference of the workers' labels (Data.label_skew) that is warned of; up to 0.2 is chance
SKEW_WARNING = 0.3

#: steps where neither --steps nor --epochs is given
DEFAULT_STEPS = 200


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
    if options.checkpoint_dir or os.environ.get(CHECKPOINT_DIR_VARIABLE):
        checkpoint_coordinator.install_signal_handlers()  # before torch is imported, which takes seconds
    _load_torch()
    if options.virtual_ranks:
        data = _load_dataset(options)
        models: dict[int, FloatArray] = {}
        return virtual_run.run_virtual(options, lambda transport, environ: train_rank(
            options, data, environ, transport, models))[0]
    transport = init_mpi()  # before the data, so that a rank that cannot read them ends the others
    return train_rank(options, _load_dataset(options), os.environ, transport)


def train_rank(options: Options, data: ImageDataset | None, environ: Mapping[str, str], transport: Transport,
             models: dict[int, FloatArray] | None = None) -> dict[str, Any] | None:
    """One rank's part in a run.

    Parameters
    ----------
    models : where virtual workers find each other's parameters, so that their mean can be evaluated on the way; None
        where ranks do not share their memory.
    """
    run = init(options.strategy_config, seed=options.seed, must_match=options.must_match(), resume_must_match=options.resume_must_match(), trace_dir=options.trace_dir,
               plot_file=options.plot, checkpoint_dir=options.checkpoint_dir, checkpoint_every=options.checkpoint_every,
               check_every=options.check_every, environ=environ, transport=transport)
    beyond = [slow.rank for slow in options.straggler if slow.rank >= len(run.world.nodes)]
    if beyond:
        raise InvalidOptionsError(f"--slow {beyond[0]}=: no such rank; valid: 0 to {len(run.world.nodes) - 1}")
    if run.rank == 0:
        if options.summary:
            _check_summary_file(options.summary)
        print_escaped(f"ranks: {run.world}")
    compute = run.world.transport.emulate_compute
    takes = _emulated_seconds(options)

    def seconds(images: int) -> float:
        """Of this rank's computation of a step."""
        factor = next((slow.factor for slow in options.straggler
                       if slow.rank == run.rank and slow.begin <= run.global_step < slow.end), 1.0)
        return takes * factor * images / options.batch_size

    task: ImageClassification | SyntheticWorkload
    if data is None:
        task = SyntheticWorkload(_emulated_parameters(options), seconds, compute, options.seed)
    else:
        task = ImageClassification(options, data)
        consistency.check_same_on_ranks(run.world, [("data", f"{options.data} {zlib.crc32(data.train_x):x}")])
    optimizer = optimizers.build_optimizer(options.optimizer, task.module.parameters(), options.lr, options.momentum,
                                 options.weight_decay)
    an_epoch = task.steps_per_epoch(run.worker_count)
    steps = options.steps or (options.epochs or 0) * an_epoch or DEFAULT_STEPS
    schedule = optimizers.build_lr_scheduler(optimizer, options.lr_schedule, steps, lambda: run.global_step)

    run.attach(task.module, optimizer)
    run.register_for_checkpointing("schedule", schedule)
    if takes and isinstance(task, ImageClassification):
        task.install_compute_emulation(seconds, compute)
    meter, run.batch_size = run.meter, options.batch_size
    score, skew = None, task.label_skew(run.worker_count)
    if run.worker_rank is None:
        run.serve()
        run.finish()
    else:
        run.register_for_checkpointing("data", task)
        progress = Progress(steps, options.log_every, options.metrics, options.tensorboard_dir, run.step) \
            if run.is_main else None
        if run.is_main:
            print_escaped(f"if a rank is lost: {run.failure_policy}")
            _warn_label_skew(run, skew)
        if models is not None:
            models[run.worker_rank] = run.replica.parameters
        loader = run.loader_from_source(task.data_source, options.batch_size) if task.data_source else None
        batches = loader.batches_until(steps) if loader else _own_batches(
            run, task.batches(run.worker_rank, run.worker_count), steps)
        for number, batch in enumerate(batches, run.step + 1):
            optimizer.zero_grad()
            loss = task.loss(batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.log_loss(float(loss.detach()))
            if run.is_main and progress is None:
                progress = Progress(steps, options.log_every)  # the files went with the first worker
            if progress:
                figures = _step_metrics(number, run.global_step, meter)
                if options.evaluate_every and number % options.evaluate_every == 0:
                    if models is not None:
                        compute(SYNC_SECONDS)
                    figures |= _evaluation_metrics(task, run.replica.parameters, models)
                progress.log_step(figures)
        if progress:
            progress.close()
        run.finish(task.evaluate)
        if run.is_main and not run.strategy.identical_at_end:
            task.recompute_batchnorm(run.worker_rank, run.worker_count)
        score = task.evaluate() if run.is_main else None

    summary = run.summary(score)
    if summary is None:
        return None
    summary |= {"model": options.model, "data": options.data, "lr": options.lr, "momentum": options.momentum,
                "label_skew": skew}
    print_escaped(meters.format_summary(summary))
    if options.summary:
        with open_for_writing(options.summary) as file:
            json.dump(summary, file, indent=1)
            file.write("\n")
    return summary


def _evaluation_metrics(workload: ImageClassification | SyntheticWorkload, own_model: FloatArray,
              models: Mapping[int, FloatArray] | None) -> dict[str, float]:
    """Figures on the test images of the task's module, whose parameters are `mine`, and of the mean of `models`."""
    score = workload.evaluate()
    if score is None:
        return {}
    figures = {"test_loss": score[0], "accuracy": score[1]}
    if models:
        kept = own_model.copy()
        own_model[:] = np.mean(list(models.values()), axis=0)
        score = workload.evaluate()
        own_model[:] = kept
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


def _load_dataset(options: Options) -> ImageDataset | None:
    """The data set; None for a stand-in, which needs none."""
    if options.emulate_compute and options.emulate_compute.parameters:
        return None
    return load_dataset(options.data, options.seed, options.fold, options.dirichlet_alpha)


def _emulated_seconds(options: Options) -> float:
    """Of a step's computation, where it is waited for; 0 where it takes as long as it takes."""
    if options.emulate_compute:
        return options.emulate_compute.seconds
    return virtual_run.DEFAULT_COMPUTE_SECONDS if options.virtual_ranks else 0.0


def _emulated_parameters(options: Options) -> int:
    return (options.emulate_compute.parameters if options.emulate_compute else None) or 0


def _warn_label_skew(run: Run, skew: float) -> None:
    if skew > SKEW_WARNING and not run.strategy.averages_gradients and not run.world.config.quasi_global_momentum:
        gossip = run.world.strategy in ("gossip", "adaptive-gossip")
        warn(f"train: the workers' labels differ by {skew:.2f} (0: alike, 1: none in common), so that models which "
             "are not averaged in every step stray; "
             f"valid: {'--quasi-global, ' * gossip}a shorter --period, allreduce")


def _own_batches(run: Run, batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Batches of images that are this worker's own, for so many steps."""
    for _ in range(run.step, steps):
        with run.data_phase():
            batch = next(batches)
        yield batch


def _step_metrics(step: int, global_step: int, meter: meters.StepMeter) -> dict[str, float]:
    """Of the step that the meter has just seen."""
    wall, comm = meter.wall.last, meter.exposed_comm.last
    return {"step": step, "done": global_step, "loss": meter.loss.last, "seconds": wall, "compute_seconds": wall - comm,
            "comm_seconds": comm, "images_per_second": meter.samples.last / wall if wall else 0.0}


def _check_summary_file(path: str) -> None:
    """Say now, not after the training, that a file cannot be written."""
    try:
        files.check_writable(path)
    except OSError as error:
        raise TrainError(f"--summary {os.path.abspath(path)}: cannot be written ({error.strerror})") from error
