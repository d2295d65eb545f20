"""Restores a run from its newest complete checkpoint, and exports the model of one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurmdl.errors import InputError, InvalidRunError, warn
from slurmdl.text import pluralize
from slurmdl.train.library import consistency
from slurmdl.train.library.checkpoint import CheckpointDir, CorruptCheckpointError, Manifest, write_checkpoint_file
from slurmdl.train.library.context import Context, Counters
from slurmdl.train.strategies import Strategy
from slurmdl.train.strategies.parameter_server import PSServerBase
from slurmdl.train.world import World


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Parts of a checkpoint that this rank needs.

    Attributes:
        own: this rank's file; None if the number of ranks has changed.
        workers: for a worker the first worker's file, or all workers' files if their mean is needed; else empty.
        servers: all servers' files for a server without a file of its own; else empty.
    """

    number: int
    own: Mapping[str, Any] | None
    workers: Sequence[Mapping[str, Any]]
    servers: Sequence[Mapping[str, Any]]

    @property
    def own_or_first(self) -> Mapping[str, Any]:
        return self.own or self.workers[0]


@dataclass(frozen=True)
class DeferredState:
    """State of a worker that is restored when the script registers its owner.

    Attributes:
        registered: states of registered objects, by name.
        loaders: positions, in order of creation.
        param_groups: of the optimizer, with their learning rates.
        rng: states of random number generators; None if the number of ranks has changed.
    """

    registered: Mapping[str, Any]
    loaders: Sequence[Mapping[str, int]]
    param_groups: Sequence[Mapping[str, Any]]
    rng: Mapping[str, Any] | None


