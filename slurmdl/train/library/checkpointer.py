"""Writes the checkpoints of a run, periodically and on request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmdl.errors import TrainError, warn
from slurmdl.train.library import checkpoint, consistency
from slurmdl.train.library.checkpoint import CheckpointDir, Manifest
from slurmdl.train.library.checkpoint_coordinator import CheckpointCoordinator
from slurmdl.train.library.checkpoint_restore import CheckpointRestorer, DeferredState, model_holder, rank_layout
from slurmdl.train.library.context import RunContext, RunState
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.strategies.parameter_server import PSServerBase
from slurmdl.train.strategy_config import option_name


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

    def __init__(self, ctx: RunContext, state: RunState, options: CheckpointOptions,
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
        self._recovery.strategy.quiesce(number)
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
