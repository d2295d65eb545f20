"""A training run: wraps a model and an optimizer, and provides loaders, checkpoints and the summary."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmdl.errors import TrainError, print_stderr, warn
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.text import pluralize
from slurmdl.train.library import consistency, shard_optimizer, shutdown
from slurmdl.train.library.checkpointer import Checkpointer, CheckpointOptions
from slurmdl.train.library.context import Context, Counters
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.load_balance import SampleAssignment
from slurmdl.train.library.loader import (
    DataSource,
    Loader,
    StepBoundary,
    check_options,
    is_iterable_dataset,
    make_data_source,
)
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.library.training_step import TrainingStep
from slurmdl.train.meters import RankReport, StepMeter, Trace, format_summary, summarize
from slurmdl.train.mixers import spectral_gap
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.slow_ranks import SlowRankMonitor
from slurmdl.train.strategies import Strategy, StrategyContext, make_strategy
from slurmdl.train.strategies.allreduce import choose_device_backend
from slurmdl.train.strategies.shared_memory_gossip import node_leaders
from slurmdl.train.world import World

if TYPE_CHECKING:
    from slurmdl.train.library.stream_loader import StreamLoader

#: returns (loss, accuracy) on the test data, None without test data
EvaluateFn = Callable[[], tuple[float, float] | None]


class Run:
    """One rank's part in a run; made by `startup.init`.

    Attributes:
        worker_rank: index of this rank among the workers, None for a parameter server.
        consensus_distance: distance of this rank's model from the mean of all at the end, relative to its norm.
        replica, recovery: set by `attach`.
    """

    replica: Replica
    recovery: FailureRecovery

    def __init__(self, world: World, seed: int, backward_passes: int, check_every: int, trace_dir: str,
                 checkpoints: CheckpointOptions | None, owns_process: bool) -> None:
        if world.config.load_balance and backward_passes > 1:
            raise TrainError(f"--load-balance: not valid with backward_passes_per_step={backward_passes}; expected "
                             "backward_passes_per_step=1, or no --load-balance")
        self.world, self.seed, self._owns_process = world, seed, owns_process
        self.rank, self.worker_count, self.worker_rank = world.rank, world.worker_count, world.worker_rank
        self.is_server = world.is_server
        self._backward_passes, self._check_every = backward_passes, check_every
        self._checkpoint_options = checkpoints
        self.p2p = MeteredP2P(world.transport, world.locality_levels())
        self.meter, self.state = StepMeter(), Counters()
        self.consensus_distance = 0.0
        self._trace = Trace(trace_dir, self.rank, world.nodes[self.rank]) if trace_dir else None
        self._score_before_averaging: tuple[float, float] | None = None
        self._sample_assignment = SampleAssignment(world, self.p2p, self.state)
        self._boundary = StepBoundary(self.state, self._sample_assignment)
        self._ctx: Context | None = None
        self._checkpointer: Checkpointer | None = None
        self._replica_check: ReplicaCheck
        self._slow_rank_monitor: SlowRankMonitor
        self._hooks: TrainingStep | None = None
        self._served_strategy: Strategy | None = None
        self._summary: dict[str, Any] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first alive worker, which logs, evaluates and saves."""
        return self.world.is_main

    @property
    def strategy(self) -> Strategy:
        """This rank's strategy; replaced after a rank failure."""
        return self.recovery.strategy

    @property
    def step(self) -> int:
        """Optimizer steps of this rank, including those before a checkpoint."""
        return self.state.step

    @property
    def global_step(self) -> int:
        """Mean number of steps of the workers, for LR schedules; not `step` with --load-balance and --async."""
        return self._sample_assignment.global_step

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Synchronize a model with the other ranks from now on, and return model and optimizer. Collective.

        On a parameter server this call serves until all workers have ended, and then exits with status 0.
        """
        if self.is_server and not self._owns_process:
            raise TrainError("wrap() would exit a process of the caller; expected attach() and serve()")
        self.attach(model, optimizer)
        if self.is_server:
            self.serve()
            self.close()
            shutdown.exit_process(0)
        return model, optimizer

    def attach(self, model: Any, optimizer: Any) -> None:
        """As `wrap`, but the caller calls `serve`. Collective.

        The trained parameters become views of one flat buffer (Replica). All parameters, buffers and
        optimizer states start as those of rank 0; untrained parameters remain local from then on, and buffers, e.g.
        BatchNorm statistics, until `finish`. Raises TrainError if the model or optimizer is unsupported, or differs
        between ranks.
        """
        if self._ctx:
            raise TrainError("wrap() was called before; one model and one optimizer belong to a run "
                             "(torch.nn.ModuleDict holds several models)")
        world, p2p = self.world, self.p2p
        signature = consistency.call_on_all(world, lambda: consistency.model_signature(model, optimizer))
        consistency.check_same_on_ranks(world, signature)
        trained_ids = consistency.call_on_all(world, lambda: consistency.trained_parameter_ids(model, optimizer))
        sends = world.config.sends_gradients and len(world.nodes) > 1
        replica = self.replica = consistency.call_on_all(
            world, lambda: Replica(model, trained_ids, sends_gradients=sends))
        consistency.broadcast_if_different(world, p2p, replica.parameters, lambda: consistency.reject_copies(
            optimizer, zip(replica.names, (tensor.detach() for tensor in replica.tensors), strict=True)))
        replica.copy_to_device()
        consistency.broadcast_untrained(world, p2p, model, replica.trained_ids)
        consistency.broadcast_loaded_optimizer_state(world, p2p, optimizer)
        # a single rank has no messages
        threaded = world.transport.supports_comm_thread and len(world.nodes) > 1
        comm_thread = CommThread(threaded, world.transport.now, p2p.peer_wait_seconds, self._trace)
        try:
            self._start(Context(world, p2p, comm_thread, replica, model, optimizer, self.meter,
                                   choose_device_backend(world, replica.device_gradients.device)), signature)
        except BaseException:
            comm_thread.close()
            raise

    def _start(self, ctx: Context, signature: list[tuple[str, str]]) -> None:
        """Build all parts of the run; the order restores model, strategy and hooks as in an uninterrupted run."""
        checkpointer = Checkpointer(ctx, self.state, self._checkpoint_options, signature) \
            if self._checkpoint_options else None
        strategy_ctx = self._strategy_context(ctx)
        strategy = consistency.call_on_all(ctx.world, lambda: make_strategy(strategy_ctx))
        recovery = FailureRecovery(ctx.world, ctx.replica, ctx.optimizer, strategy_ctx, strategy,
                                   checkpointer is not None)
        replica_check = ReplicaCheck(ctx, self.state, recovery, self._check_every)
        monitor = SlowRankMonitor(
            ctx.world, ctx.comm_thread, (lambda: checkpointer.coordinator.request_stop()) if checkpointer else None)
        self._sample_assignment.bind(ctx.comm_thread, recovery)
        hooks = TrainingStep(ctx, self.state, recovery, self._sample_assignment, replica_check, monitor,
                          self._backward_passes, self._trace)
        if checkpointer:
            checkpointer.restore_strategy(recovery)
        self._boundary.bind(ctx, recovery, hooks, replica_check, monitor, checkpointer)
        hooks.install()
        self._ctx, self.recovery, self._replica_check, self._checkpointer = ctx, recovery, replica_check, checkpointer
        self._slow_rank_monitor, self._hooks = monitor, hooks
        if self._owns_process and "ps" in ctx.world.roles and not self.is_server:
            shutdown.watch_server_waits(ctx.world, lambda: self.state.closed,
                               lambda error: shutdown.exit_process(shutdown.report_failure(error)))
        for index in range(len(self.state.loaders)):
            self._restore_loader(index)

    def _strategy_context(self, ctx: Context) -> StrategyContext:
        world, replica, optimizer = ctx.world, ctx.replica, ctx.optimizer
        return StrategyContext(
            ctx.p2p, ctx.comm_thread, world.ranks_with_role("worker"), world.ranks_with_role("ps"),
            replica.parameters, np.empty(0, np.float32) if ctx.device_backend else replica.gradients, replica.sizes,
            world.config, self.seed, world.nodes, world.zones, world.costs,
            lambda: float(optimizer.param_groups[0]["lr"]),
            lambda part: shard_optimizer.make_shard_optimizer(optimizer, replica, part),
            lambda: shard_optimizer.hyperparameters(optimizer), shard_optimizer.lr_indices(optimizer),
            model_weights=lambda: self._sample_assignment.model_weights,
            relocate_parameters=replica.relocate_parameters,
            relocate_gradients=None if replica.on_gpu else replica.relocate_gradients, device_copies=replica,
            device_gradients=replica.device_gradients if ctx.device_backend else None,
            device_backend=ctx.device_backend)

    def loader(self, data: Any, batch_size: int, shuffle: bool = True, **options: Any) -> Loader | StreamLoader:
        """This worker's batches of the training data; each iteration is an epoch over all workers. Collective.

        Raises TrainError if the data are unsupported, or differ between the workers.

        Args:
            data: a torch Dataset with a length, an array or tensor, or a tuple of them of equal length; or an
                IterableDataset, which gives all ranks the same samples in its own order (stream_loader).
            batch_size: samples per worker and step, as the mean over the workers; see sampling.GlobalBatches.
            options: of torch.utils.data.DataLoader, e.g. num_workers.
        """
        check_options(options)
        loader: Loader | StreamLoader
        if is_iterable_dataset(data):
            loader = self._stream_loader(data, batch_size, options)
            fingerprint = (0, batch_size, 0, 0)
        else:
            source = make_data_source(data, options)
            loader = self.loader_from_source(source, batch_size, shuffle)
            fingerprint = (source.num_samples, batch_size, source.fingerprint,
                           source.prefetch * self.world.config.load_balance)
        if not self.is_server:
            check = partial(consistency.check_same_data, self.world, self.p2p, fingerprint)
            if self._ctx:
                self._ctx.comm_thread.call(check)
            else:
                check()
        return loader

    def loader_from_source(self, data_source: DataSource, batch_size: int, shuffle: bool = True) -> Loader:
        """As `loader`, for a source that is the same on all workers."""
        batches = GlobalBatches(data_source.num_samples, self.worker_count, batch_size, shuffle, self.seed)
        sampler = self._sample_assignment.make_sampler(batches, data_source.prefetch)
        loader = Loader(batches, sampler, data_source, self._boundary)
        self._add_loader(loader)
        return loader

    def _stream_loader(self, dataset: Any, batch_size: int, options: Mapping[str, Any]) -> StreamLoader:
        from slurmdl.train.library.stream_loader import StreamLoader  # imports PyTorch

        if self.world.config.load_balance:
            raise TrainError("--load-balance: not valid with an IterableDataset, whose samples have no index; "
                             "expected no --load-balance")
        loader = StreamLoader(dataset, self.worker_rank or 0, self.worker_count, batch_size, options, self._boundary)
        self._add_loader(loader)
        return loader

    def _add_loader(self, loader: Loader | StreamLoader) -> None:
        self.state.batch_size = loader.batch_size
        self.state.loaders.append(loader)
        self._restore_loader(len(self.state.loaders) - 1)

    def _restore_loader(self, index: int) -> None:
        if self._checkpointer and not self.is_server:
            self._checkpointer.restore_loader(index)

    def register_for_checkpointing(self, name: str, obj: Any) -> None:
        """Save an object, e.g. an LR scheduler, in checkpoints, and restore it if the run resumes.

        Call after `wrap`, with each name once. The object has state_dict() and load_state_dict(); its state consists
        of numbers, strings, tensors, and lists, tuples and dicts of them.
        """
        if self._checkpoint_options and not self.is_server:
            if not self._checkpointer:
                raise TrainError(f"register_for_checkpointing({name!r}): valid only after run.wrap()")
            self._checkpointer.register(name, obj)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather an object from all workers, in their order, between two steps. Collective over them.

        Parameter servers take part before `wrap` only, as they do not run the code below it. The object consists of
        numbers, strings, bytes, None, arrays, tensors, and lists, tuples, sets and dicts of them. Tensors arrive in
        host memory. Raises TrainError for other objects, since pickles run code of their sender.
        """
        workers = self.world.alive_with_role("worker")
        if self._ctx and self.is_server:
            raise TrainError("all_gather_object() on a parameter server: valid only before run.wrap()")
        if self._ctx and "ps" in self.world.roles:
            return list(self._ctx.comm_thread.call(lambda: consistency.gather_messages(self.p2p, workers, obj)))
        if self._ctx:
            objects = self._ctx.all_gather_object(obj)
        else:
            self.world.transport.barrier()
            objects = self.world.transport.allgather(obj)
        return [objects[worker] for worker in workers]

    def print(self, *values: Any) -> None:
        """Print on the main rank only."""
        if self.is_main:
            print(*values, flush=True)

    @contextmanager
    def data_phase(self) -> Iterator[None]:
        """Context for making a batch without `loader`; counts as data time."""
        self._boundary.on_fetch()
        yield
        self._boundary.start_forward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for backward passes that accumulate gradients without an exchange, as in DistributedDataParallel.

        The next pass outside, or else `opt.step()`, exchanges the sums. All ranks make the same passes in it.
        """
        if not self._hooks:
            raise TrainError("no_sync(): valid only after run.wrap()")
        with self._hooks.accumulating():
            yield

    def log_loss(self, loss: float) -> None:
        """Record the loss of the current or previous step for the summary."""
        self.meter.loss.add(loss)

    def serve(self) -> None:
        """Serve as a parameter server until all workers have ended."""
        while self._served_strategy is not self.strategy:
            strategy, step = self.strategy, self.state.first_step
            with self.recovery.recovering(self.step):
                while strategy.serve_step(step):
                    number, strategy.requested_checkpoint = strategy.requested_checkpoint, None
                    if number is None:
                        step += 1
                    else:
                        self._boundary.serve_checkpoint(number)
                self._served_strategy = strategy

    def finish(self, evaluate: EvaluateFn | None = None) -> None:
        """After the last step: replace all workers' models and buffers by their mean unless equal. Collective.

        `evaluate` evaluates the model before averaging. Raises TrainError if another worker makes more steps.
        """
        ctx = self._ctx
        if self.state.finished or not ctx:
            return
        self._boundary.checkpoint_if_due(last=True)
        self.state.finished = True
        if self._hooks:
            if self.is_main and self.step == self.state.first_step and self._hooks.has_gradients:
                warn(f"train: the model has gradients, but no step was made; expected {type(ctx.optimizer).__name__}"
                     ".step() of the optimizer that run.wrap() got")
            self._hooks.leave_model()
        self._replica_check.close()
        if self._checkpointer:
            self._checkpointer.coordinator.finish()
        if not self.is_server:  # on a server the buffers are newer than its model
            ctx.replica.mark_changed()
            ctx.replica.copy_to_host()
        self._sample_assignment.finish()
        self.recovery.retry_until_agreed(lambda: self._finalize(ctx, evaluate), self.step)
        ctx.comm_thread.close()
        ctx.replica.copy_to_device()
        if self._owns_process:
            # now, since the script may end the process group before it ends itself
            self._summary = self._gather_summary()
            self.world.transport.close()

    def _finalize(self, ctx: Context, evaluate: EvaluateFn | None) -> None:
        """Collective part of `finish`; repeated on the surviving ranks after a failure."""
        if self.is_server:
            self.serve()
        self.strategy.finish()
        transport, call = self.world.transport, ctx.comm_thread.call
        call(lambda: transport.barrier(self._fail_if_others_continue))
        self.strategy.close()
        self._slow_rank_monitor.finish()
        self._replica_check.finish()
        weight = 1 / len(self.world.alive_with_role("worker"))
        if self.strategy.identical_at_end:
            call(lambda: self._measure_distance(ctx))
        else:
            weights = call(lambda: transport.allgather(0.0 if self.is_server else self.strategy.model_weight))
            if not self.is_server:
                if evaluate:
                    ctx.replica.copy_to_device()
                    self._score_before_averaging = evaluate()
                weight = weights[self.rank] / sum(filter(None, weights))
                self.consensus_distance = call(lambda: consistency.average_models(
                    self.p2p, self.world.alive_with_role("worker"), ctx.replica.parameters, weight))
        call(lambda: consistency.unify_buffers(self.world, self.p2p, ctx.model, weight))

    def _measure_distance(self, ctx: Context) -> None:
        """Measure the distance of models that should be equal, unless they are. Collective."""
        workers, parameters = self.world.alive_with_role("worker"), ctx.replica.parameters
        checksums = self.world.transport.allgather(0 if self.is_server else zlib.crc32(parameters))
        if self.is_server or len({checksums[rank] for rank in workers}) == 1:
            return
        self.consensus_distance = consistency.average_models(self.p2p, workers, parameters.copy(), 1 / len(workers))
        if self.is_main:
            warn("train: the workers' models differ at the end, and were not averaged; expected changes of "
                 "parameters by opt.step() only, or equal on all ranks")

    def summary(self, score: tuple[float, float] | None = None) -> dict[str, Any] | None:
        """Summary of the run on the first alive rank, None on the others. Collective, after `finish`.

        `score` is (loss, accuracy) of the final model on the test data, from the rank that evaluated it.
        """
        self.state.closed = True
        return self._gather_summary(score)

    def _gather_summary(self, score: tuple[float, float] | None = None) -> dict[str, Any] | None:
        assert self._ctx
        world, (exchanges, exchanges_skipped) = self.world, self.recovery.exchange_counts
        report = RankReport(self.meter.totals, self.p2p.bytes_sent, self.consensus_distance, score,
                            self._score_before_averaging, exchanges, exchanges_skipped, self.state.batch_size,
                            zlib.crc32(self.replica.parameters), self._slow_rank_monitor.found)
        reports = self.recovery.retry_until_agreed(lambda: world.transport.gather(report), self.step)
        if self._trace:
            self._trace.close()
        if reports is None:
            return None
        return _summary_header(self._ctx, self.recovery, self.seed) | summarize(reports, world.roles)

    def close(self) -> None:
        """Finish the run and print its summary to stderr of the first alive rank; called at exit, too."""
        if self.state.closed or not self._ctx:
            return
        self.finish()
        summary = self._summary if self._owns_process else self.summary()
        self.state.closed = True
        if summary:
            print_stderr(format_summary(summary))

    def close_at_exit(self) -> None:
        """`close`, and a warning if the script has not called `finish` and so never had the final model."""
        if self._ctx and self.is_main and not (self.state.finished or self.strategy.averages_gradients):
            warn("train: the script ended without run.finish(), so that it never had the final model, on which all "
                 "workers agree; expected run.finish() after the last step")
        self.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def _fail_if_others_continue(self) -> None:
        consistency.fail_if_others_continue(self.world, lambda peer: (
            f"rank {peer} continues, but this one has ended after {pluralize(self.step, 'step')}: every worker "
            "needs the same number of steps (run.loader provides them)"))


def _summary_header(ctx: Context, recovery: FailureRecovery, seed: int) -> dict[str, Any]:
    """Strategy, ranks and failures of a run.

    `spectral_gap` is that of the gossip graph (of nodes with shared memory, or of islands), None for others;
    `ps_locality` see Strategy.
    """
    world, workers = ctx.world, ctx.world.ranks_with_role("worker")
    rank_map = [{"rank": rank, "node": node, "zone": zone, "role": role} for rank, (node, zone, role) in enumerate(
        zip(world.nodes, world.zones, world.roles, strict=True))]
    gap = None
    if world.comm_pattern in GRAPHS:
        members = node_leaders(workers, world.nodes, world.zones) if world.config.shared_memory else \
            [group[0] for group in recovery.strategy.replica_groups] if world.config.islands else workers
        gap = spectral_gap(world.comm_pattern, [world.zones[rank] for rank in members])
    return {"strategy": world.strategy, "comm_pattern": world.comm_pattern, "spectral_gap": gap,
            "world_size": len(world.nodes), "num_workers": len(workers),
            "num_servers": len(world.nodes) - len(workers), "num_nodes": len(set(world.nodes)),
            "num_zones": len(set(world.zones) - {""}), "rank_map": rank_map,
            "parameters": ctx.replica.parameters.size, "ps_locality": recovery.strategy.ps_locality, "seed": seed,
            "failed_ranks": recovery.failed_ranks}
