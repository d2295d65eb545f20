"""Writes the checkpoints of a run, periodically and on request.

Ranks agree on a common checkpoint without messages in normal operation. A signaled rank sends a request to the first
worker, which queries all workers. Each replies with the step that it has just completed, or will have completed next
if it is within one, and promises to start no further step before it receives the maximum of the replies: the step at
which all can stop. Ranks that wait for each other reply while they wait, so this cannot deadlock. Workers without a
common step stop when they receive the result.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from slurmdl.errors import TrainError, warn
from slurmdl.train.library import checkpoint, consistency
from slurmdl.train.library.checkpoint import CheckpointDir, Manifest
from slurmdl.train.library.checkpoint_restore import CheckpointRestorer, DeferredState, model_holder, rank_layout
from slurmdl.train.library.context import Context, Counters
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.p2p import CommThread
from slurmdl.train.strategies.parameter_server import PSServerBase
from slurmdl.train.strategy_config import option_name
from slurmdl.train.transports.transport import Tag, Transport

#: sent by Slurm before a time limit (sbatch --signal), at it, and at preemption
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: unreachable step number: this worker has made its last step
_NEVER = 1 << 62
#: kinds of messages, each with a number
_STOP_REQUEST, _STEP_QUERY, _STEP_REPLY, _STOP_STEP = range(4)
#: seconds between two polls for messages while a rank computes
_POLL_SECONDS = 0.1

_signals_received = 0


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signals_received
    _signals_received += 1


def install_signal_handlers(handler: Callable[[int, FrameType | None], None] | int = _on_signal) -> None:
    """Record PREEMPTION_SIGNALS instead of exiting, or handle them otherwise; call in the main thread."""
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, handler)


def has_received_signal() -> bool:
    """Whether one of PREEMPTION_SIGNALS has arrived in this process, so that it must stop."""
    return _signals_received > 0


class CheckpointCoordinator:
    """One rank's part in the agreement on a checkpoint; the first worker coordinates.

    `completed_steps` returns the steps that this worker has made. If `lockstep`, all stop at the same step.
    """

    def __init__(self, transport: Transport, comm_thread: CommThread, workers: Sequence[int],
                 completed_steps: Callable[[], int], lockstep: bool) -> None:
        self._transport, self._comm_thread, self._workers = transport, comm_thread, workers
        self._completed_steps, self._lockstep = completed_steps, lockstep
        #: guards the promise, which the communication thread gives and the training thread keeps
        self._lock = threading.Lock()
        self._promised_step: int | None = None
        self._agreed_step: int | None = None
        self._finished = self._polling = False
        self._signals_handled = 0
        self._stop_requested = self._stops_after = self._query_open = False
        #: whether `due_checkpoint` has returned the last agreed checkpoint
        self._reported = False
        self._replies: dict[int, int] = {}
        self._pending_sends: list[Any] = []
        self._last_poll = transport.now()
        comm_thread.call(lambda: transport.set_poll_hook(Tag.CHECKPOINT, self._poll))

    def request(self) -> None:
        """Request a checkpoint of all ranks; called by the first worker."""
        self._comm_thread.call(self._start_query)

    def request_stop(self) -> None:
        """Request a checkpoint of all ranks after which they stop, as a signal does; called by the first worker."""
        self._comm_thread.submit(lambda: self._send(self._workers[0], _STOP_REQUEST))

    def due_checkpoint(self, last: bool = False) -> tuple[int, bool] | None:
        """Between two steps: number of the checkpoint that is due now, and whether the run stops after it.

        After its `last` step a worker waits for any pending decision.
        """
        step, now = self._completed_steps(), self._transport.now()
        own_step = _NEVER if last else step
        if not self._is_holding(own_step) and self._agreed_step is None and now - self._last_poll < _POLL_SECONDS:
            return None
        self._last_poll = now
        self._comm_thread.call(lambda: self._poll(0))
        while self._is_holding(own_step):
            self._comm_thread.call(self._wait_message)
        if self._agreed_step is None or (self._lockstep and step < self._agreed_step):
            return None
        number = self._agreed_step
        self._promised_step = self._agreed_step = None
        self._reported = True
        return None if number >= _NEVER else (number, self._stops_after)

    def checkpoint_done(self) -> None:
        """All ranks have written a checkpoint. If `due_checkpoint` returned it, the next query may start.

        Not earlier: a rank that has yet to act on the last result would drop its reply to the next query.
        """
        if self._reported:
            self._reported = self._query_open = False

    def finish(self) -> None:
        """This worker has made its last step and promises any step."""
        with self._lock:
            self._finished = True

    def _is_holding(self, step: int) -> bool:
        """Whether this worker must not start another step yet."""
        with self._lock:
            return self._promised_step is not None and step >= self._promised_step and self._agreed_step is None

    def _wait_message(self) -> None:
        self._polling = True  # or the poll hook would receive the message
        self._transport.wait_any_or_message([], Tag.CHECKPOINT)
        self._polling = False
        self._poll(0)

    def _poll(self, in_step: int = 1) -> None:
        """Handle signals and messages, as a comm op or poll hook; `in_step`: 0 between two steps, 1 if unknown."""
        if self._polling:
            return
        self._polling = True
        if self._signals_handled < _signals_received:
            self._signals_handled = _signals_received
            self._send(self._workers[0], _STOP_REQUEST)
        while (peer := self._transport.iprobe(Tag.CHECKPOINT)) is not None:
            message = np.empty(3, np.int64)
            self._transport.waitall([self._transport.irecv(peer, message, Tag.CHECKPOINT)])
            kind, number, stops = message.tolist()
            self._on_message(peer, kind, number, bool(stops), in_step)
        if self._stop_requested:
            self._start_query(in_step)
        self._polling = False

    def _send(self, peer: int, kind: int, number: int = 0, in_step: int = 1) -> None:
        if peer == self._transport.rank:
            self._on_message(peer, kind, number, self._stops_after, in_step)
        else:
            self._pending_sends.append(self._transport.isend(
                peer, np.array([kind, number, self._stops_after], np.int64), Tag.CHECKPOINT))

    def _on_message(self, peer: int, kind: int, number: int, stops: bool, in_step: int = 1) -> None:
        if kind == _STOP_REQUEST:
            self._stop_requested = True
        elif kind == _STEP_QUERY:
            self._send(self._workers[0], _STEP_REPLY, self._promise(in_step))
        elif kind == _STOP_STEP:
            self._stops_after = stops
            self._agreed_step = number
        else:
            self._replies[peer] = number
            if len(self._replies) == len(self._workers):
                self._decide()

    def _start_query(self, in_step: int = 1) -> None:
        if not self._query_open:
            self._query_open = True
            self._replies = {}
            for worker in self._workers:
                self._send(worker, _STEP_QUERY, in_step=in_step)

    def _decide(self) -> None:
        # a later request is not part of this decision and waits for the next query
        self._stops_after, self._stop_requested = self._stop_requested, False
        agreed_step = max(self._replies.values())
        for worker in self._workers:
            self._send(worker, _STOP_STEP, agreed_step)

    def _promise(self, in_step: int) -> int:
        with self._lock:
            self._promised_step = _NEVER if self._finished else self._completed_steps() + in_step
            return self._promised_step


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints.

    Attributes:
        path: directory shared by all ranks.
        every: steps between checkpoints; 0 for checkpoints at signals only.
        max_kept: checkpoints that are kept; 0 for all.
        run_identity: further options, by name, that a resuming run must have.
    """

    path: str
    every: int
    max_kept: int
    run_identity: Mapping[str, object]


