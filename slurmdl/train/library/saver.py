"""Makes the checkpoints of a run, and lets it go on from the last whole one."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmdl.errors import TrainError, warn
from slurmdl.train.library import agreement, checkpoint
from slurmdl.train.library.checkpoint import Folder, Manifest, Unusable
from slurmdl.train.library.halt import Halt
from slurmdl.train.report.meters import Meter
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


class Saver:
    """One rank's part in the checkpoints of a run.

    Parameters
    ----------
    folder : which all ranks share.
    every : steps from one checkpoint to the next; 0 for none but those that a signal asks for.
    about : what another run could not go on from, by name, besides the method.

    Attributes
    ----------
    found : the checkpoint from which the run goes on, None where it is a new one.

    Raises
    ------
    Refused : not all ranks see the folder, or it cannot be written.
    """

    def __init__(self, run: Run, folder: str, every: int, about: Mapping[str, object]) -> None:
        self._run, self._world = run, run.world
        self._folder, self._every = Folder(folder), every
        self._about = {**_words(run.world), **{name: str(value) for name, value in about.items()}}
        self._things: dict[str, Any] = {}
        self._random: Mapping[str, Any] | None = None
        self.found: Found | None = None
        self._name = f"worker-{run.worker}" if run.worker is not None else \
            f"server-{run.world.ranks('ps').index(run.rank)}"
        self._last = 0
        self._halt: Halt | None = None

    # --- going on ---

    def find(self, about: Sequence[tuple[str, str]]) -> None:
        """Look for the last whole checkpoint and take up model and optimizer; a collective call of all ranks.

        Parameters
        ----------
        about : (name, value) of what else another run could not go on from, as shapes of parameters.

        Raises
        ------
        Refused : it is of another run, or of a number of ranks from which this one cannot go on.
        """
        world = self._world
        self._about |= dict(about)
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
                self._last = number
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
            mine, theirs = self._about.get(name, "nothing"), manifest.run.get(name, "nothing")
            if mine != theirs:
                raise Refused(f"--checkpoint {self._folder.path}: is of a run with {name} {theirs}, this one has "
                              f"{mine}; valid: the same, or another folder to begin anew")
        layout, unfit = self._layout(), _unfit(self._world)
        if dict(manifest.layout) != layout and unfit:
            raise Refused(f"--checkpoint {self._folder.path}: is of {_ranks(manifest.layout)}, these are "
                          f"{_ranks(layout)}: {unfit}; valid: as many, or another folder to begin anew")

    def _layout(self) -> dict[str, Any]:
        """How many ranks there are of each role; in shared memory also which of them share a node."""
        world, workers = self._world, self._world.ranks("worker")
        nodes = [world.nodes[worker] for worker in workers]
        return {"workers": len(workers), "servers": len(world.ranks("ps")),
                "nodes": [nodes.index(node) for node in nodes] if world.method.shared_memory else []}

    def _read(self, manifest: Manifest) -> Found:
        folder, run = self._folder, self._run
        first = {} if run.serves else folder.read(manifest, "worker-0")
        if dict(manifest.layout) == self._layout():
            mine = first if self._name == "worker-0" else folder.read(manifest, self._name)
            return Found(manifest.number, mine, first, (), ())
        layout = manifest.layout
        others = [] if run.serves or not self._differ() else [
            folder.read(manifest, f"worker-{index}") for index in range(layout["workers"])]
        servers = [folder.read(manifest, f"server-{index}") for index in range(layout["servers"])] \
            if run.serves else []
        return Found(manifest.number, None, first, others, servers)

    def _differ(self) -> bool:
        """Whether the workers have models of their own."""
        method = self._world.method
        return method.strategy != "allreduce" and (method.strategy != "ps" or bool(
            method.asynchronous or method.staleness))

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
            for name, tensor in _rest(model, replica.tensors).items():
                tensor.copy_(found.its["rest"][name])

    def take_strategy(self, strategy: Strategy) -> None:
        """Let a strategy go on as the one whose checkpoint was found; and begin to listen for signals."""
        run = self._run
        run.replica.fetch_parameters()
        found = self.found
        if found and isinstance(strategy, Holder):
            its = [found.mine] if found.mine and _covers(found.mine, strategy.part) else found.servers
            if found.mine and not its:
                manifest = self._folder.manifest(found.number)
                its = [self._folder.read(manifest, f"server-{index}") for index in range(manifest.layout["servers"])]
            strategy.fill([piece for part in its for piece in part["pieces"]["shard"]],
                          [piece for part in its for piece in part["pieces"]["optimizer"]])
        if found and found.mine:
            strategy.restore(found.mine["strategy"])
            run.messages.sent.update(found.mine["sent"])
            for name, value in found.mine["meter"].items():
                setattr(run.meter, name, value.tolist() if isinstance(getattr(run.meter, name), list) else value)
        elif found:
            strategy.renew({} if run.serves else found.first["strategy"], found.number)
        if found:
            run.begin_at(found.number if run.serves else found.its["step"])
            self._random = found.mine["random"] if found.mine and not run.serves else None
        self._halt = Halt(self._world.transport, run.courier, self._world.ranks("worker"), lambda: run.step,
                          strategy.meets)

    def keep(self, name: str, thing: Any) -> None:
        """See Run.keep."""
        if name in self._things or self._halt is None:
            raise TrainError(f"keep({name!r}): valid: after run.wrap(), each name once")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TrainError(f"keep({name!r}): a {type(thing).__name__} has no state_dict() and load_state_dict()")
        checkpoint.check(name, thing.state_dict())
        self._things[name] = thing
        if self.found and name in self.found.its["things"]:
            thing.load_state_dict(self.found.its["things"][name])
            # a schedule that was made after wrap() has begun with the first learning rate again
            its, groups = self.found.first["optimizer"]["param_groups"], self._run.optimizer.param_groups
            for group, saved in zip(groups, its, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def take_position(self, index: int) -> None:
        """Let the loader of this index go on where it was."""
        if self.found and index < len(self.found.its["loaders"]):
            self._run.loaders[index].restore(self.found.its["loaders"][index])

    def take_random(self) -> None:
        """Let random numbers go on as they did; once."""
        if self._random:
            _set_random(self._random)
            self._random = None

    # --- saving ---

    def due(self) -> tuple[int, bool] | None:
        """The number of the checkpoint that is due between two steps, and whether all stop after it."""
        assert self._halt
        step, together = self._run.step, self._run.strategy.meets
        passed = self._every and step - self._last >= self._every
        if passed and not together and self._run.first:
            self._halt.call()
        told = self._halt.due()
        if told:
            return told
        return (step, False) if together and self._every and step % self._every == 0 and step > self._last else None

    def save(self, number: int, stops: bool = False) -> bool:
        """Write this checkpoint, with all other ranks, unless it is there already; whether all stop now."""
        run, world, folder = self._run, self._world, self._folder
        there = number == folder.last
        self._last = max(number, run.step)
        run.replica.fetch_parameters()
        run.strategy.pause(number)
        run.replica.store_parameters()
        part, fault = None, ""
        try:
            part = None if there else folder.write(number, self._name, self._content())
        except OSError as error:
            fault = f"rank {world.rank} on {world.nodes[world.rank]}: {error.filename}: {error.strerror}"
        told = run.meet((part, fault, stops))
        faults = [its for _, its, _ in told if its]
        if world.rank == 0 and not there and not faults:
            parts = {its.name: its for its, _, _ in told if its}
            try:
                folder.seal(Manifest(number, self._about, self._layout(), parts))
            except OSError as error:
                faults = [f"{error.filename}: {error.strerror}"]
        if world.rank == 0 and faults:
            folder.remove(number)
            stays = "no other is there" if folder.last is None else f"that of step {folder.last} stays"
            warn(f"train: no checkpoint of step {number}: {faults[0]}; {stays}")
        if run.meet(not faults)[0]:
            folder.verified(number)
        # without any checkpoint to go on from there is nothing to stop for
        return folder.last is not None and any(its for _, _, its in told)

    @property
    def path(self) -> str:
        """Of the folder."""
        return self._folder.path

    def finish(self) -> None:
        """This worker has made its last step."""
        if self._halt:
            self._halt.finish()

    def _content(self) -> dict[str, Any]:
        """What this rank writes down."""
        run, strategy = self._run, self._run.strategy
        content = {"strategy": strategy.state(), "sent": dict(run.messages.sent), "meter": {
            its.name: _array(getattr(run.meter, its.name)) for its in fields(Meter)}}
        if isinstance(strategy, Holder):
            return {**content, "pieces": strategy.pieces()}
        import torch

        alone = run.first or self._differ()
        return {**content, "step": run.step,
                "model": torch.from_numpy(run.replica.parameters) if alone else None,
                "optimizer": run.optimizer.state_dict() if alone else None,
                "rest": _rest(run.model, run.replica.tensors),
                "loaders": [loader.state() for loader in run.loaders],
                "things": {name: thing.state_dict() for name, thing in self._things.items()},
                "random": _random()}


def _words(world: World) -> dict[str, str]:
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
    if method.strategy == "elastic":
        return "each worker is as far from the centre as it has gone itself"
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


def _rest(model: Any, trained: Sequence[Any]) -> dict[str, Any]:
    """Parameters that are not trained, and buffers, by name."""
    its = {id(tensor) for tensor in trained}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if id(tensor) not in its}


def _array(value: Any) -> Any:
    import torch

    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


def _random() -> dict[str, Any]:
    """Where the generators of random numbers stand that scripts use without making them."""
    import torch

    kind, keys, *rest = np.random.get_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": on_gpu, "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}


def _set_random(state: Mapping[str, Any]) -> None:
    import torch

    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])

