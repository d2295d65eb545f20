"""Finds the last whole checkpoint of a run, and lets a rank go on from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmdl.errors import InvalidRunError, warn
from slurmdl.train.library import consistency
from slurmdl.train.library.checkpoint import CheckpointDir, CorruptCheckpointError, Manifest
from slurmdl.train.strategies import Strategy
from slurmdl.train.strategies.parameter_server import PSServerBase
from slurmdl.train.world import World

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A whole checkpoint, as far as this rank needs it.

    Attributes
    ----------
    number : of the checkpoint.
    mine : this rank's part; None where there were ranks of another number.
    first : the first worker's part; empty for a server.
    others : all workers' parts, where their models' mean is to be taken; else empty.
    servers : all servers' parts, where this is a server and has none of its own; else empty.
    """

    number: int
    own: Mapping[str, Any] | None
    first_worker: Mapping[str, Any]
    all_workers: Sequence[Mapping[str, Any]]
    all_servers: Sequence[Mapping[str, Any]]

    @property
    def own_or_first(self) -> Mapping[str, Any]:
        """This rank's part, else the first worker's."""
        return self.own or self.first_worker


@dataclass(frozen=True)
class DeferredState:
    """What is taken up only once the script asks for it.

    Attributes
    ----------
    number : of the checkpoint.
    things : states of what the script keeps, by name.
    loaders : positions, in the order in which loaders are made.
    groups : of parameters of the optimizer, with their learning rates.
    random : state of the generators of random numbers; None where there were ranks of another number.
    """

    number: int
    registered: Mapping[str, Any]
    loaders: Sequence[Mapping[str, int]]
    param_groups: Sequence[Mapping[str, Any]]
    rng: Mapping[str, Any] | None