class CheckpointRestorer:
    """One rank's restoration from a checkpoint; `loaded` is the one to resume from, None for a new run."""

    def __init__(self, ctx: Context, state: Counters, checkpoint_dir: CheckpointDir, rank_file_name: str,
                 run_identity: Mapping[str, str]) -> None:
        self._ctx, self._state, self._world = ctx, state, ctx.world
        self._checkpoint_dir, self._rank_file_name, self._run_identity = checkpoint_dir, rank_file_name, run_identity
        self.loaded: LoadedCheckpoint | None = None

    def load_latest(self) -> None:
        """Load the newest complete checkpoint, and restore model and optimizer. Collective.

        Raises InvalidRunError if the checkpoint is of another run or incompatible number of ranks, or if some rank
        cannot see or write the directory.
        """
        world, path = self._world, self._checkpoint_dir.path
        self._check_shared_dir()
        numbers = world.transport.broadcast(self._checkpoint_dir.list_numbers())
        for number in numbers:
            manifest, fault = world.transport.broadcast(self._open_manifest(number) if world.rank == 0 else None)
            if manifest:
                consistency.call_on_all(world, partial(self._check_same_run, manifest))
                try:
                    self.loaded = self._load(manifest)
                except CorruptCheckpointError as error:
                    fault = str(error)
            fault = next(filter(None, world.transport.allgather(fault)), "")
            if not fault:
                self._checkpoint_dir.mark_verified(number)
                break
            self.loaded = None
            if world.rank == 0:
                warn(f"train: a checkpoint is skipped: {fault}")
        if world.rank == 0 and numbers:
            warn(f"train: resumed after step {self.loaded.number} from "
                 f"{self._checkpoint_dir.path_of(self.loaded.number)}" if self.loaded
                 else f"train: --checkpoint-dir {path}: no complete checkpoint; starting from the first step")
        if self.loaded and not world.is_server:
            self._restore_model(self.loaded)

    def _check_shared_dir(self) -> None:
        world, transport, directory = self._world, self._world.transport, self._checkpoint_dir
        probe, fault = transport.broadcast(directory.create_probe() if transport.rank == 0 else None)
        if not fault and not directory.sees_probe(probe):
            fault = f"{world.format_rank(world.rank)} cannot see or write files of {world.format_rank(0)}"
        faults = list(filter(None, transport.allgather(fault)))
        if transport.rank == 0 and probe:
            os.unlink(probe)
        if faults:
            raise InvalidRunError(f"--checkpoint-dir {directory.path}: {faults[0]}; expected a writable directory "
                                  "that all ranks share")

    def _open_manifest(self, number: int) -> tuple[Manifest | None, str]:
        """Manifest of a checkpoint, or None and the reason."""
        try:
            return self._checkpoint_dir.read_manifest(number), ""
        except CorruptCheckpointError as error:
            return None, str(error)

    def _check_same_run(self, manifest: Manifest) -> None:
        """Reject a checkpoint of another run."""
        path, saved = self._checkpoint_dir.path, manifest.run_identity
        for name in (*self._run_identity, *(saved.keys() - self._run_identity.keys())):
            current, previous = self._run_identity.get(name, "nothing"), saved.get(name, "nothing")
            if current != previous:
                raise InvalidRunError(f"--checkpoint-dir {path}: written with {name} {previous}, this run has "
                                      f"{current}; use the same, or a new directory")
        layout, is_ps = rank_layout(self._world), self._world.config.strategy == "ps"
        if is_ps and models_differ(self._world) and dict(manifest.rank_layout) != layout:
            raise InvalidRunError(
                f"--checkpoint-dir {path}: written by {_format_layout(manifest.rank_layout)}, this run has "
                f"{_format_layout(layout)}: each worker has pulled a model of its own; use the same number, or a new "
                "directory")

    def _load(self, manifest: Manifest) -> LoadedCheckpoint:
        world, layout, own_name = self._world, manifest.rank_layout, self._rank_file_name
        is_resized = dict(layout) != rank_layout(world)
        needed: Iterable[int] = (model_holder(world),)
        if is_resized:
            needed = range(layout["workers"] if models_differ(world) else 1)
        workers = [] if world.is_server else self._read_files(manifest, "worker", needed)
        if len(workers) > 1:  # of workers with equal models, the first has saved them
            workers = [file if file["model"] is not None else {
                **file, **{key: workers[layout["nodes"][index]].get(key)
                           for key in ("model", "rounding", "optimizer")}}
                       for index, file in enumerate(workers)]
        servers = self._read_files(manifest, "server", range(layout["servers"])) \
            if world.is_server and is_resized else []
        own = None
        if not is_resized:
            own = workers[0] if own_name == f"worker-{model_holder(world)}" else \
                self._checkpoint_dir.read_rank_file(manifest, own_name)
        return LoadedCheckpoint(manifest.number, own, workers, servers)

    def _read_files(self, manifest: Manifest, role: str, indices: Iterable[int]) -> list[Mapping[str, Any]]:
        return [self._checkpoint_dir.read_rank_file(manifest, f"{role}-{index}") for index in indices]

    def _restore_model(self, loaded: LoadedCheckpoint) -> None:
        import torch

        replica, optimizer, model = self._ctx.replica, self._ctx.optimizer, self._ctx.model
        if len(loaded.workers) > 1:
            weights = [content["strategy"]["model_weight"] for content in loaded.workers]
            shares = [weight / sum(weights) for weight in weights]
            content: Mapping[str, Any] = {key: average_states([file[key] for file in loaded.workers], shares)
                                          for key in ("model", "optimizer")}
        else:
            # of workers with equal models, only the first has saved them
            content = loaded.own_or_first if loaded.own_or_first["model"] is not None else loaded.workers[0]
        model.load_state_dict(content["model"])
        replica.rounding = content.get("rounding")
        replica.mark_changed()
        replica.copy_to_host()
        optimizer.load_state_dict(content["optimizer"])
        with torch.no_grad():
            for name, tensor in consistency.untrained_tensors(model, replica.trained_ids).items():
                tensor.copy_(loaded.own_or_first["untrained"][name])

    def restore_strategy(self, strategy: Strategy) -> DeferredState | None:
        """Restore the strategy and counters; return a worker's state for later, None for a new run."""
        ctx, loaded = self._ctx, self.loaded
        if loaded is None:
            return None
        is_server = ctx.world.is_server
        if isinstance(strategy, PSServerBase):
            contents = loaded.servers
            if loaded.own:
                contents = [loaded.own]
                saved = [(start, stop) for start, stop, _ in loaded.own["shards"]["shard"]]
                if saved != [(part.start, part.stop) for part in strategy.owned_slices]:
                    manifest = self._checkpoint_dir.read_manifest(loaded.number)
                    contents = self._read_files(manifest, "server", range(manifest.rank_layout["servers"]))
            strategy.load_shard_states([shard for content in contents for shard in content["shards"]["shard"]],
                                       [shard for content in contents for shard in content["shards"]["optimizer"]])
        if loaded.own:
            strategy.load_state_dict(loaded.own["strategy"])
            ctx.p2p.bytes_sent.update(loaded.own["bytes_sent"])
            ctx.meter.load_state_dict(loaded.own["meter"])
        else:
            strategy.resume_from_average([content["strategy"] for content in loaded.workers], loaded.number)
        state = self._state
        state.step = state.first_step = state.last_checkpoint_check = \
            loaded.number if is_server else loaded.own_or_first["step"]
        return None if is_server else DeferredState(
            loaded.own_or_first["registered"], loaded.own_or_first["loaders"],
            loaded.workers[0]["optimizer"]["param_groups"], loaded.own["rng"] if loaded.own else None)


