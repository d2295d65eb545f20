"""Makes the checkpoints of a run, when they are due or asked for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmdl.errors import TrainError, warn
from slurmdl.train.library import checkpoint, consistency
from slurmdl.train.library.checkpoint import CheckpointDir, Manifest
from slurmdl.train.library.checkpoint_coordinator import CheckpointCoordinator
from slurmdl.train.library.checkpoint_restore import (
    CheckpointRestorer,
    DeferredState,
    config_fingerprint,
    models_differ,
    rank_layout,
)
from slurmdl.train.strategies import Strategy
from slurmdl.train.strategies.parameter_server import PSServerBase

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class Checkpointer:
    """One rank's part in the checkpoints of a run.

    Parameters
    ----------
    folder : which all ranks share.
    every : steps from one checkpoint to the next; 0 for none but those that a signal asks for.
    about : what another run could not go on from, by name, besides the method.
    """

    def __init__(self, run: Run, checkpoint_dir: str, every: int, run_identity: Mapping[str, object]) -> None:
        self._run, self._world = run, run.world
        self._checkpoint_dir, self._every = CheckpointDir(checkpoint_dir), every
        self._run_identity = {**config_fingerprint(run.world), **{name: str(value)
                                                   for name, value in run_identity.items()}}
        self._registered: dict[str, Any] = {}
        self._restorer: CheckpointRestorer | None = None
        self._deferred: DeferredState | None = None
        self._rng_restored = False
        self._rank_file_name = f"worker-{run.worker_rank}" if run.worker_rank is not None else \
            f"server-{run.world.ranks_with_role('ps').index(run.rank)}"
        self._last_number = 0
        self._coordinator: CheckpointCoordinator | None = None

    def load_latest(self, signature: Sequence[tuple[str, str]]) -> None:
        """Look for the last whole checkpoint; see Resume.find.

        Parameters
        ----------
        about : (name, value) of what else another run could not go on from, as shapes of parameters.
        """
        self._run_identity |= dict(signature)
        self._restorer = CheckpointRestorer(self._run, self._checkpoint_dir, self._rank_file_name, self._run_identity)
        self._restorer.load_latest()

    def restore_strategy(self, strategy: Strategy) -> None:
        """Let a strategy go on as the one whose checkpoint was found, and listen for signals from now on."""
        run = self._run
        if self._restorer:
            self._deferred, self._restorer = self._restorer.restore_strategy(strategy), None
        self._last_number = self._deferred.number if self._deferred else 0
        self._coordinator = CheckpointCoordinator(self._world.transport, run.comm_thread, self._world.ranks_with_role("worker"), lambda: run.step,
                          strategy.lockstep)

    def register(self, name: str, obj: Any) -> None:
        """See Run.keep."""
        if name in self._registered or self._coordinator is None:
            raise TrainError(f"register_for_checkpointing({name!r}): valid: after run.wrap(), each name once")
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise TrainError(f"register_for_checkpointing({name!r}): a {type(obj).__name__} has no state_dict() and load_state_dict()")
        checkpoint.check_loadable(name, obj.state_dict())
        self._registered[name] = obj
        if self._deferred and name in self._deferred.registered:
            obj.load_state_dict(self._deferred.registered[name])
            # a schedule that was made after wrap() has begun with the first learning rate again
            for group, saved in zip(self._run.optimizer.param_groups, self._deferred.param_groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def restore_loader(self, index: int) -> None:
        """Let the loader of this index go on where it was."""
        if self._deferred and index < len(self._deferred.loaders):
            self._run.loaders[index].load_state_dict(self._deferred.loaders[index])

    def restore_rng(self) -> None:
        """Let random numbers go on as they did; once."""
        if self._deferred and self._deferred.rng and not self._rng_restored:
            set_rng_state(self._deferred.rng)
        self._rng_restored = True

    def due_checkpoint(self, last: bool) -> tuple[int, bool] | None:
        """The number of the checkpoint that is due now, between two steps, and whether all stop after it."""
        assert self._coordinator
        step, together = self._run.step, self._run.strategy.lockstep
        passed = self._every and step - self._last_number >= self._every
        if passed and not together and self._run.is_main:
            self._coordinator.request()
        told = self._coordinator.due_checkpoint(last)
        if told:
            return told
        return (step, False) if together and self._every and step % self._every == 0 and step > self._last_number else None

    def save(self, number: int, stops: bool = False) -> bool:
        """Write this checkpoint, with all other ranks, unless it is there already; whether all stop now."""
        run, world, folder = self._run, self._world, self._checkpoint_dir
        there = number == folder.newest_valid
        self._last_number = max(number, run.step)
        if not run.is_server:  # what a server has is newer than its model
            run.replica.mark_changed()
            run.replica.copy_to_host()
        run.strategy.quiesce(number)
        run.replica.copy_to_device()
        part, fault = None, ""
        try:
            part = None if there else folder.write_rank_file(number, self._rank_file_name, self._rank_state())
        except OSError as error:
            fault = f"rank {world.rank} on {world.nodes[world.rank]}: {error.filename}: {error.strerror}"
        told = run.all_gather_object((part, fault, stops))
        faults = [its for _, its, _ in told if its]
        if world.rank == 0 and not there and not faults:
            parts = {its.name: its for its, _, _ in told if its}
            try:
                folder.commit(Manifest(number, self._run_identity, rank_layout(world), parts))
            except OSError as error:
                faults = [f"{error.filename}: {error.strerror}"]
        if world.rank == 0 and faults:
            folder.remove(number)
            stays = "no other is there" if folder.newest_valid is None else f"that of step {folder.newest_valid} stays"
            warn(f"train: no checkpoint of step {number}: {faults[0]}; {stays}")
        if run.all_gather_object(not faults)[0]:
            folder.mark_verified(number)
        if self._coordinator:
            self._coordinator.checkpoint_done()
        # without any checkpoint to go on from there is nothing to stop for
        return folder.newest_valid is not None and any(its for _, _, its in told)

    @property
    def path(self) -> str:
        """Of the folder."""
        return self._checkpoint_dir.path

    def finish(self) -> None:
        """This worker has made its last step."""
        if self._coordinator:
            self._coordinator.finish()

    def _rank_state(self) -> dict[str, Any]:
        """What this rank writes down."""
        run, strategy = self._run, self._run.strategy
        content = {"strategy": strategy.state_dict(), "bytes_sent": dict(
            run.p2p.bytes_sent), "meter": run.meter.state_dict()}
        if isinstance(strategy, PSServerBase):
            return {**content, "shards": strategy.shard_states()}
        import torch

        alone = run.is_main or models_differ(self._world)
        return {**content, "step": run.step,
                "model": torch.from_numpy(run.replica.parameters) if alone else None,
                "optimizer": run.optimizer.state_dict() if alone else None,
                "untrained": consistency.untrained_tensors(run.model, run.replica.tensors),
                "loaders": [loader.state_dict() for loader in run.loaders],
                "registered": {name: thing.state_dict() for name, thing in self._registered.items()},
                "rng": get_rng_state()}


# MERGED: Where the generators of random numbers stand that scripts use without making them.

def get_rng_state() -> dict[str, Any]:
    """Of all of them, as numbers, words and tensors; those of GPUs where there are some in use."""
    import torch

    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "torch": torch.get_rng_state(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def set_rng_state(rng_state: Mapping[str, Any]) -> None:
    """Let them go on from a state."""
    import torch

    kind, keys, *rest = rng_state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(rng_state["python"])
    torch.set_rng_state(rng_state["torch"])
    if rng_state["cuda"]:
        torch.cuda.set_rng_state_all(rng_state["cuda"])