class CheckpointRestorer:
    """One rank's way from a checkpoint to where the run was.

    Parameters
    ----------
    name : of this rank's part.
    about : what another run could not go on from, by name.

    Attributes
    ----------
    found : the checkpoint from which the run goes on, None where it is a new one.
    """

    def __init__(self, run: Run, checkpoint_dir: CheckpointDir,
                 rank_file_name: str, run_identity: Mapping[str, str]) -> None:
        self._run, self._world = run, run.world
        self._checkpoint_dir, self._rank_file_name, self._run_identity = checkpoint_dir, rank_file_name, run_identity
        self.loaded: LoadedCheckpoint | None = None

    def load_latest(self) -> None:
        """Look for the last whole checkpoint and take up model and optimizer; a collective call of all ranks.

        Raises
        ------
        Refused : it is of another run, or of a number of ranks from which this one cannot go on; not all ranks see
            the folder, or it cannot be written.
        """
        world = self._world
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
            fault = next((its for its in world.transport.allgather(fault) if its), "")
            if not fault:
                self._checkpoint_dir.mark_verified(number)
                break
            self.loaded = None
            if world.rank == 0:
                warn(f"train: a checkpoint is skipped: {fault}")
        if world.rank == 0 and numbers:
            warn(f"train: goes on after step {self.loaded.number} from {self._checkpoint_dir.path_of(self.loaded.number)}"
                 if self.loaded else f"train: --checkpoint-dir {self._checkpoint_dir.path}: no whole checkpoint; begins anew")
        if self.loaded and not self._run.is_server:
            self._restore_model(self.loaded)

    def _check_shared_dir(self) -> None:
        transport, folder = self._world.transport, self._checkpoint_dir
        mark, fault = transport.broadcast(folder.create_probe() if transport.rank == 0 else None)
        if not fault and not folder.sees_probe(mark):
            fault = f"rank {transport.rank} on {self._world.nodes[transport.rank]} does not see there, or cannot " \
                    f"write, what rank 0 on {self._world.nodes[0]} has written"
        faults = [its for its in transport.allgather(fault) if its]
        if transport.rank == 0 and mark:
            os.unlink(mark)
        if faults:
            raise InvalidRunError(f"--checkpoint-dir {folder.path}: {faults[0]}; valid: a folder that all ranks share and may "
                          "write to")

    def _open_manifest(self, number: int) -> tuple[Manifest | None, str]:
        """A checkpoint's manifest, or why it cannot be used."""
        try:
            return self._checkpoint_dir.read_manifest(number), ""
        except CorruptCheckpointError as error:
            return None, str(error)

    def _check_same_run(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of another run."""
        for name in (*self._run_identity, *(manifest.run_identity.keys() - self._run_identity.keys())):
            its, theirs = self._run_identity.get(name, "nothing"), manifest.run_identity.get(name, "nothing")
            if its != theirs:
                raise InvalidRunError(f"--checkpoint-dir {self._checkpoint_dir.path}: is of a run with {name} {theirs}, this one has "
                              f"{its}; valid: the same, or another folder to begin anew")
        mine, unfit = rank_layout(self._world), _not_resizable_reason(self._world)
        if dict(manifest.rank_layout) != mine and unfit:
            raise InvalidRunError(f"--checkpoint-dir {self._checkpoint_dir.path}: is of {_format_layout(manifest.rank_layout)}, these are "
                          f"{_format_layout(mine)}: {unfit}; valid: as many, or another folder to begin anew")

    def _load(self, manifest: Manifest) -> LoadedCheckpoint:
        folder, run = self._checkpoint_dir, self._run
        first = {} if run.is_server else folder.read_rank_file(manifest, "worker-0")
        if dict(manifest.rank_layout) == rank_layout(self._world):
            mine = first if self._rank_file_name == "worker-0" else folder.read_rank_file(
                manifest, self._rank_file_name)
            return LoadedCheckpoint(manifest.number, mine, first, (), ())
        counts = manifest.rank_layout
        others = [] if run.is_server or not models_differ(self._world) else [
            folder.read_rank_file(manifest, f"worker-{index}") for index in range(counts["workers"])]
        servers = [folder.read_rank_file(manifest, f"server-{index}") for index in range(counts["servers"])] \
            if run.is_server else []
        return LoadedCheckpoint(manifest.number, None, first, others, servers)

    def _restore_model(self, loaded: LoadedCheckpoint) -> None:
        import torch

        replica, optimizer, model = self._run.replica, self._run.optimizer, self._run.model
        if loaded.all_workers:
            weights = [part["strategy"]["model_weight"] for part in loaded.all_workers]
            share = [weight / sum(weights) for weight in weights]
            replica.parameters[:] = _weighted_mean([part["model"] for part in loaded.all_workers], share).numpy()
            optimizer.load_state_dict(_weighted_mean([part["optimizer"] for part in loaded.all_workers], share))
        else:
            # where all are alike the first worker alone has written them
            whole = loaded.own_or_first if loaded.own_or_first["model"] is not None else loaded.first_worker
            replica.parameters[:] = whole["model"].numpy()
            optimizer.load_state_dict(whole["optimizer"])
        replica.copy_to_device()
        with torch.no_grad():
            for name, tensor in consistency.untrained_tensors(model, replica.tensors).items():
                tensor.copy_(loaded.own_or_first["untrained"][name])

    def restore_strategy(self, strategy: Strategy) -> DeferredState | None:
        """Let a strategy go on as the one whose checkpoint was found; what is left of it then."""
        run, found = self._run, self.loaded
        if found is None:
            return None
        if isinstance(strategy, PSServerBase):
            its = [found.own] if found.own and all(
                _covers(found.own, part) for part in strategy.owned_slices) else found.all_servers
            if found.own and not its:
                manifest = self._checkpoint_dir.read_manifest(found.number)
                its = [self._checkpoint_dir.read_rank_file(
                    manifest, f"server-{index}") for index in range(manifest.rank_layout["servers"])]
            strategy.load_shard_states([piece for part in its for piece in part["shards"]["shard"]],
                          [piece for part in its for piece in part["shards"]["optimizer"]])
        if found.own:
            strategy.load_state_dict(found.own["strategy"])
            run.p2p.bytes_sent.update(found.own["bytes_sent"])
            run.meter.load_state_dict(found.own["meter"])
        else:
            strategy.resume_from_average({} if run.is_server else found.first_worker["strategy"], found.number)
        run.resume_at(found.number if run.is_server else found.own_or_first["step"])
        if run.is_server:
            return DeferredState(found.number, {}, (), (), None)
        return DeferredState(found.number, found.own_or_first["registered"], found.own_or_first["loaders"],
                    found.first_worker["optimizer"]["param_groups"], found.own["rng"] if found.own else None)


def rank_layout(world: World) -> dict[str, Any]:
    """How many ranks there are of each role; in shared memory also which of them share a node."""
    workers = world.ranks_with_role("worker")
    nodes = [world.nodes[worker] for worker in workers]
    return {"workers": len(workers), "servers": len(world.ranks_with_role("ps")),
            "nodes": [nodes.index(node) for node in nodes] if world.config.shared_memory else []}


def models_differ(world: World) -> bool:
    """Whether the workers have models of their own."""
    method = world.config
    in_step = method.strategy == "ps" and not (method.asynchronous or method.max_staleness)
    return not in_step and method.strategy != "allreduce"


def config_fingerprint(world: World) -> dict[str, str]:
    """The method's choices by their options; the number of servers may be another one."""
    names = {"asynchronous": "--async"}
    return {names.get(name, f"--{name.replace('_', '-')}"): str(value) for name, value in vars(world.config).items()
            if name != "ps"}


def _format_layout(layout: Mapping[str, Any]) -> str:
    servers = f" and {layout['servers']} servers" if layout["servers"] else ""
    return f"{layout['workers']} workers{servers}{' on other nodes' * bool(layout['nodes'])}"


def _not_resizable_reason(world: World) -> str:
    """Why ranks of another number cannot go on from a checkpoint, "" where they can."""
    method = world.config
    if method.strategy == "ps" and (method.asynchronous or method.max_staleness):
        return "each worker has pulled a model of its own"
    return ""


def _covers(part: Mapping[str, Any], owned: slice) -> bool:
    (start, stop, _), = part["shards"]["shard"]
    return bool(start == owned.start and stop == owned.stop)


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of tensors with a fraction, in whatever they stand; of all else the first."""
    import torch

    one = values[0]
    if isinstance(one, dict):
        return {key: _weighted_mean([value[key] for value in values], weights) for key in one}
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        total = sum(weight * value.double() for weight, value in zip(weights, values, strict=True))
        return total.to(one.dtype)
    return one
