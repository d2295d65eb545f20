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

from slurmdl.errors import InvalidOptionsError, Preempted, TrainError, UsageError, print_stderr
from slurmdl.train import strategy_config
from slurmdl.train import world as world_module
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library import checkpoint_coordinator, consistency, replica_check, shard_optimizer, shutdown
from slurmdl.train.library.checkpointer import Checkpointer
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.load_balance import WorkAssignment
from slurmdl.train.library.loader import DataSource, Loader, LoaderCallbacks, make_data_source
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches
from slurmdl.train.library.step_hooks import StepHooks
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup, spectral_gap
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.report import plot as pictures
from slurmdl.train.report.meters import RankReport, StepMeter, format_summary, summarize
from slurmdl.train.strategies import STRATEGIES, Strategy, StrategyContext
from slurmdl.train.strategies.shared_memory_gossip import node_leaders
from slurmdl.train.strategy_config import (
    CHECK_EVERY_VARIABLE,
    CHECKPOINT_DIR_VARIABLE,
    CHECKPOINT_EVERY_VARIABLE,
    PLOT_VARIABLE,
    TRACE_DIR_VARIABLE,
    StrategyConfig,
)
from slurmdl.train.trace import Trace
from slurmdl.train.transports.transport import Transport

#: steps from one checkpoint to the next where nothing is said
DEFAULT_CHECKPOINT_EVERY = 500

EvaluateFn = Callable[[], tuple[float, float] | None]


