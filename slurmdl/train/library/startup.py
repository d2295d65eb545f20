"""Start of a run from a training script, see docs/library.md."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping

from slurmdl.errors import InvalidOptionsError, TrainError, UsageError
from slurmdl.train import strategy_config
from slurmdl.train.library import checkpoint, checkpoint_coordinator, consistency, replica_check, shutdown
from slurmdl.train.library.checkpointer import CheckpointOptions
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.torch_distributed import TorchTransport
from slurmdl.train.transports.transport import Transport
from slurmdl.train.transports.watchdog import Watchdog
from slurmdl.train.world import World, create_world, init_transport

#: default steps between checkpoints
DEFAULT_CHECKPOINT_EVERY = 500
#: default of the longest wait, in s, as in torch.distributed
DEFAULT_TIMEOUT_S = 1800

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
        trace_dir: directory for traces (trace.Trace); "": SLURMDL_TRAIN_TRACE_DIR, if set.
        checkpoint_dir: directory for checkpoints, shared by all ranks; "": SLURMDL_TRAIN_CHECKPOINT_DIR, if set. The
            run resumes from the newest complete checkpoint in it.
        checkpoint_every: steps between checkpoints, 0 for checkpoints at signals only; None:
            SLURMDL_TRAIN_CHECKPOINT_EVERY, else DEFAULT_CHECKPOINT_EVERY.
        checkpoint_keep: newest checkpoints that are kept, 0 for all; None: SLURMDL_TRAIN_CHECKPOINT_KEEP, else
            checkpoint.DEFAULT_KEPT.
        check_every: steps between comparisons of replicas that must be equal, 0 for none; None:
            SLURMDL_TRAIN_CHECK_EVERY, else replica_check.DEFAULT_CHECK_EVERY.
        timeout: seconds after which a rank that waits for others ends the run, 0 for none; None:
            SLURMDL_TRAIN_TIMEOUT, else DEFAULT_TIMEOUT_S.
        backend: "mpi", "torch" (torch.distributed with gloo), or "auto": what the launch offers
            (world.init_transport); "": SLURMDL_TRAIN_BACKEND, else auto.
        transport: None: by the backend; then an uncaught exception aborts all ranks, and the run is closed at exit.
    """
    if backward_passes_per_step < 1:
        raise TrainError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    owns_process = transport is None
    if owns_process:
        shutdown.install_excepthook()
    if transport is None:
        transport = connect(backend, timeout, environ)
    checkpoint_dir = checkpoint_dir or environ.get(strategy_config.CHECKPOINT_DIR_VARIABLE, "")
    checkpoint_every = _option_or_variable(
        checkpoint_every, environ, strategy_config.CHECKPOINT_EVERY_VARIABLE, DEFAULT_CHECKPOINT_EVERY)
    checkpoint_keep = _option_or_variable(
        checkpoint_keep, environ, strategy_config.CHECKPOINT_KEEP_VARIABLE, checkpoint.DEFAULT_KEPT)
    check_every = _option_or_variable(
        check_every, environ, strategy_config.CHECK_EVERY_VARIABLE, replica_check.DEFAULT_CHECK_EVERY)
    if checkpoint_dir and owns_process:
        checkpoint_coordinator.install_signal_handlers()
    own_options = {"seed": seed, "backward_passes_per_step": backward_passes_per_step}
    world = create_world(config or strategy_config.resolve({}, environ), transport, environ, {
        **(must_match or {}), **own_options, "checkpoint_dir": checkpoint_dir, "checkpoint_every": checkpoint_every,
        "check_every": check_every})
    checkpoints = CheckpointOptions(os.path.abspath(checkpoint_dir), checkpoint_every, checkpoint_keep, {
        **(resume_must_match or {}), **own_options}) if checkpoint_dir else None
    trace_dir = trace_dir or environ.get(strategy_config.TRACE_DIR_VARIABLE, "")
    run = consistency.call_on_all(world, lambda: Run(world, seed, backward_passes_per_step, check_every, trace_dir,
                                                     checkpoints, owns_process))
    if checkpoints:
        _require_common_steps(world)
    if owns_process:
        _close_at_exit(run)
    return run


def connect(backend: str = "", timeout: int | None = None, environ: Mapping[str, str] = os.environ) -> Transport:
    """Connect to the other ranks, with a watchdog; see `init` for the arguments. Collective."""
    limit_s = wait_limit_s(timeout, environ)
    transport = init_transport(backend, environ, limit_s)
    watch_waits(transport, limit_s)
    if isinstance(transport, MpiTransport):
        transport.use_own_communicator()
    return transport


def wait_limit_s(timeout: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """The longest wait for other ranks, in s, 0 for no limit; see `init` for the arguments."""
    return _option_or_variable(timeout, environ, strategy_config.TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)


def watch_waits(transport: MpiTransport | TorchTransport, limit_s: float) -> None:
    """End this rank with a message if it waits for others longer than a limit, 0 for none."""
    if limit_s:
        transport.watch(Watchdog(transport, limit_s),
                        lambda error: shutdown.exit_process(shutdown.report_failure(error)))


def _require_common_steps(world: World) -> None:
    """Reject checkpoints of workers without a common step."""
    if world.config.load_balance and world.config.asynchronous:
        raise InvalidOptionsError("--checkpoint-dir: not valid with --load-balance --async, which gives workers "
                                  "different numbers of steps; expected one of the two, or neither")


def _option_or_variable(number: int | None, environ: Mapping[str, str], variable: str, default: int) -> int:
    if number is not None:
        return number
    text = environ.get(variable) or str(default)
    if not text.isdecimal():
        raise UsageError(f"{variable}: {text!r} is not a whole number of 0 or more")
    return int(text)


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
