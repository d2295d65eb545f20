"""The built-in trainer: train a network as one rank of an MPI program, or on virtual ranks."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TextIO, TypeVar

import numpy as np

from slurmdl import files, units
from slurmdl.errors import InvalidOptionsError, InvalidRunError, TrainError, UnavailableError, warn
from slurmdl.text import print_escaped
from slurmdl.train import meters
from slurmdl.train.library import checkpointer, consistency
from slurmdl.train.library.run import Run
from slurmdl.train.library.startup import connect, init
from slurmdl.train.trainer.data_readers import FloatArray, LabeledDataset, load_dataset
from slurmdl.train.trainer.models import build_lr_scheduler, build_optimizer
from slurmdl.train.trainer.options import Options
from slurmdl.train.trainer.workloads import Classification, SyntheticWorkload
from slurmdl.train.transports import virtual
from slurmdl.train.transports.transport import Transport
from slurmdl.train.transports.virtual import QueueingNetwork

#: characters of the bar
_BAR_WIDTH = 30


class Progress:
    """Progress of the first worker: a bar if stderr is a terminal, else lines on stdout.

    Args:
        metrics: file for one JSON object per step, "" for none; TrainError if it cannot be written.
        completed_steps: steps before a restart, whose metrics stay in the file.
        now: clock for the remaining time, in s.
    """

    def __init__(self, steps: int, log_every: int, metrics: str = "", completed_steps: int = 0,
                 terminal: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._log_every = steps, log_every
        self._now, self._start_s, self._first_step = now, now(), completed_steps
        self._terminal = terminal or (sys.stderr if sys.stderr and sys.stderr.isatty() else None)
        self._metrics = _open_metrics(metrics, completed_steps) if metrics else None
        self._recent: list[dict[str, float]] = []

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log a step's metrics: `step` (from 1), `loss`, `seconds`, and others.

        `global_step` is present if it can differ from the worker's `step`.
        """
        step = int(metrics["step"])
        global_step = min(int(metrics.get("global_step", step)), self._steps)
        if self._metrics:
            print(json.dumps(metrics), file=self._metrics)
        self._recent.append(metrics)
        if self._terminal:
            self._draw_bar(step, global_step)
        if step % self._log_every == 0:
            if self._metrics:
                self._metrics.flush()
            if not self._terminal:
                print(self._status_line(step, global_step), flush=True)
            self._recent.clear()

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()

    def _status_line(self, step: int, global_step: int) -> str:
        def mean(name: str) -> float:
            return sum(metrics[name] for metrics in self._recent) / len(self._recent)

        line = f"step {step} of {self._steps}: loss {mean('loss'):.4f}, {mean('seconds'):.4f} s/step"
        if mean("seconds"):
            line += f", communication {mean('exposed_comm_seconds') / mean('seconds'):.0%}"
        accuracies = [metrics["test_accuracy"] for metrics in self._recent if "test_accuracy" in metrics]
        line += f", accuracy {accuracies[-1]:.2%}" if accuracies else ""
        remaining = f", {units.format_coarse_duration(self._remaining_s(global_step))} left"
        return line + remaining * (global_step < self._steps)

    def _remaining_s(self, global_step: int) -> float:
        """Estimate the remaining seconds from the mean time per step since the start, evaluations included."""
        completed = global_step - self._first_step
        return (self._now() - self._start_s) / completed * (self._steps - global_step) if completed > 0 else 0.0

    def _draw_bar(self, step: int, global_step: int) -> None:
        assert self._terminal
        filled = _BAR_WIDTH * global_step // self._steps
        end = "\n" if global_step == self._steps else ""
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
        print(f"\r{bar} {self._status_line(step, global_step)}\x1b[K", end=end, file=self._terminal, flush=True)


def _open_metrics(path: str, completed_steps: int) -> TextIO:
    """Open a metrics file and keep the lines of the completed steps."""
    kept_lines: list[str] = []
    if completed_steps and os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as existing:
            kept_lines = list(islice(existing, completed_steps))
    file = open_for_writing(path)
    file.writelines(line for line in kept_lines if line.endswith("\n"))
    return file


