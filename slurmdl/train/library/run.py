"""The library: a training script of the user's own, run by many ranks that keep their replicas together.

    from slurmdl.train import init

    run = init()
    model, opt = run.wrap(model, opt)
    loader = run.loader(dataset, batch=32)
    for epoch in range(loader.epoch, 5):
        for images, labels in loader:
            opt.zero_grad()
            loss_of(model(images), labels).backward()
            opt.step()
    run.close()

The strategy is chosen from outside: by the plan of `slurmdl srun`, by variables SLURMDL_TRAIN_*, or by `init`.
"""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from slurmdl.errors import BadOptions, Stopped, TrainError, UsageError, tell
from slurmdl.train import method, runtime
from slurmdl.train.courier import Courier
from slurmdl.train.library import agreement, ending, halt, replica_check, shards
from slurmdl.train.library.deal import Deal, Hand
from slurmdl.train.library.loader import Loader, Source, Told, source
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.saver import Saver
from slurmdl.train.library.share import Share
from slurmdl.train.library.steps import Steps
from slurmdl.train.library.survivors import Survivors
from slurmdl.train.messages import Messages
from slurmdl.train.method import Method
from slurmdl.train.mixing.graphs import GRAPHS, Members, spectral_gap
from slurmdl.train.report import plot as pictures
from slurmdl.train.report.meters import Meter, Report, summarise, table
from slurmdl.train.strategies import STRATEGIES, Setting, Strategy
from slurmdl.train.strategies.shared import leaders
from slurmdl.train.trace import Trace
from slurmdl.train.transports.transport import Transport

#: steps from one checkpoint to the next where nothing is said
EVERY = 500

Score = Callable[[], tuple[float, float] | None]

#: variables that name a folder for traces, and a file for a picture
TRACE, PLOT = method.PREFIX + "TRACE", method.PREFIX + "PLOT"
#: and for checkpoints: their folder, and the steps from one to the next
CHECKPOINT, CHECKPOINT_EVERY = method.PREFIX + "CHECKPOINT", method.PREFIX + "CHECKPOINT_EVERY"
#: and the steps from one comparison of replicas to the next
CHECK_EVERY = method.PREFIX + "CHECK_EVERY"


def init(asked: Method | None = None, *, seed: int = 1, passes: int = 1, alike: Mapping[str, object] | None = None,
         same: Mapping[str, object] | None = None, trace: str = "", plot: str = "", checkpoint: str = "",
         checkpoint_every: int | None = None, check_every: int | None = None, environ: Mapping[str, str] = os.environ,
         transport: Transport | None = None) -> Run:
    """Meet the other ranks; a call of all of them.

    Parameters
    ----------
    asked : how the replicas are kept together; None: as the variables SLURMDL_TRAIN_* and the plan say.
    seed : of the order of the samples and of everything random in a strategy.
    passes : backward passes for each step of the optimizer, whose gradients add up.
    alike : further options of the script, by name, that all ranks must have alike.
    same : those of them, too, with which alone a checkpoint may be taken up.
    trace : folder for a trace of each rank (trace.Trace); "": the one of the variable SLURMDL_TRAIN_TRACE, if any.
    plot : file for a picture of loss and drift (plot.draw); "": the one of SLURMDL_TRAIN_PLOT, if any.
    checkpoint : folder for checkpoints, which all ranks share; "": the one of SLURMDL_TRAIN_CHECKPOINT, if any.
        A run whose folder holds a whole checkpoint of it goes on from there.
    checkpoint_every : steps from one checkpoint to the next, 0 for none but those that a signal asks for; None: as
        SLURMDL_TRAIN_CHECKPOINT_EVERY says, else EVERY.
    check_every : steps from one comparison of replicas that must be equal to the next, 0 for none; None: as
        SLURMDL_TRAIN_CHECK_EVERY says, else replica_check.EVERY.
    transport : between the ranks. None: MPI; then an exception that the script does not catch ends all ranks, and
        the end of the script closes the run.

    Raises
    ------
    SlurmdlError : the run cannot start; one line says why.
    """
    if passes < 1:
        raise TrainError(f"passes={passes}: not valid; valid: 1 or more")
    own = transport is None
    if own:
        ending.end_together()
    found = runtime.connect(environ) if transport is None else transport
    folder = checkpoint or environ.get(CHECKPOINT, "")
    every = checkpoint_every if checkpoint_every is not None else _steps(environ, CHECKPOINT_EVERY, EVERY)
    compared = check_every if check_every is not None else _steps(environ, CHECK_EVERY, replica_check.EVERY)
    if folder and own:
        halt.listen()
    its = {"seed": seed, "passes": passes}
    world = runtime.join(asked or method.of({}, environ), found, environ, {
        **(alike or {}), **its, "checkpoint": folder, "checkpoint_every": every, "check_every": compared})
    run = agreement.on_all(world, lambda: Run(world, seed, passes, compared, trace or environ.get(TRACE, ""),
                                              plot or environ.get(PLOT, ""), own))
    if folder:
        _check_steps(world)
        run.saver = Saver(run, os.path.abspath(folder), every, {**(same or {}), **its})
    if own:
        atexit.register(_close_at_exit, run)
    return run


