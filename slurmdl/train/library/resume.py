"""Finds the last whole checkpoint of a run, and lets a rank go on from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmdl.errors import warn
from slurmdl.train.library import agreement
from slurmdl.train.library.checkpoint import Folder, Manifest, Unusable
from slurmdl.train.runtime import Refused, World
from slurmdl.train.strategies import Strategy
from slurmdl.train.strategies.servers import Holder

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


@dataclass(frozen=True)
class Found:
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
    mine: Mapping[str, Any] | None
    first: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]]
    servers: Sequence[Mapping[str, Any]]

    @property
    def its(self) -> Mapping[str, Any]:
        """This rank's part, else the first worker's."""
        return self.mine or self.first


@dataclass(frozen=True)
class Rest:
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
    things: Mapping[str, Any]
    loaders: Sequence[Mapping[str, int]]
    groups: Sequence[Mapping[str, Any]]
    random: Mapping[str, Any] | None


class Resume:
    """One rank's way from a checkpoint to where the run was.

    Parameters
    ----------
    name : of this rank's part.
    about : what another run could not go on from, by name.

    Attributes
    ----------
    found : the checkpoint from which the run goes on, None where it is a new one.
    """

    def __init__(self, run: Run, folder: Folder, name: str, about: Mapping[str, str]) -> None:
        self._run, self._world = run, run.world
        self._folder, self._name, self._about = folder, name, about
        self.found: Found | None = None

    def find(self) -> None:
        """Look for the last whole checkpoint and take up model and optimizer; a collective call of all ranks.

        Raises
        ------
        Refused : it is of another run, or of a number of ranks from which this one cannot go on; not all ranks see
            the folder, or it cannot be written.
        """
        world = self._world
        self._meet_in_folder()
        numbers = world.transport.broadcast(self._folder.numbers())
        for number in numbers:
            manifest, fault = world.transport.broadcast(self._open(number) if world.rank == 0 else None)
            if manifest:
                agreement.on_all(world, partial(self._compare, manifest))
                try:
                    self.found = self._read(manifest)
                except Unusable as error:
                    fault = str(error)
            fault = next((its for its in world.transport.allgather(fault) if its), "")
            if not fault:
                self._folder.verified(number)
                break
            self.found = None
            if world.rank == 0:
                warn(f"train: a checkpoint is skipped: {fault}")
        if world.rank == 0 and numbers:
            warn(f"train: goes on after step {self.found.number} from {self._folder.step(self.found.number)}"
                 if self.found else f"train: --checkpoint {self._folder.path}: no whole checkpoint; begins anew")
        if self.found and not self._run.serves:
            self._take_model(self.found)

    def _meet_in_folder(self) -> None:
        transport, folder = self._world.transport, self._folder
        mark, fault = transport.broadcast(folder.announce() if transport.rank == 0 else None)
        if not fault and not folder.sees(mark):
            fault = f"rank {transport.rank} on {self._world.nodes[transport.rank]} does not see there, or cannot " \
                    f"write, what rank 0 on {self._world.nodes[0]} has written"
        faults = [its for its in transport.allgather(fault) if its]
        if transport.rank == 0 and mark:
            os.unlink(mark)
        if faults:
            raise Refused(f"--checkpoint {folder.path}: {faults[0]}; valid: a folder that all ranks share and may "
                          "write to")

    def _open(self, number: int) -> tuple[Manifest | None, str]:
        """A checkpoint's manifest, or why it cannot be used."""
        try:
            return self._folder.manifest(number), ""
        except Unusable as error:
            return None, str(error)

    def _compare(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of another run."""
        for name in (*self._about, *(manifest.run.keys() - self._about.keys())):
            its, theirs = self._about.get(name, "nothing"), manifest.run.get(name, "nothing")
            if its != theirs:
                raise Refused(f"--checkpoint {self._folder.path}: is of a run with {name} {theirs}, this one has "
                              f"{its}; valid: the same, or another folder to begin anew")
        mine, unfit = layout(self._world), _unfit(self._world)
        if dict(manifest.layout) != mine and unfit:
            raise Refused(f"--checkpoint {self._folder.path}: is of {_ranks(manifest.layout)}, these are "
                          f"{_ranks(mine)}: {unfit}; valid: as many, or another folder to begin anew")

    def _read(self, manifest: Manifest) -> Found:
        folder, run = self._folder, self._run
        first = {} if run.serves else folder.read(manifest, "worker-0")
        if dict(manifest.layout) == layout(self._world):
            mine = first if self._name == "worker-0" else folder.read(manifest, self._name)
            return Found(manifest.number, mine, first, (), ())
        counts = manifest.layout
        others = [] if run.serves or not workers_differ(self._world) else [
            folder.read(manifest, f"worker-{index}") for index in range(counts["workers"])]
        servers = [folder.read(manifest, f"server-{index}") for index in range(counts["servers"])] \
            if run.serves else []
        return Found(manifest.number, None, first, others, servers)

    def _take_model(self, found: Found) -> None:
        import torch

        replica, optimizer, model = self._run.replica, self._run.optimizer, self._run.model
        if found.others:
            weights = [part["strategy"]["weight"] for part in found.others]
            share = [weight / sum(weights) for weight in weights]
            replica.parameters[:] = _mean([part["model"] for part in found.others], share).numpy()
            optimizer.load_state_dict(_mean([part["optimizer"] for part in found.others], share))
        else:
            # where all are alike the first worker alone has written them
            whole = found.its if found.its["model"] is not None else found.first
            replica.parameters[:] = whole["model"].numpy()
            optimizer.load_state_dict(whole["optimizer"])
        replica.store_parameters()
        with torch.no_grad():
            for name, tensor in agreement.untrained(model, replica.tensors).items():
                tensor.copy_(found.its["rest"][name])

    def take_strategy(self, strategy: Strategy) -> Rest | None:
        """Let a strategy go on as the one whose checkpoint was found; what is left of it then."""
        run, found = self._run, self.found
        if found is None:
            return None
        if isinstance(strategy, Holder):
            its = [found.mine] if found.mine and all(
                _covers(found.mine, part) for part in strategy.parts) else found.servers
            if found.mine and not its:
                manifest = self._folder.manifest(found.number)
                its = [self._folder.read(manifest, f"server-{index}") for index in range(manifest.layout["servers"])]
            strategy.fill([piece for part in its for piece in part["pieces"]["shard"]],
                          [piece for part in its for piece in part["pieces"]["optimizer"]])
        if found.mine:
            strategy.restore(found.mine["strategy"])
            run.messages.sent.update(found.mine["sent"])
            run.meter.restore(found.mine["meter"])
        else:
            strategy.renew({} if run.serves else found.first["strategy"], found.number)
        run.begin_at(found.number if run.serves else found.its["step"])
        if run.serves:
            return Rest(found.number, {}, (), (), None)
        return Rest(found.number, found.its["things"], found.its["loaders"],
                    found.first["optimizer"]["param_groups"], found.mine["random"] if found.mine else None)


def layout(world: World) -> dict[str, Any]:
    """How many ranks there are of each role; in shared memory also which of them share a node."""
    workers = world.ranks("worker")
    nodes = [world.nodes[worker] for worker in workers]
    return {"workers": len(workers), "servers": len(world.ranks("ps")),
            "nodes": [nodes.index(node) for node in nodes] if world.method.shared_memory else []}


def workers_differ(world: World) -> bool:
    """Whether the workers have models of their own."""
    method = world.method
    in_step = method.strategy == "ps" and not (method.asynchronous or method.staleness)
    return not in_step and method.strategy != "allreduce"


def words(world: World) -> dict[str, str]:
    """The method's choices by their options; the number of servers may be another one."""
    names = {"asynchronous": "--async"}
    return {names.get(name, f"--{name.replace('_', '-')}"): str(value) for name, value in vars(world.method).items()
            if name != "ps"}


def _ranks(layout: Mapping[str, Any]) -> str:
    servers = f" and {layout['servers']} servers" if layout["servers"] else ""
    return f"{layout['workers']} workers{servers}{' on other nodes' * bool(layout['nodes'])}"


def _unfit(world: World) -> str:
    """Why ranks of another number cannot go on from a checkpoint, "" where they can."""
    method = world.method
    if method.strategy == "ps" and (method.asynchronous or method.staleness):
        return "each worker has pulled a model of its own"
    return ""


def _covers(part: Mapping[str, Any], place: slice) -> bool:
    (start, stop, _), = part["pieces"]["shard"]
    return bool(start == place.start and stop == place.stop)


def _mean(values: Sequence[Any], share: Sequence[float]) -> Any:
    """The weighted mean of tensors with a fraction, in whatever they stand; of all else the first."""
    import torch

    one = values[0]
    if isinstance(one, dict):
        return {key: _mean([value[key] for value in values], share) for key in one}
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        total = sum(weight * value.double() for weight, value in zip(share, values, strict=True))
        return total.to(one.dtype)
    return one