def init(config: StrategyConfig | None = None, *, seed: int = 1, backward_passes_per_step: int = 1, must_match: Mapping[str, object] | None = None,
         resume_must_match: Mapping[str, object] | None = None, trace_dir: str = "", plot_file: str = "", checkpoint_dir: str = "",
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
    if backward_passes_per_step < 1:
        raise TrainError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    own = transport is None
    if own:
        shutdown.install_excepthook()
    found = world_module.init_mpi(environ) if transport is None else transport
    folder = checkpoint_dir or environ.get(CHECKPOINT_DIR_VARIABLE, "")
    every = checkpoint_every if checkpoint_every is not None else _steps_from_environ(
        environ, CHECKPOINT_EVERY_VARIABLE, DEFAULT_CHECKPOINT_EVERY)
    compared = check_every if check_every is not None else _steps_from_environ(
        environ, CHECK_EVERY_VARIABLE, replica_check.DEFAULT_CHECK_EVERY)
    if folder and own:
        checkpoint_coordinator.install_signal_handlers()
    its = {"seed": seed, "backward_passes_per_step": backward_passes_per_step}
    world = world_module.create_world(config or strategy_config.resolve({}, environ), found, environ, {
        **(must_match or {}), **its, "checkpoint_dir": folder, "checkpoint_every": every, "check_every": compared})
    run = consistency.call_on_all(world, lambda: Run(world, seed, backward_passes_per_step, compared, trace_dir or environ.get(TRACE_DIR_VARIABLE, ""),
                                              plot_file or environ.get(PLOT_VARIABLE, ""), own))
    if folder:
        _require_common_steps(world)
        run.checkpointer = Checkpointer(run, os.path.abspath(folder), every, {**(resume_must_match or {}), **its})
    if own:
        atexit.register(_close_at_exit, run)
    return run


def _require_common_steps(world: world_module.World) -> None:
    """Refuse checkpoints of workers that have no step in common at which to make one."""
    method = world.config
    if method.load_balance == "local-steps" or (method.load_balance == "batch-size" and method.asynchronous):
        mode = f"{method.load_balance}{' --async' * method.asynchronous}"
        raise InvalidOptionsError(f"--checkpoint-dir: not valid with --load-balance {mode}, which assigns samples by "
                                  "the workers' speeds; valid: --load-balance off, or batch-size without --async")


def _steps_from_environ(environ: Mapping[str, str], variable: str, default: int) -> int:
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
    recovery: FailureRecovery
    comm_thread: CommThread
    model: Any
    optimizer: Any

    def __init__(self, world: world_module.World, seed: int, backward_passes: int, check_every: int, trace_dir: str, plot_file: str,
                 owns_process: bool) -> None:
        self.world, self._owns_process = world, owns_process
        self.p2p = MeteredP2P(world.transport, world.locality_levels())
        self.meter = StepMeter()
        self.batch_size = 0
        self.consensus_distance = 0.0
        self.seed, self._backward_passes, self._check_every = seed, backward_passes, check_every
        self._trace = Trace(trace_dir, self.rank, world.nodes[self.rank]) if trace_dir else None
        self._plot_file = plot_file if self.is_main else ""
        if self._plot_file:
            pictures.check_plot_file(self._plot_file)
        self.checkpointer: Checkpointer | None = None
        self.loaders: list[Loader] = []
        self._first_step = 0
        self._score_before_averaging: tuple[float, float] | None = None
        self._work_assignment = WorkAssignment(self)
        if world.config.load_balance != "off" and backward_passes > 1:
            raise TrainError(f"--load-balance {world.config.load_balance}: not valid with backward_passes_per_step="
                             f"{backward_passes}; valid: backward_passes_per_step=1, or --load-balance off")
        self._served_strategy: Strategy | None = None
        self.attached = self.finished = self._closed = False

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return len(self.world.ranks_with_role("worker"))

    @property
    def worker_rank(self) -> int | None:
        """Index of this rank among the workers, None for a server."""
        return None if self.is_server else self.world.ranks_with_role("worker").index(self.rank)

    @property
    def is_server(self) -> bool:
        """Whether this rank is a parameter server."""
        return self.world.roles[self.rank] == "ps"

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first living worker: the one that logs, evaluates and saves."""
        return self.rank == self.world.alive_with_role("worker")[0]

    @property
    def strategy(self) -> Strategy:
        """This rank's part in the strategy; another one after the loss of a rank."""
        return self.recovery.strategy

    @property
    def failure_policy(self) -> str:
        """What becomes of the run where a rank is lost, in words."""
        transport = self.world.transport
        if not transport.recovery_name:
            return f"all ranks end ({world_module.no_recovery_reason()})"
        needed = self._all_ranks_needed_reason(self.strategy)
        return f"all ranks end ({needed})" if needed else f"the others go on ({transport.recovery_name})"

    def _all_ranks_needed_reason(self, strategy: Strategy) -> str:
        """Why all ranks end where one is lost, "" where the others could go on."""
        if self.checkpointer:
            return "a checkpoint is of all ranks"
        if self.is_load_balanced:
            return f"--load-balance {self.world.config.load_balance} needs them all"
        return "" if strategy.survives_rank_failure else f"{self.world.strategy} needs them all"

    @property
    def step(self) -> int:
        """Steps that the optimizer has made, those before a checkpoint included."""
        return self._step_hooks.completed if self.attached else 0

    @property
    def is_load_balanced(self) -> bool:
        """Whether faster workers get more to do."""
        return self.world.config.load_balance != "off"

    @property
    def global_step(self) -> int:
        """Steps that the workers have made in the mean, by which a learning rate should go; other than `step` where
        a worker makes more or fewer of them than others (--load-balance local-steps).
        """
        method = self.world.config
        by_share = method.load_balance == "local-steps" or (self.is_load_balanced and method.asynchronous)
        return self._work_assignment.global_step if by_share else self.step

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Keep the model together with those of the other ranks from now on; a call of all ranks.

        Model and optimizer stay the objects that they are. On a parameter server this call serves until all workers
        have ended, and then ends the process with status 0.

        Raises
        ------
        TrainError : as `attach`.
        """
        if self.is_server and not self._owns_process:
            raise TrainError("wrap() would end a process that is not its own; valid: attach() and serve()")
        self.attach(model, optimizer)
        if self.is_server:
            self.serve()
            self.close()
            shutdown.exit_process(0)
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
        description = consistency.call_on_all(world, lambda: consistency.model_signature(model, optimizer))
        consistency.check_same_on_ranks(world, description)
        chosen = consistency.call_on_all(world, lambda: consistency.trained_parameter_ids(model, optimizer))
        self.replica = consistency.call_on_all(world, lambda: Replica(model, chosen))
        consistency.broadcast_if_different(world, self.p2p, self.replica.parameters)
        self.replica.copy_to_device()
        consistency.broadcast_untrained(world, self.p2p, model, self.replica.tensors)
        self.model, self.optimizer = model, optimizer
        if self.checkpointer:
            self.checkpointer.load_latest(description)
        self.comm_thread = CommThread(world.transport.supports_comm_thread, clock=world.transport.now, peer_wait_clock=self.p2p.peer_wait_seconds,
                               trace=self._trace)
        setting = StrategyContext(
            self.p2p, self.comm_thread, world.ranks_with_role(
                "worker"), world.ranks_with_role("ps"), self.replica.parameters,
            self.replica.gradients, self.replica.sizes, world.config, self.seed, world.nodes, world.zones,
            world.costs, lambda: float(optimizer.param_groups[0]["lr"]),
            lambda part: shard_optimizer.make_shard_optimizer(
    optimizer, self.replica, part), lambda: shard_optimizer.hyperparameters(optimizer),
            shard_optimizer.lr_indices(optimizer), model_weights=lambda: self._work_assignment.model_weights, relocate_parameters=self.replica.relocate_parameters,
            device_copies=self.replica)
        strategy = consistency.call_on_all(world, lambda: STRATEGIES[world.strategy](setting))
        self.recovery = FailureRecovery(world, self.replica, setting, strategy, self._all_ranks_needed_reason(strategy),
                                   self.checkpointer is not None)
        self._replica_check = ReplicaCheck(self, self._check_every)
        self._step_hooks = StepHooks(
    self,
    self._work_assignment,
    self._backward_passes,
    self._trace,
    bool(
        self._plot_file),
         self._replica_check)
        if self.checkpointer:
            self.checkpointer.restore_strategy(self.strategy)
        self._step_hooks.install()
        self.attached = True

    def loader(self, data: Any, batch_size: int, shuffle: bool = True, **options: Any) -> Loader:
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
        found = make_data_source(data, options)
        loader = self.loader_from_source(found, batch_size, shuffle)
        if not self.is_server:
            mark = (found.num_samples, batch_size, found.fingerprint, found.prefetch * self.is_load_balanced)
            self._call(lambda: consistency.check_same_on_workers(self.world, self.p2p, "data", mark))
        return loader

    def loader_from_source(self, data_source: DataSource, batch_size: int, shuffle: bool = True) -> Loader:
        """As `loader`, of a source that is known to be the same on all workers."""
        deal = GlobalBatches(data_source.num_samples, self.worker_count, batch_size, shuffle, self.seed)
        self.batch_size = batch_size
        loader = Loader(deal, self._work_assignment.make_sampler(deal, data_source.prefetch), data_source,
                        LoaderCallbacks(self._on_fetch, self._on_batch, self._on_epoch_end, self._on_resume))
        self.loaders.append(loader)
        if self.checkpointer and not self.is_server:
            self.checkpointer.restore_loader(len(self.loaders) - 1)
        return loader

    def register_for_checkpointing(self, name: str, obj: Any) -> None:
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
        if self.checkpointer and not self.is_server:
            self.checkpointer.register(name, obj)

    def resume_at(self, step: int) -> None:
        """So many steps have been made already."""
        self._first_step = step
        self._step_hooks.resume_at(step)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """What all ranks give, in rank order; between two steps, a call of all of them."""
        def errand() -> list[Any]:
            self.world.transport.barrier()  # asleep, where gathering spins
            return self.world.transport.allgather(obj)
        return list(self._call(errand))

    def print(self, *values: Any) -> None:
        """Print, on the first worker alone."""
        if self.is_main:
            print(*values, flush=True)

    @contextmanager
    def data_phase(self) -> Iterator[None]:
        """Around what makes the next batch, where it is not one of `loader`: counts as time for data."""
        self._on_fetch()
        yield
        self._start_forward()

    def log_loss(self, loss: float) -> None:
        """Tell the loss of the step that is under way or just over, for the summary."""
        self.meter.add_loss(loss)

    def serve(self) -> None:
        """A parameter server's part, until all workers have ended."""
        while self._served_strategy is not self.strategy:
            strategy, number = self.strategy, self._first_step
            with self.recovery.recovering(self.step):
                while strategy.serve_step(number):
                    called, strategy.requested_checkpoint = strategy.requested_checkpoint, None
                    if called is None:
                        number += 1
                    elif self.checkpointer and self.checkpointer.save(called):
                        self._stop_after_checkpoint(called)
                self._served_strategy = strategy

    def finish(self, evaluate: EvaluateFn | None = None) -> None:
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
        self._checkpoint_if_due(last=True)
        self.finished = True
        self._replica_check.close()
        if self.checkpointer:
            self.checkpointer.finish()
        if not self.is_server:  # what a server has is newer than its model
            self.replica.mark_changed()
            self.replica.copy_to_host()
        self._work_assignment.finish()
        self.recovery.retry_until_agreed(lambda: self._finalize(evaluate), self.step)
        self.comm_thread.close()
        self.replica.copy_to_device()

    def _finalize(self, evaluate: EvaluateFn | None) -> None:
        """What `finish` does; anew with those that live, where a rank is lost meanwhile."""
        if self.is_server:
            self.serve()
        self.strategy.finish()
        transport, do = self.world.transport, self.comm_thread.call
        do(lambda: transport.barrier(self._fail_if_others_continue))
        self._replica_check.finish()
        if not self.strategy.identical_at_end:
            weights = do(lambda: transport.allgather(0.0 if self.is_server else self.strategy.model_weight))
            if not self.is_server:
                if evaluate:
                    self.replica.copy_to_device()
                    self._score_before_averaging = evaluate()
                share = weights[self.rank] / sum(filter(None, weights))
                self.consensus_distance = do(lambda: consistency.average_models(
                    self.p2p, self.world.alive_with_role("worker"), self.replica.parameters, share))

    def summary(self, score: tuple[float, float] | None = None) -> dict[str, Any] | None:
        """The figures of the run on the first living rank, None on the others; a call of all ranks after `finish`.

        Parameters
        ----------
        score : (loss, accuracy) of the final model on the test data, from the rank that evaluated it.
        """
        fired, skipped = self.recovery.exchange_counts
        report = RankReport(self.meter.totals, self.p2p.bytes_sent, self.consensus_distance, score, self._score_before_averaging, fired, skipped,
                        self.batch_size, zlib.crc32(self.replica.parameters))
        reports = self.recovery.retry_until_agreed(lambda: self.world.transport.gather(report), self.step)
        if self._trace:
            self._trace.close()
        if self._plot_file:
            world = self.world
            pictures.write_plot(
    self._plot_file,
    self.meter,
     f"{world.strategy}, {world.comm_pattern}, {self.worker_count} workers")
        self._closed = True
        if reports is None:
            return None
        return _summary_header(self) | summarize(reports, self.world.roles)

    def close(self) -> None:
        """Finish the run and tell its figures on the first living rank's stderr; the script's end calls it, too."""
        if self._closed or not self.attached:
            return
        self.finish()
        figures = self.summary()
        if figures:
            print_stderr(format_summary(figures))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def _call(self, op: Callable[[], Any]) -> Any:
        """Carry out what needs messages: by the courier, once there is one."""
        return self.comm_thread.call(op) if self.attached and not self.finished else op()

    def _on_fetch(self) -> None:
        if self.attached and not self.finished:
            self._checkpoint_if_due()
            self._step_hooks.timer.enter("data")
            self._work_assignment.start_fetch()

    def _checkpoint_if_due(self, last: bool = False) -> None:
        """Between two steps: all that belongs to the one before has been done."""
        if not self.checkpointer or self.is_server:
            return
        start, self._step_hooks.last_checkpoint_check = self.world.transport.now(), self.step
        with self.recovery.recovering(self.step):
            due = self.checkpointer.due_checkpoint(last)
            if due:
                stops = self.checkpointer.save(*due)
                self._step_hooks.timer.add_checkpoint(start)
                if stops:
                    self._stop_after_checkpoint(due[0])

    def _stop_after_checkpoint(self, number: int) -> NoReturn:
        """All ranks have made a checkpoint, and end."""
        assert self.checkpointer
        self.finished = self._closed = True
        self._replica_check.close()
        transport = self.world.transport
        self.comm_thread.close()
        transport.barrier()
        ends, words = transport.broadcast(shutdown.requeue_job() if self.rank == 0 else None)
        raise Preempted(
    f"train: told to stop: checkpoint of step {number} in {self.checkpointer.path}; {words}",
     ends)

    def _on_resume(self) -> None:
        """The data are as they were; from here on random numbers are, too."""
        if self.checkpointer:
            self.checkpointer.restore_rng()

    def _on_epoch_end(self) -> None:
        if self.attached and not self.finished:
            self._step_hooks.timer.discard_empty_step()

    def _on_batch(self, batch_slice: BatchSlice) -> None:
        self._start_forward()
        self._work_assignment.begin_step(batch_slice)
        if self.attached:
            self._step_hooks.set_gradient_weight(batch_slice.gradient_weight)

    def _start_forward(self) -> None:
        self._on_resume()
        if self.attached and not self.finished:
            self._step_hooks.timer.enter("forward")
            self._work_assignment.end_fetch()

    def _fail_if_others_continue(self) -> None:
        peer = self.world.transport.iprobe(0)
        if peer is not None:
            raise TrainError(f"rank {peer} goes on while this one has ended after {self.step} steps: every worker "
                             "needs as many steps as the others (run.loader gives them)")


def _summary_header(run: Run) -> dict[str, Any]:
    """What ran, where; `nodes` and `zones` are counts (0 zones where none is known).

    `spectral_gap` is that of the graph of gossip, with shared memory between nodes; None for other strategies.
    `aggregation` is as Strategy has it.
    """
    world, workers = run.world, run.world.ranks_with_role("worker")
    places = [{"rank": rank, "node": node, "zone": zone, "role": role} for rank, (node, zone, role) in enumerate(
        zip(world.nodes, world.zones, world.roles, strict=True))]
    gap = None
    if world.comm_pattern in GRAPHS:
        play = node_leaders(workers, world.nodes, world.zones) if world.config.shared_memory else workers
        gap = spectral_gap(world.comm_pattern, GossipGroup(
            [world.zones[rank] for rank in play], run.seed, world.costs))
    return {"strategy": world.strategy, "comm_pattern": world.comm_pattern, "spectral_gap": gap,
            "world_size": len(world.nodes),
            "num_workers": len(workers), "num_servers": len(world.nodes) - len(workers),
            "num_nodes": len(set(world.nodes)),
            "num_zones": len(set(world.zones) - {""}), "rank_map": places, "parameters": run.replica.parameters.size,
            "ps_locality": run.strategy.ps_locality, "seed": run.seed, "failed_ranks": run.recovery.failed_ranks}
