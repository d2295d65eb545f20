"""Makes the checkpoints of a run, when they are due or asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import TrainError, warn
from slurmdl.train.library import agreement, checkpoint, generators
from slurmdl.train.library.checkpoint import Folder, Manifest
from slurmdl.train.library.halt import Halt
from slurmdl.train.library.resume import Rest, Resume, layout, words, workers_differ
from slurmdl.train.strategies import Strategy
from slurmdl.train.strategies.servers import Holder

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


class Saver:
    """One rank's part in the checkpoints of a run.

    Parameters
    ----------
    folder : which all ranks share.
    every : steps from one checkpoint to the next; 0 for none but those that a signal asks for.
    about : what another run could not go on from, by name, besides the method.
    """

    def __init__(self, run: Run, folder: str, every: int, about: Mapping[str, object]) -> None:
        self._run, self._world = run, run.world
        self._folder, self._every = Folder(folder), every
        self._about = {**words(run.world), **{name: str(value) for name, value in about.items()}}
        self._things: dict[str, Any] = {}
        self._resume: Resume | None = None
        self._rest: Rest | None = None
        self._random_taken = False
        self._name = f"worker-{run.worker}" if run.worker is not None else \
            f"server-{run.world.ranks('ps').index(run.rank)}"
        self._last = 0
        self._halt: Halt | None = None

    def find(self, about: Sequence[tuple[str, str]]) -> None:
        """Look for the last whole checkpoint; see Resume.find.

        Parameters
        ----------
        about : (name, value) of what else another run could not go on from, as shapes of parameters.
        """
        self._about |= dict(about)
        self._resume = Resume(self._run, self._folder, self._name, self._about)
        self._resume.find()

    def take_strategy(self, strategy: Strategy) -> None:
        """Let a strategy go on as the one whose checkpoint was found, and listen for signals from now on."""
        run = self._run
        if self._resume:
            self._rest, self._resume = self._resume.take_strategy(strategy), None
        self._last = self._rest.number if self._rest else 0
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
        if self._rest and name in self._rest.things:
            thing.load_state_dict(self._rest.things[name])
            # a schedule that was made after wrap() has begun with the first learning rate again
            for group, saved in zip(self._run.optimizer.param_groups, self._rest.groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def take_position(self, index: int) -> None:
        """Let the loader of this index go on where it was."""
        if self._rest and index < len(self._rest.loaders):
            self._run.loaders[index].restore(self._rest.loaders[index])

    def take_random(self) -> None:
        """Let random numbers go on as they did; once."""
        if self._rest and self._rest.random and not self._random_taken:
            generators.restore(self._rest.random)
        self._random_taken = True

    def due(self, last: bool) -> tuple[int, bool] | None:
        """The number of the checkpoint that is due now, between two steps, and whether all stop after it."""
        assert self._halt
        step, together = self._run.step, self._run.strategy.meets
        passed = self._every and step - self._last >= self._every
        if passed and not together and self._run.first:
            self._halt.call()
        told = self._halt.due(last)
        if told:
            return told
        return (step, False) if together and self._every and step % self._every == 0 and step > self._last else None

    def save(self, number: int, stops: bool = False) -> bool:
        """Write this checkpoint, with all other ranks, unless it is there already; whether all stop now."""
        run, world, folder = self._run, self._world, self._folder
        there = number == folder.last
        self._last = max(number, run.step)
        if not run.serves:  # what a server has is newer than its model
            run.replica.changed()
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
                folder.seal(Manifest(number, self._about, layout(world), parts))
            except OSError as error:
                faults = [f"{error.filename}: {error.strerror}"]
        if world.rank == 0 and faults:
            folder.remove(number)
            stays = "no other is there" if folder.last is None else f"that of step {folder.last} stays"
            warn(f"train: no checkpoint of step {number}: {faults[0]}; {stays}")
        if run.meet(not faults)[0]:
            folder.verified(number)
        if self._halt:
            self._halt.over()
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
        content = {"strategy": strategy.state(), "sent": dict(run.messages.sent), "meter": run.meter.state()}
        if isinstance(strategy, Holder):
            return {**content, "pieces": strategy.pieces()}
        import torch

        alone = run.first or workers_differ(self._world)
        return {**content, "step": run.step,
                "model": torch.from_numpy(run.replica.parameters) if alone else None,
                "optimizer": run.optimizer.state_dict() if alone else None,
                "rest": agreement.untrained(run.model, run.replica.tensors),
                "loaders": [loader.state() for loader in run.loaders],
                "things": {name: thing.state_dict() for name, thing in self._things.items()},
                "random": generators.state()}