def _check_steps(world: runtime.World) -> None:
    """Refuse checkpoints of workers that have no step in common at which to make one."""
    method = world.method
    if method.balance == "steps" or (method.balance == "batch" and method.asynchronous):
        how = f"{method.balance}{' --async' * method.asynchronous}"
        raise BadOptions(f"--checkpoint: with --balance {how} what is dealt to one worker depends on the "
                              "others' speeds; valid: --balance off, or batch without --async")


def _steps(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable) or str(default)
    if not text.isdecimal():
        raise UsageError(f"{variable}: {text!r} is not a whole number of 0 or more")
    return int(text)


def _close_at_exit(run: Run) -> None:
    try:
        run.close()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


class Run:
    """One rank's part in a run.

    Attributes
    ----------
    world : the other ranks, their nodes, zones and roles.
    messages, courier, replica, survivors : what `attach` has made; see there.
    model, optimizer : what it was given.
    saver : makes checkpoints; None where there are none.
    loaders : what `loader` has given, in this order.
    meter : times of this rank's steps.
    seed : of the order of the samples and of everything random in a strategy.
    batch : samples per worker and step; 0 where not known.
    consensus : distance of this rank's model from the mean of all when the run finished, relative to the mean's norm.
    attached, finished : whether the model was given, and whether no step can follow any more.
    """

    replica: Replica
    survivors: Survivors
    courier: Courier
    model: Any
    optimizer: Any

    def __init__(self, world: runtime.World, seed: int, passes: int, check_every: int, trace: str, plot: str,
                 own: bool) -> None:
        self.world, self._own = world, own
        self.messages = Messages(world.transport, world.levels())
        self.meter = Meter()
        self.batch = 0
        self.consensus = 0.0
        self.seed, self._passes, self._check_every = seed, passes, check_every
        self._trace = Trace(trace, self.rank, world.nodes[self.rank]) if trace else None
        self._plot = plot if self.first else ""
        if self._plot:
            pictures.check(self._plot)
        self.saver: Saver | None = None
        self.loaders: list[Loader] = []
        self._first_step = 0
        self._before: tuple[float, float] | None = None
        self._share = Share(self)
        if world.method.balance != "off" and passes > 1:
            raise TrainError(f"--balance {world.method.balance}: with passes={passes} several batches make a step, "
                             "which cannot be shared out; valid: passes=1, or --balance off")
        self._served: Strategy | None = None
        self.attached = self.finished = self._closed = False

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.world.ranks("worker"))

    @property
    def worker(self) -> int | None:
        """Index of this rank among the workers, None for a server."""
        return None if self.serves else self.world.ranks("worker").index(self.rank)

    @property
    def serves(self) -> bool:
        """Whether this rank is a parameter server."""
        return self.world.roles[self.rank] == "ps"

    @property
    def first(self) -> bool:
        """Whether this rank is the first living worker: the one that logs, evaluates and saves."""
        return self.rank == self.world.living("worker")[0]

    @property
    def strategy(self) -> Strategy:
        """This rank's part in the strategy; another one after the loss of a rank."""
        return self.survivors.strategy

    @property
    def outlook(self) -> str:
        """What becomes of the run where a rank is lost, in words."""
        transport = self.world.transport
        if not transport.recovery:
            return f"all ranks end ({runtime.without_recovery()})"
        needed = self._all_needed(self.strategy)
        return f"all ranks end ({needed})" if needed else f"the others go on ({transport.recovery})"

    def _all_needed(self, strategy: Strategy) -> str:
        """Why all ranks end where one is lost, "" where the others could go on."""
        if self.saver:
            return "a checkpoint is of all ranks"
        if self.balanced:
            return f"--balance {self.world.method.balance} needs them all"
        return "" if strategy.survives else f"{self.world.strategy} needs them all"

    @property
    def step(self) -> int:
        """Steps that the optimizer has made, those before a checkpoint included."""
        return self._steps.made if self.attached else 0

    @property
    def balanced(self) -> bool:
        """Whether faster workers get more to do."""
        return self.world.method.balance != "off"

    @property
    def done(self) -> int:
        """Steps that the workers have made in the mean, by which a learning rate should go; other than `step` where
        a worker makes more or fewer of them than others (--balance steps).
        """
        method = self.world.method
        by_share = method.balance == "steps" or (self.balanced and method.asynchronous)
        return self._share.done if by_share else self.step

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Keep the model together with those of the other ranks from now on; a call of all ranks.

        Model and optimizer stay the objects that they are. On a parameter server this call serves until all workers
        have ended, and then ends the process with status 0.

        Raises
        ------
        TrainError : as `attach`.
        """
        if self.serves and not self._own:
            raise TrainError("wrap() would end a process that is not its own; valid: attach() and serve()")
        self.attach(model, optimizer)
        if self.serves:
            self.serve()
            self.close()
            ending.leave(0)
        return model, optimizer

    def attach(self, model: Any, optimizer: Any) -> None:
        """As `wrap`, but leaves it to the caller to `serve`.

        The parameters that the optimizer trains become views of one flat buffer (Replica). All parameters and buffers
        begin as those of rank 0; parameters that are not trained, and buffers, as BatchNorm's statistics, are each
        rank's own from then on.

        Raises
        ------
        TrainError : a model or an optimizer that cannot be trained so; ranks whose models or optimizers differ.
        """
        if self.attached:
            raise TrainError("wrap() was called before; one model and one optimizer belong to a run "
                             "(torch.nn.ModuleDict holds several models)")
        world = self.world
        description = agreement.on_all(world, lambda: agreement.description(model, optimizer))
        agreement.compare(world, description)
        chosen = agreement.on_all(world, lambda: agreement.trained(model, optimizer))
        self.replica = agreement.on_all(world, lambda: Replica(model, chosen))
        agreement.start_alike(world, self.messages, self.replica.parameters)
        self.replica.store_parameters()
        agreement.begin_alike(world, self.messages, model, self.replica.tensors)
        self.model, self.optimizer = model, optimizer
        if self.saver:
            self.saver.find(description)
        self.courier = Courier(world.transport.threaded, now=world.transport.now, waited=self.messages.waited,
                               trace=self._trace)
        setting = Setting(
            self.messages, self.courier, world.ranks("worker"), world.ranks("ps"), self.replica.parameters,
            self.replica.gradients, self.replica.sizes, world.method, self.seed, world.nodes, world.zones,
            world.costs, lambda: float(optimizer.param_groups[0]["lr"]),
            lambda part: shards.updater(optimizer, self.replica, part), lambda: shards.numbers(optimizer),
            shards.rates(optimizer), weights=lambda: self._share.weights, settle=self.replica.settle,
            copies=self.replica)
        strategy = agreement.on_all(world, lambda: STRATEGIES[world.strategy](setting))
        self.survivors = Survivors(world, self.replica, setting, strategy, self._all_needed(strategy),
                                   self.saver is not None)
        self._check = ReplicaCheck(self, self._check_every)
        self._steps = Steps(self, self._share, self._passes, self._trace, bool(self._plot), self._check)
        if self.saver:
            self.saver.take_strategy(self.strategy)
        self._steps.begin()
        self.attached = True

    def loader(self, data: Any, batch: int, shuffle: bool = True, **options: Any) -> Loader:
        """This worker's batches of the training data: over all workers every sample once per epoch.

        A call of all workers; each iteration over what it gives is an epoch.

        Parameters
        ----------
        data : a torch Dataset with a length, an array or tensor, or a sequence of them with the same length.
        batch : samples per worker and step, in the mean over the workers; see deal.Deal for the end of an epoch.
        options : of torch.utils.data.DataLoader, for a Dataset, e.g. num_workers.

        Raises
        ------
        TrainError : data that cannot be dealt out, or that differ between the workers.
        """
        found = source(data, options)
        loader = self.deal(found, batch, shuffle)
        if not self.serves:
            mark = (found.count, batch, found.mark, found.ahead * self.balanced)
            self._do(lambda: agreement.compare_workers(self.world, self.messages, "data", mark))
        return loader

    def deal(self, found: Source, batch: int, shuffle: bool = True) -> Loader:
        """As `loader`, of a source that is known to be the same on all workers."""
        deal = Deal(found.count, self.workers, batch, shuffle, self.seed)
        self.batch = batch
        loader = Loader(deal, self._share.hands(deal, found.ahead), found,
                        Told(self._fetch, self._dealt, self._fetched_none, self._resumed))
        self.loaders.append(loader)
        if self.saver and not self.serves:
            self.saver.take_position(len(self.loaders) - 1)
        return loader

    def keep(self, name: str, thing: Any) -> None:
        """Let checkpoints hold something besides model, optimizer and loaders, as a schedule of the learning rate.

        Where the run goes on from a checkpoint it is given what it was. After `wrap`; each name once.

        Parameters
        ----------
        thing : has state_dict() and load_state_dict(); its state is made of numbers, words, tensors, and of lists,
            tuples and dicts of them.

        Raises
        ------
        TrainError : it cannot be kept.
        """
        if self.saver and not self.serves:
            self.saver.keep(name, thing)

    def begin_at(self, step: int) -> None:
        """So many steps have been made already."""
        self._first_step = step
        self._steps.begin_at(step)

    def meet(self, thing: Any) -> list[Any]:
        """What all ranks give, in rank order; between two steps, a call of all of them."""
        def errand() -> list[Any]:
            self.world.transport.meet()  # asleep, where gathering spins
            return self.world.transport.allgather(thing)
        return list(self._do(errand))

    def log(self, *things: Any) -> None:
        """Print, on the first worker alone."""
        if self.first:
            print(*things, flush=True)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around what makes the next batch, where it is not one of `loader`: counts as time for data."""
        self._fetch()
        yield
        self._begin()

    def record(self, loss: float) -> None:
        """Tell the loss of the step that is under way or just over, for the summary."""
        self.meter.add_loss(loss)

    def serve(self) -> None:
        """A parameter server's part, until all workers have ended."""
        while self._served is not self.strategy:
            strategy, number = self.strategy, self._first_step
            with self.survivors.staying(self.step):
                while strategy.serve(number):
                    called, strategy.called = strategy.called, None
                    if called is None:
                        number += 1
                    elif self.saver and self.saver.save(called):
                        self._stop(called)
                self._served = strategy

    def finish(self, score: Score | None = None) -> None:
        """After the last step: all workers' models become their mean, where they are not the same; all ranks call.

        Parameters
        ----------
        score : gives (loss, accuracy) of the model as it is now on the test data, None where there are none; called
            before the models become one.

        Raises
        ------
        TrainError : another worker makes more steps than this one.
        """
        if self.finished or not self.attached:
            return
        self._boundary(last=True)
        self.finished = True
        self._check.close()
        if self.saver:
            self.saver.finish()
        if not self.serves:  # what a server has is newer than its model
            self.replica.changed()
            self.replica.fetch_parameters()
        self._share.finish()
        self.survivors.all_do(lambda: self._end(score), self.step)
        self.courier.close()
        self.replica.store_parameters()

    def _end(self, score: Score | None) -> None:
        """What `finish` does; anew with those that live, where a rank is lost meanwhile."""
        if self.serves:
            self.serve()
        self.strategy.finish()
        transport, do = self.world.transport, self.courier.do
        do(lambda: transport.meet(self._others_go_on))
        self._check.finish()
        if not self.strategy.alike:
            weights = do(lambda: transport.allgather(0.0 if self.serves else self.strategy.weight))
            if not self.serves:
                if score:
                    self.replica.store_parameters()
                    self._before = score()
                share = weights[self.rank] / sum(filter(None, weights))
                self.consensus = do(lambda: agreement.average(
                    self.messages, self.world.living("worker"), self.replica.parameters, share))

    def summary(self, score: tuple[float, float] | None = None) -> dict[str, Any] | None:
        """The figures of the run on the first living rank, None on the others; a call of all ranks after `finish`.

        Parameters
        ----------
        score : (loss, accuracy) of the final model on the test data, from the rank that evaluated it.
        """
        fired, skipped = self.survivors.exchanges
        report = Report(self.meter.totals, self.messages.sent, self.consensus, score, self._before, fired, skipped,
                        self.batch, zlib.crc32(self.replica.parameters))
        reports = self.survivors.all_do(lambda: self.world.transport.gather(report), self.step)
        if self._trace:
            self._trace.close()
        if self._plot:
            world = self.world
            pictures.draw(self._plot, self.meter, f"{world.strategy}, {world.traffic}, {self.workers} workers")
        self._closed = True
        if reports is None:
            return None
        return _describe(self) | summarise(reports, self.world.roles)

    def close(self) -> None:
        """Finish the run and tell its figures on the first living rank's stderr; the script's end calls it, too."""
        if self._closed or not self.attached:
            return
        self.finish()
        figures = self.summary()
        if figures:
            tell(table(figures))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def _do(self, errand: Callable[[], Any]) -> Any:
        """Carry out what needs messages: by the courier, once there is one."""
        return self.courier.do(errand) if self.attached and not self.finished else errand()

    def _fetch(self) -> None:
        if self.attached and not self.finished:
            self._boundary()
            self._steps.watch.enter("data")
            self._share.fetch()

    def _boundary(self, last: bool = False) -> None:
        """Between two steps: all that belongs to the one before has been done."""
        if not self.saver or self.serves:
            return
        start, self._steps.looked = self.world.transport.now(), self.step
        with self.survivors.staying(self.step):
            due = self.saver.due(last)
            if due:
                stops = self.saver.save(*due)
                self._steps.watch.was_checkpoint(start)
                if stops:
                    self._stop(due[0])

    def _stop(self, number: int) -> NoReturn:
        """All ranks have made a checkpoint, and end."""
        assert self.saver
        self.finished = self._closed = True
        self._check.close()
        transport = self.world.transport
        self.courier.close()
        transport.meet()
        ends, words = transport.broadcast(ending.requeue() if self.rank == 0 else None)
        raise Stopped(f"train: told to stop: checkpoint of step {number} in {self.saver.path}; {words}", ends)

    def _resumed(self) -> None:
        """The data are as they were; from here on random numbers are, too."""
        if self.saver:
            self.saver.take_random()

    def _fetched_none(self) -> None:
        if self.attached and not self.finished:
            self._steps.watch.cancel()

    def _dealt(self, hand: Hand) -> None:
        self._begin()
        self._share.deal(hand)
        if self.attached:
            self._steps.weigh(hand.weight)

    def _begin(self) -> None:
        self._resumed()
        if self.attached and not self.finished:
            self._steps.watch.enter("forward")
            self._share.fetched()

    def _others_go_on(self) -> None:
        peer = self.world.transport.probe(0)
        if peer is not None:
            raise TrainError(f"rank {peer} goes on while this one has ended after {self.step} steps: every worker "
                             "needs as many steps as the others (run.loader gives them)")


def _describe(run: Run) -> dict[str, Any]:
    """What ran, where; `nodes` and `zones` are counts (0 zones where none is known).

    `spectral_gap` is that of the graph of gossip, with shared memory between nodes; None for other strategies.
    `aggregation` is as Strategy has it.
    """
    world, workers = run.world, run.world.ranks("worker")
    places = [{"rank": rank, "node": node, "zone": zone, "role": role} for rank, (node, zone, role) in enumerate(
        zip(world.nodes, world.zones, world.roles, strict=True))]
    gap = None
    if world.traffic in GRAPHS:
        play = leaders(workers, world.nodes, world.zones) if world.method.shared_memory else workers
        gap = spectral_gap(world.traffic, Members([world.zones[rank] for rank in play], run.seed, world.costs))
    return {"strategy": world.strategy, "traffic": world.traffic, "spectral_gap": gap, "ranks": len(world.nodes),
            "workers": len(workers), "ps": len(world.nodes) - len(workers), "nodes": len(set(world.nodes)),
            "zones": len(set(world.zones) - {""}), "map": places, "parameters": run.replica.parameters.size,
            "aggregation": run.strategy.aggregation, "seed": run.seed, "lost": run.survivors.lost}
