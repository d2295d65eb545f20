"""Start of a run from a training script, see docs/library.md."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping

from slurmdl.errors import InvalidOptionsError, TrainError
from slurmdl.train.library import checkpointer, consistency, shutdown
from slurmdl.train.library.checkpointer import CheckpointOptions
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import RunOptions, StrategyConfig, resolve, run_options
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.torch_distributed import TorchTransport
from slurmdl.train.transports.transport import Transport, Watchdog
from slurmdl.train.world import create_world, init_transport

#: runs to close at the end of the program, in the order of their start
_open_runs: list[Run] = []


def init(config: StrategyConfig | None = None, *, seed: int = 1, backward_passes_per_step: int = 1,
         must_match: Mapping[str, object] | None = None, resume_must_match: Mapping[str, object] | None = None,
         trace_dir: str = "", checkpoint_dir: str = "", checkpoint_every: int | None = None,
         checkpoint_keep: int | None = None, check_every: int | None = None, timeout: int | None = None,
         backend: str = "", environ: Mapping[str, str] = os.environ, transport: Transport | None = None) -> Run:
    """Start a run. Collective.

    Args:
        config: the strategy; None: from the variables SLURMDL_TRAIN_* and the plan.
        seed: of the order of the samples and of all randomness in a strategy.
        backward_passes_per_step: backward passes per optimizer step, whose gradients add up.
        must_match: further options of the script, by name, that must be the same on all ranks.
        resume_must_match: those of them that a checkpoint must match to be resumed.
        trace_dir, checkpoint_dir, checkpoint_every, checkpoint_keep, check_every, timeout, backend: as the fields of
            strategy_config.RunOptions; "" or None: the variable SLURMDL_TRAIN_*, else the default.
        transport: None: by the backend; then an uncaught exception aborts all ranks, and the run is closed at exit.
    """
    if backward_passes_per_step < 1:
        raise TrainError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    owns_process = transport is None
    if owns_process:
        shutdown.install_excepthook()
    options = run_options(
        environ, trace_dir=trace_dir, checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep, check_every=check_every, timeout=timeout, backend=backend)
    if transport is None:
        transport = connect(options, environ)
    if options.checkpoint_dir and owns_process:
        checkpointer.install_signal_handlers()
    own_options = {"seed": seed, "backward_passes_per_step": backward_passes_per_step}
    world = create_world(config or resolve({}, environ), transport, environ, {
        **(must_match or {}), **own_options, "checkpoint_dir": options.checkpoint_dir,
        "checkpoint_every": options.checkpoint_every, "check_every": options.check_every})
    checkpoints = CheckpointOptions(
        os.path.abspath(options.checkpoint_dir), options.checkpoint_every, options.checkpoint_keep, {
            **(resume_must_match or {}), **own_options}) if options.checkpoint_dir else None
    run = consistency.call_on_all(world, lambda: Run(world, seed, backward_passes_per_step, options.check_every,
                                                     options.trace_dir, checkpoints, owns_process))
    if checkpoints and world.config.load_balance and world.config.asynchronous:
        raise InvalidOptionsError("--checkpoint-dir: not valid with --load-balance --async, which gives workers "
                                  "different numbers of steps; expected one of the two, or neither")
    if owns_process:
        _close_at_exit(run)
    return run


def connect(options: RunOptions, environ: Mapping[str, str] = os.environ) -> Transport:
    """Connect to the other ranks, with a watchdog. Collective."""
    transport = init_transport(options.backend, environ, options.timeout)
    watch_waits(transport, options.timeout)
    if isinstance(transport, MpiTransport):
        transport.use_own_communicator()
    return transport


def watch_waits(transport: MpiTransport | TorchTransport, limit_s: float) -> None:
    """End this rank with a message if it waits for others longer than a limit, 0 for none."""
    if limit_s:
        transport.watch(Watchdog(transport, limit_s),
                        lambda error: shutdown.exit_process(shutdown.report_failure(error)))


def _close_at_exit(run: Run) -> None:
    if not _open_runs:
        # before the end of concurrent.futures, which starts the threads of the backend torch; Python has no public
        # function for this, and no new threads in atexit handlers
        getattr(threading, "_register_atexit", atexit.register)(_close_runs)
    _open_runs[:] = [*(other for other in _open_runs if not other.state.closed), run]


def _close_runs() -> None:
    if multiprocessing.parent_process():
        return  # a process of a DataLoader, or one of torch.multiprocessing.spawn, which may have failed
    try:
        for run in _open_runs:
            run.close_at_exit()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