def rank_layout(world: World) -> dict[str, Any]:
    """Number of ranks per role; with shared memory or islands also the grouping of workers by node or zone."""
    workers, config = world.ranks_with_role("worker"), world.config
    labels = [(world.zones if config.islands == "zone" else world.nodes)[worker] for worker in workers]
    return {"workers": len(workers), "servers": len(world.ranks_with_role("ps")),
            "nodes": [labels.index(label) for label in labels] if config.shared_memory or config.islands else []}


def model_holder(world: World) -> int:
    """Index of the worker whose file has this worker's model: the first of those with equal models; 0 on servers."""
    if world.worker_rank is None or not models_differ(world):
        return 0
    return int(rank_layout(world)["nodes"][world.worker_rank]) if world.config.islands else world.worker_rank


def models_differ(world: World) -> bool:
    """Whether the workers' models differ during training."""
    config = world.config
    return config.asynchronous if config.strategy == "ps" else config.strategy != "allreduce"


def _format_layout(layout: Mapping[str, Any]) -> str:
    servers = f" and {pluralize(layout['servers'], 'server')}" if layout["servers"] else ""
    return f"{pluralize(layout['workers'], 'worker')}{servers}{' on other nodes' * bool(layout['nodes'])}"


def average_states(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted mean of floating-point tensors in nested dicts; other values are those of the first."""
    import torch

    first = values[0]
    if isinstance(first, dict):
        return {key: average_states([value[key] for value in values], weights) for key in first}
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        total = sum(weight * value.double() for weight, value in zip(weights, values, strict=True))
        return total.to(first.dtype)
    return first


def export_model(directory: str, step: int | None, output: str) -> tuple[int, int]:
    """Write the model of a checkpoint, None for the newest complete one, as `torch.save(state_dict)`.

    Returns the number of the checkpoint, and how many models were averaged. Raises InputError if there is no such
    checkpoint, or none is complete, or the file cannot be written.
    """
    import torch

    folder = CheckpointDir(directory)
    numbers = folder.list_numbers()
    if step is not None and step not in numbers:
        raise InputError(f"no checkpoint of step {step}; expected one of {', '.join(map(str, numbers)) or 'none'}",
                         directory)
    fault = "no checkpoint"
    for number in numbers if step is None else (step,):
        try:
            models, weights, changes = _read_models(folder, folder.read_manifest(number))
            break
        except CorruptCheckpointError as error:
            fault = str(error)
            warn(f"train export: a checkpoint is skipped: {fault}")
    else:
        raise InputError(fault, directory)
    state = average_states(models, [weight / sum(weights) for weight in weights]) if len(models) > 1 else models[0]
    for name, change in changes.items():
        state[name] = (state[name].double() + change / sum(weights)).to(state[name].dtype)
    try:
        write_checkpoint_file(os.path.abspath(output), lambda file: torch.save(state, file))
    except OSError as error:
        raise InputError(str(error.strerror), output) from error
    return number, len(models)


def _read_models(folder: CheckpointDir,
                 manifest: Manifest) -> tuple[list[dict[str, Any]], list[float], dict[str, Any]]:
    """State dicts and weights of the workers' models: of equal ones one, with the sum of their weights.

    Buffers differ between workers with equal models, too: the third value has the weighted sum of their differences.
    """
    models: list[dict[str, Any]] = []
    weights: list[float] = []
    changes: dict[str, Any] = {}
    groups, holders = manifest.rank_layout["nodes"], dict[int, int]()
    for index in range(manifest.rank_layout["workers"]):
        content = folder.read_rank_file(manifest, f"worker-{index}")
        weight = float(content["strategy"].get("model_weight", 1.0))
        if content["model"] is not None:
            holders[index] = len(models)
            models.append(content["model"])
            weights.append(weight)
            continue
        position = holders[groups[index]] if groups else 0
        weights[position] += weight
        for name, value in content["untrained"].items():
            held = models[position].get(name)
            if held is not None and held.is_floating_point() and held.shape == value.shape and not held.equal(value):
                changes[name] = changes.get(name, 0) + weight * (value.double() - held.double())
    return models, weights, changes