def open_for_writing(path: str) -> TextIO:
    """Open a text file for writing; TrainError if that fails."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}") from error


Result = TypeVar("Result")

#: virtual seconds for which the first rank waits before an evaluation, so that equally fast ranks end their step
SYNC_SECONDS = 1e-9
#: label skew (LabeledDataset.label_skew) above which the trainer warns; up to 0.2 is chance
SKEW_WARNING = 0.3
#: steps without --steps and --epochs
DEFAULT_STEPS = 200
#: seconds of a step's computation on virtual ranks without --emulate-compute
DEFAULT_COMPUTE_SECONDS = 0.01


def train(options: Options) -> dict[str, Any] | None:
    """Train with these options, as one rank of an MPI program or with virtual ranks.

    Rank 0 and the first worker log to stdout. Returns the summary of the run (meters.summarize) on rank 0, None on
    the others. Raises SlurmdlError if the run cannot start or cannot continue.
    """
    if options.checkpoint_dir:
        checkpointer.install_signal_handlers()  # before the import of torch, which takes seconds
    _load_torch()
    if options.virtual_ranks:
        data = _load_dataset(options)
        models: dict[int, FloatArray] = {}
        return run_virtual(options, lambda transport, environ: train_rank(
            options, data, environ, transport, models))[0]
    # before the data, so that a rank that cannot read them ends the others
    transport = connect(options)
    return train_rank(options, _load_dataset(options), os.environ, transport)


def run_virtual(options: Options,
                program: Callable[[virtual.VirtualTransport, dict[str, str]], Result]) -> Sequence[Result]:
    """Run `program(transport, environ)` in each virtual rank; return the results in rank order.

    Raises the SlurmdlError of a rank; a TrainError names the rank.
    """
    nodes, zones = rank_places(options)

    def run_rank(transport: virtual.VirtualTransport) -> Result:
        try:
            return program(transport, rank_environ(nodes[transport.rank], zones[transport.rank]))
        except InvalidRunError:
            raise  # raised by all ranks
        except TrainError as error:
            raise TrainError(f"rank {transport.rank} on {nodes[transport.rank]}: {error}") from error

    return virtual.run_virtual_ranks(len(nodes), run_rank, QueueingNetwork(nodes, zones, dict(options.virtual_links)))


def rank_places(options: Options) -> tuple[list[str], list[str]]:
    """Nodes and zones of the virtual ranks, from --virtual-zones; default: one zone, one node per rank."""
    zones = options.virtual_zones or (("zone", options.virtual_ranks or 1, 1),)
    return ([f"{zone}{node}" for zone, nodes, ranks in zones for node in range(nodes) for _ in range(ranks)],
            [zone for zone, nodes, ranks in zones for _ in range(nodes * ranks)])


def rank_environ(node: str, zone: str) -> dict[str, str]:
    """Slurm's environment variables of a task on a node in a zone."""
    return {"SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}


def train_rank(options: Options, data: LabeledDataset | None, environ: Mapping[str, str], transport: Transport,
               models: dict[int, FloatArray] | None = None) -> dict[str, Any] | None:
    """Train as one rank of a run; returns as `train`. `data` is None for a synthetic workload.

    `models` (worker -> parameters) is shared by virtual workers to evaluate the averaged model; None over MPI.
    """
    run = init(options.strategy_config, seed=options.seed, must_match=options.must_match(),
               resume_must_match=options.resume_must_match(), trace_dir=options.trace_dir,
               checkpoint_dir=options.checkpoint_dir, checkpoint_every=options.checkpoint_every,
               checkpoint_keep=options.checkpoint_keep, check_every=options.check_every, environ=environ,
               transport=transport)
    size = len(run.world.nodes)
    for straggler in options.straggler:
        if straggler.rank >= size:
            raise InvalidOptionsError(f"--straggler {straggler.rank}=: no such rank; expected 0 to {size - 1}")
    if run.rank == 0:
        if options.summary:
            _check_summary_file(options.summary)
        print_escaped(f"ranks: {run.world}")
    emulate_compute = run.world.transport.emulate_compute
    default_seconds = DEFAULT_COMPUTE_SECONDS if options.virtual_ranks else 0.0
    emulated_seconds = options.emulate_compute.seconds if options.emulate_compute else default_seconds

    def compute_seconds(images: int) -> float:
        factor = next((straggler.factor for straggler in options.straggler if straggler.rank == run.rank
                       and straggler.begin <= run.global_step < straggler.end), 1.0)
        return emulated_seconds * factor * images / options.batch_size

    # synthetic gradients and virtual ranks compute nothing that a GPU would speed up
    device_name = "cpu" if data is None or options.virtual_ranks else options.device
    local_rank = run.world.nodes[:run.rank].count(run.world.nodes[run.rank])
    device = consistency.call_on_all(run.world, lambda: choose_device(device_name, local_rank))
    workload: Classification | SyntheticWorkload
    if data is None:
        assert options.emulate_compute
        workload = SyntheticWorkload(options.emulate_compute.parameters, compute_seconds, emulate_compute,
                                     options.seed)
    else:
        workload = Classification(options, data, device)
        consistency.check_same_on_ranks(run.world, [("data", f"{options.data} {zlib.crc32(data.train_x):x}")])
    optimizer = build_optimizer(options.optimizer, workload.module.parameters(), options.lr,
                                options.momentum, options.weight_decay)
    steps_per_epoch = workload.steps_per_epoch(run.worker_count)  # also checks the batch size
    steps = options.steps or (options.epochs or 0) * steps_per_epoch or DEFAULT_STEPS
    scheduler = build_lr_scheduler(optimizer, options.lr_schedule, steps, lambda: run.global_step)

    run.attach(workload.module, optimizer)
    run.register_for_checkpointing("lr_scheduler", scheduler)
    if emulated_seconds and isinstance(workload, Classification):
        workload.install_compute_emulation(compute_seconds, emulate_compute)
    run.state.batch_size = options.batch_size
    score, skew = None, data.label_skew(run.worker_count, options.seed) if data else 0.0
    if run.worker_rank is None:
        run.serve()
        run.finish()
    else:
        run.register_for_checkpointing("data", workload)
        progress = Progress(steps, options.log_every, options.metrics, run.step) if run.is_main else None
        if run.is_main:
            print_escaped(f"if a rank fails: {run.recovery.policy}")
            if skew > SKEW_WARNING and not run.strategy.averages_gradients:
                warn(f"train: label skew of the workers is {skew:.2f} (0: same distribution, 1: disjoint labels), so "
                     "models diverge between averages; use a shorter --period, or allreduce")
        if models is not None:
            models[run.worker_rank] = run.replica.parameters
        loader = run.loader_from_source(workload.data_source, options.batch_size) if workload.data_source else None
        batches = loader.batches_until(steps) if loader else _own_batches(
            run, workload.batches(run.worker_rank, run.worker_count), steps)
        for step, batch in enumerate(batches, run.step + 1):
            optimizer.zero_grad()
            loss = workload.loss(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log_loss(float(loss.detach()))
            if run.is_main and progress is None:
                progress = Progress(steps, options.log_every)  # the first worker failed, and its files are incomplete
            if progress:
                metrics = _step_metrics(step, run.global_step, run.meter)
                if options.evaluate_every and step % options.evaluate_every == 0:
                    if models is not None:
                        emulate_compute(SYNC_SECONDS)
                    metrics |= _evaluation_metrics(workload, run.replica.parameters, models)
                progress.log_step(metrics)
        if progress:
            progress.close()
        run.finish(workload.evaluate)
        if run.is_main and not run.strategy.identical_at_end:
            workload.recompute_batchnorm(run.worker_rank, run.worker_count)
        score = workload.evaluate() if run.is_main else None

    summary = run.summary(score)
    if summary is None:
        return None
    summary |= {"model": options.model, "device": str(device), "data": options.data, "lr": options.lr,
                "momentum": options.momentum, "label_skew": skew}
    print_escaped(meters.format_summary(summary))
    if options.summary:
        with open_for_writing(options.summary) as file:
            json.dump(summary, file, indent=1)
            file.write("\n")
    return summary


def _load_torch() -> None:
    """Import torch with one thread per rank, because ranks share a node's cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"PyTorch: {error} (pip install 'slurmdl[train]')") from error
    torch.set_num_threads(1)


def _load_dataset(options: Options) -> LabeledDataset | None:
    """Load the data set; None for a synthetic workload."""
    if options.emulate_compute and options.emulate_compute.parameters:
        return None
    return load_dataset(options.data, options.seed, options.fold, options.dirichlet_alpha)


def _check_summary_file(path: str) -> None:
    """Report before the training that the file cannot be written."""
    try:
        files.check_writable(path)
    except OSError as error:
        raise TrainError(f"--summary {os.path.abspath(path)}: cannot be written ({error.strerror})") from error


def _own_batches(run: Run, batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Yield batches of the worker's own images up to step `steps`."""
    for _ in range(run.step, steps):
        with run.data_phase():
            batch = next(batches)
        yield batch


def _step_metrics(step: int, global_step: int, meter: meters.StepMeter) -> dict[str, float]:
    wall, comm = meter.wall.last, meter.exposed_comm.last
    return {"step": step, "global_step": global_step, "loss": meter.loss.last, "seconds": wall,
            "compute_seconds": wall - comm, "exposed_comm_seconds": comm,
            "samples_per_second": meter.samples.last / wall if wall else 0.0}


def _evaluation_metrics(workload: Classification | SyntheticWorkload, parameters: FloatArray,
                        models: Mapping[int, FloatArray] | None) -> dict[str, float]:
    """Test metrics of the workload's module, whose flat parameters are given, and of the mean of `models`."""
    score = workload.evaluate()
    if score is None:
        return {}
    metrics = {"test_loss": score[0], "test_accuracy": score[1]}
    if models:
        saved = parameters.copy()
        parameters[:] = np.mean(list(models.values()), axis=0)
        score = workload.evaluate()
        parameters[:] = saved
        metrics |= {"test_loss_averaged_model": score[0], "test_accuracy_averaged_model": score[1]} if score else {}
    return metrics


def choose_device(name: str, local_rank: int) -> Any:
    """The torch.device of a name of --device.

    `cuda` is a GPU for each rank of a node in turn; `auto` is the same if PyTorch sees a GPU, else the CPU. AMD's are
    `cuda`, too (PyTorch documentation, HIP semantics). Raises InvalidOptionsError if there is no such GPU.

    Args:
        local_rank: index of this rank among the ranks of its node.
    """
    import torch

    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise InvalidOptionsError(f"--device {name}: PyTorch {torch.__version__} sees no GPU; expected auto or cpu")
    index = int(name.partition(":")[2] or local_rank % count)
    if index >= count:
        raise InvalidOptionsError(f"--device {name}: no such GPU; expected cuda:0 to cuda:{count - 1}, or auto")
    return torch.device("cuda", index)