class Checkpointer:
    """One rank's part in the checkpoints of a run.

    The constructor is collective: it loads the newest checkpoint, and restores model and optimizer. The communication
    thread is idle meanwhile, so the transport is called directly. Call `restore_strategy` before any other method.
    The signature has (name, value) of further properties that a resuming run must have, e.g. parameter shapes.
    """

    def __init__(self, ctx: Context, state: Counters, options: CheckpointOptions,
                 signature: Sequence[tuple[str, str]]) -> None:
        self._ctx, self._state, self._world = ctx, state, ctx.world
        self.path, self._every = options.path, options.every
        self._checkpoint_dir = CheckpointDir(options.path, options.max_kept)
        # --ps may change
        config = {option_name(name): value for name, value in vars(ctx.world.config).items() if name != "ps"}
        self._run_identity = {name: str(value) for name, value in {
            **config, **options.run_identity, **dict(signature)}.items()}
        self._registered: dict[str, Any] = {}
        self._deferred: DeferredState | None = None
        self._rng_restored = False
        worker_rank = ctx.world.worker_rank
        self._rank_file_name = f"worker-{worker_rank}" if worker_rank is not None else \
            f"server-{ctx.world.ranks_with_role('ps').index(ctx.world.rank)}"
        self._recovery: FailureRecovery
        self.coordinator: CheckpointCoordinator
        self._restorer = CheckpointRestorer(ctx, state, self._checkpoint_dir, self._rank_file_name,
                                            self._run_identity)
        checkpoint.check_loadable(f"wrap({type(ctx.model).__name__}): checkpoints", {
            name: value for name, value in ctx.model.state_dict().items() if not hasattr(value, "device")})
        self._restorer.load_latest()

    def restore_strategy(self, recovery: FailureRecovery) -> None:
        """Restore the strategy from the loaded checkpoint, and handle signals from now on."""
        self._recovery = recovery
        self._deferred = self._restorer.restore_strategy(recovery.strategy)
        self._last_number = self._restorer.loaded.number if self._restorer.loaded else 0
        self._restorer.loaded = None
        self.coordinator = CheckpointCoordinator(
            self._world.transport, self._ctx.comm_thread, self._world.ranks_with_role("worker"),
            lambda: self._state.step, recovery.strategy.lockstep)

    def register(self, name: str, obj: Any) -> None:
        """See Run.register_for_checkpointing."""
        call = f"register_for_checkpointing({name!r})"
        if name in self._registered:
            raise TrainError(f"{call}: the name is registered already; expected each name once")
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise TrainError(f"{call}: a {type(obj).__name__} has no state_dict() and load_state_dict()")
        checkpoint.check_loadable(call, obj.state_dict())
        self._registered[name] = obj
        if self._deferred and name in self._deferred.registered:
            obj.load_state_dict(self._deferred.registered[name])
            # a scheduler created after wrap() has reset the learning rate
            for group, saved in zip(self._ctx.optimizer.param_groups, self._deferred.param_groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def restore_loader(self, index: int) -> None:
        """Restore the position of a loader."""
        if self._deferred and index < len(self._deferred.loaders):
            self._state.loaders[index].load_state_dict(self._deferred.loaders[index])

    def restore_rng(self) -> None:
        """Restore the random number generators, once."""
        if self._deferred and self._deferred.rng and not self._rng_restored:
            set_rng_state(self._deferred.rng)
        self._rng_restored = True

    def due_checkpoint(self, last: bool) -> tuple[int, bool] | None:
        """Between two steps: number of the checkpoint that is due now, and whether the run stops after it."""
        step, lockstep = self._state.step, self._recovery.strategy.lockstep
        is_periodic = self._every and step - self._last_number >= self._every
        if is_periodic and not lockstep and self._world.is_main:
            self.coordinator.request()
        agreed = self.coordinator.due_checkpoint(last)
        if not agreed and lockstep and self._every and step % self._every == 0 and step > self._last_number:
            return step, False
        return agreed

    def save(self, number: int, stops: bool = False) -> bool:
        """Write a checkpoint unless it exists; return whether the run stops now. Collective."""
        ctx, world, directory, replica = self._ctx, self._world, self._checkpoint_dir, self._ctx.replica
        exists = number == directory.newest_valid
        self._last_number = max(number, self._state.step)
        if not world.is_server:  # on a server the buffers are newer than its model
            replica.mark_changed()
            replica.copy_to_host()
        self._recovery.strategy.drain(number)
        replica.copy_to_device()
        name, rank_file, fault = self._rank_file_name, None, ""
        try:
            if not exists:
                rank_file = name, directory.write_rank_file(number, name, self._rank_state())
        except OSError as error:
            fault = f"{world.format_rank(world.rank)}: {error.filename}: {error.strerror}"
        except TrainError as error:
            fault = f"{world.format_rank(world.rank)}: {error}"
        results = ctx.all_gather_object((rank_file, fault, stops))
        faults = [fault for _, fault, _ in results if fault]
        if world.rank == 0 and not exists and not faults:
            try:
                directory.commit(Manifest(number, self._run_identity, rank_layout(world),
                                          dict(rank_file for rank_file, _, _ in results)))
            except OSError as error:
                faults = [f"{error.filename}: {error.strerror}"]
        if world.rank == 0 and faults:
            directory.remove(number)
            previous = "there is no other" if directory.newest_valid is None else \
                f"the newest is of step {directory.newest_valid}"
            warn(f"train: no checkpoint of step {number}: {faults[0]}; {previous}")
        if ctx.all_gather_object(not faults)[0]:
            directory.mark_verified(number)
        self.coordinator.checkpoint_done()
        # without any checkpoint the run continues
        return directory.newest_valid is not None and any(stops for _, _, stops in results)

    def _rank_state(self) -> dict[str, Any]:
        ctx, strategy = self._ctx, self._recovery.strategy
        content = {"strategy": strategy.state_dict(), "bytes_sent": dict(ctx.p2p.bytes_sent),
                   "meter": ctx.meter.state_dict()}
        if isinstance(strategy, PSServerBase):
            return {**content, "shards": strategy.shard_states()}
        saves_model = model_holder(self._world) == self._world.worker_rank
        return {**content, "step": self._state.step,
                "model": ctx.model.state_dict() if saves_model else None,
                "rounding": ctx.replica.rounding if saves_model else None,
                "optimizer": ctx.optimizer.state_dict() if saves_model else None,
                "untrained": consistency.untrained_tensors(ctx.model, ctx.replica.trained_ids),
                "loaders": [loader.state_dict() for loader in self._state.loaders],
                "registered": {name: obj.state_dict() for name, obj in self._registered.items()},
                "rng": get_rng_state()}


def get_rng_state() -> dict[str, Any]:
    """States of the global random number generators, as numbers, strings and tensors; of GPUs only if in use."""
    import torch

    kind, keys, *others = np.random.get_state()
    return {"python": random.getstate(), "torch": torch.get_rng_state(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *others),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def set_rng_state(rng_state: Mapping[str, Any]) -> None:
    """Restore the states of `get_rng_state`."""
    import torch

    kind, keys, *others = rng_state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *others))
    random.setstate(rng_state["python"])
    torch.set_rng_state(rng_state["torch"])
    if rng_state["cuda"]:
        torch.cuda.set_rng_state_all(rng_state["cuda"])
