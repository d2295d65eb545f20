"""Which ranks compute slowly, by the compute times of all ranks over windows of steps; and what a run does about it.

The rule is that of bad nodes in a preflight (health/faults.py, which training must not import): the ratio to the
median of the ranks, and the distance from it in median absolute deviations (MAD). The first keeps small differences
between good nodes from counting, the second the noise of a busy cluster; with fewer than four ranks a MAD means
nothing. Each value is the median of a window of steps, and several windows in a row must agree, so a pause of some
steps (a garbage collection, a checkpoint, an evaluation) is no alarm.

Not for ranks whose batches differ in size by design (--load-balance): a fast node gets more samples until all compute
equally long, or takes more steps. There the step time is no measure of the node, and the load balance deals with slow
nodes already, so the callers do nothing.

The run warns, and if asked (--dl-on-slow=exclude) requeues the job without the node. `slurmdl srun` passes the option
on to the tasks of a step by a variable. The requeue itself is that of the command `slurmdl requeue`, in a process of
its own: it counts the requeues, refuses if too few other nodes are left, and remembers the node for later
jobs.

The compute times come from the library's step timer, or in a plain script from hooks of DistributedDataParallel::

    from slurmdl.train import watch_slow_ranks

    model = DistributedDataParallel(network)
    watch_slow_ranks(model)          # on all ranks
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median, median_low
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import BadNodesError, UnavailableError, warn
from slurmdl.train.p2p import CommThread
from slurmdl.train.transports.torch_distributed import all_gather_objects
from slurmdl.train.transports.transport import Tag
from slurmdl.train.transports.virtual import VirtualTransport
from slurmdl.train.world import World, is_rank_zero, node_name
from slurmdl.units import format_duration

#: steps of a window; all ranks end it at the same step number
WINDOW_STEPS = 20
#: windows in a row that must agree, and seconds that the rank must compute in them: in short windows the scheduling
#: of a busy node makes a rank slow by chance
CONFIRMING_WINDOWS, CONFIRMING_S = 3, 3.0
#: lowest ratio of a slow rank's compute time to the median, and seconds that it is longer at least: the noise of an
#: operating system
MIN_FACTOR, MIN_EXCESS_S = 1.3, 0.001
#: distance of a slow rank from the median in standard deviations, if there are this many ranks
_DEVIATIONS, _MIN_RANKS_FOR_MAD = 5.0, 4
#: 1 standard deviation of normal noise in MADs
_MAD_TO_DEVIATION = 1.4826
#: set to "exclude" in the tasks of a step with --dl-on-slow=exclude
ON_SLOW_VARIABLE = "SLURMDL_ON_SLOW"
#: time limit of `slurmdl requeue`, which queries a controller that may be under load
_REQUEUE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes slowly.

    Attributes:
        since: first step of the first slow window.
        seconds, median_seconds: compute time per step in the last window, of this rank and of the median rank, in s.
    """

    rank: int
    since: int
    seconds: float
    median_seconds: float

    @property
    def factor(self) -> float:
        """Compute time as a multiple of the median."""
        return self.seconds / self.median_seconds

    def describe(self, node: str) -> str:
        """E.g. `rank 3 on n4 computes 1.9 times as long as the median rank, since step 140 (0.38 s, 0.20 s)`."""
        return f"rank {self.rank} on {node} computes {self.factor:.1f} times as long as the median rank, since " \
               f"step {self.since} ({format_duration(self.seconds)}, {format_duration(self.median_seconds)})"


@dataclass
class _Suspect:
    """A rank that was slow in some windows in a row: their first step, number, and seconds of its computation."""

    since: int
    windows: int = 0
    seconds: float = 0.0
    is_reported: bool = False


class SlowRankDetector:
    """Finds slow ranks in the compute times of successive windows."""

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def add_window(self, seconds: Mapping[int, float], first_step: int) -> list[SlowRank]:
        """Judge a window; return the ranks that it confirms as slow, each once until a window without it.

        The slowest is first.

        Args:
            seconds: rank -> its compute time per step, the median of the window, in s. A rank without a value neither
                becomes slow nor recovers.
            first_step: of the window.
        """
        # the lower of two medians: also one of two ranks, or two of four, can be slow
        center = median_low(seconds.values()) if len(seconds) > 1 else 0.0
        slow = _slow_ranks(seconds, center)
        for rank in seconds:
            if rank not in slow:
                self._suspects.pop(rank, None)
        findings = []
        for rank in slow:
            suspect = self._suspects.setdefault(rank, _Suspect(first_step))
            suspect.windows += 1
            suspect.seconds += WINDOW_STEPS * seconds[rank]
            if suspect.windows >= CONFIRMING_WINDOWS and suspect.seconds >= CONFIRMING_S and not suspect.is_reported:
                suspect.is_reported = True
                findings.append(SlowRank(rank, suspect.since, seconds[rank], center))
        return sorted(findings, key=lambda finding: -finding.seconds)


def _slow_ranks(seconds: Mapping[int, float], center: float) -> list[int]:
    """Ranks far above a positive median."""
    if center <= 0:
        return []
    deviation = _MAD_TO_DEVIATION * median_low(abs(value - center) for value in seconds.values())
    margin = _DEVIATIONS * deviation if len(seconds) >= _MIN_RANKS_FOR_MAD else 0.0
    limit = max(MIN_FACTOR * center, center + MIN_EXCESS_S, center + margin)
    return [rank for rank, value in seconds.items() if value > limit]


class SlowRankReporter:
    """Finds slow ranks and warns of them.

    Args:
        nodes: rank -> its node.

    Attributes:
        found: rank, node, step since when it is slow, and factor of each finding.
        nodes_to_exclude: node -> reason of the first finding, if nodes of slow ranks are to be excluded. Later
            findings are only reported: the requeue is under way, or was refused.
    """

    def __init__(self, nodes: Mapping[int, str], environ: Mapping[str, str] = os.environ) -> None:
        self._nodes, self._detector = nodes, SlowRankDetector()
        self._excludes = environ.get(ON_SLOW_VARIABLE) == "exclude"
        self.found: list[dict[str, Any]] = []
        self.nodes_to_exclude: dict[str, str] = {}

    def add_window(self, seconds: Mapping[int, float], first_step: int) -> bool:
        """Judge a window as SlowRankDetector; return whether nodes are to be excluded because of it."""
        findings = self._detector.add_window(seconds, first_step)
        for finding in findings:
            node = self._nodes[finding.rank]
            warn(f"train: {finding.describe(node)}")
            self.found.append({"rank": finding.rank, "node": node, "since_step": finding.since,
                               "factor": round(finding.factor, 3)})
        if not findings or not self._excludes or self.nodes_to_exclude:
            return False
        self.nodes_to_exclude = {self._nodes[finding.rank]: _reason(finding) for finding in reversed(findings)}
        return True


def _reason(finding: SlowRank) -> str:
    return f"rank {finding.rank} computed {finding.factor:.1f} times as long as the median rank"


def requeue_without_nodes(reasons: Mapping[str, str], dry_run: bool = False, this_job_only: bool = False) -> str:
    """Requeue the job of this process without nodes (node -> reason); return what was done.

    With `dry_run` only check whether that is possible, with `this_job_only` do not remember the nodes for later jobs.
    Raises UnavailableError with the reason if it is not possible, BadNodesError if the limit of requeues forbids it.
    """
    from slurmdl.slurm import jobs, process  # imported only when needed

    # with the ID of the job, it returns
    argv = process.module_argv("slurmdl", "requeue", "--exclude", ",".join(reasons), "--reason",
                       "; ".join(reasons.values()), *["--dry-run"] * dry_run, *["--this-job-only"] * this_job_only,
                       jobs.own_job_id(os.environ))
    result = process.run_command(argv, timeout=_REQUEUE_TIMEOUT_S, name="slurmdl requeue")
    # Slurm terminates the processes of a requeued job, this one among them
    if result.returncode not in (0, -signal.SIGTERM):
        lines = result.stderr.strip().splitlines() or [f"slurmdl requeue: exit status {result.returncode}"]
        error = BadNodesError if result.returncode == BadNodesError.exit_status else UnavailableError
        raise error(lines[-1].removeprefix("slurmdl: "))
    return result.stdout.strip()


def start_requeue(reasons: Mapping[str, str], dry_run: bool = False) -> Future[str]:
    """Start `requeue_without_nodes` in a thread, so that the training does not wait for the controller."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(requeue_without_nodes(reasons, dry_run))
        except Exception as error:
            future.set_exception(error)

    # a daemon thread: the training may end meanwhile
    threading.Thread(target=run, name="slurmdl-requeue", daemon=True).start()
    return future


def warn_of_refusal(nodes: Iterable[str], error: object) -> None:
    """Warn that the run continues with slow nodes, and why."""
    warn(f"train: not requeued without {', '.join(nodes)}, and the run continues: {error}")


#: time limit of an exchange, as PyTorch's own of a collective: the first rank may evaluate for long meanwhile
_TIMEOUT_S = 1800.0
#: windows whose values may be in flight; more are in flight only if a rank has ended its training
_MAX_EXCHANGES = 4
#: on a GPU: passes whose times are read later
_MAX_PENDING_PASSES = 64


def watch_slow_ranks(model: Any) -> None:
    """Warn of ranks that compute slowly, from now on. Collective over the ranks of the model.

    The first rank prints one line for each rank that takes at least 1.3 times as long as the median rank in three
    windows of 20 steps (slow_ranks has the rule). The time of a step is that of its forward and backward
    passes without waiting for other ranks: from the start of the forward pass to the last gradient, so before
    DistributedDataParallel waits for the others' gradients. Passes under `no_sync()` belong to the step that follows;
    forward passes without gradients or in `eval()` mode do not count. Steps are counted from this call, from 1.

    With `--dl-on-slow=exclude` the first rank also runs `slurmdl requeue --exclude` for the node, once: Slurm then
    ends the job and starts it again on other nodes, and the script must resume from a checkpoint of its own.

    Never raises an error and never waits for a rank during training: after a problem one line says so, and the
    monitoring stops. Not measured: models within torch.compile (give DistributedDataParallel the compiled model), and
    SyncBatchNorm, in whose forward pass all ranks wait for the slowest.

    Args:
        model: a DistributedDataParallel.
    """
    monitor = None
    try:
        monitor = DdpMonitor(model)
        monitor.start()
    except Exception as error:
        if monitor:
            monitor.stop()
        if is_rank_zero():
            _warn_of_end(error)


class DdpMonitor:
    """One rank's part in the detection for one model.

    Attributes:
        is_first: whether this is the first rank of the model's group, which judges and reports.
    """

    def __init__(self, model: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(model, DistributedDataParallel):
            raise UnavailableError(f"a {type(model).__name__} is not measured; expected a DistributedDataParallel")
        self._torch, self._dist, self._model = torch, dist, model
        self._ranks = dist.get_process_group_ranks(model.process_group)
        self.is_first = dist.get_rank() == self._ranks[0]
        self._parameters = [tensor for tensor in model.module.parameters() if tensor.requires_grad]
        if not hasattr(self._parameters[0], "register_post_accumulate_grad_hook"):
            raise UnavailableError(f"PyTorch {torch.__version__} has no hooks for gradients; expected 2.1 or newer")
        self._device = self._parameters[0].device
        self._on_gpu = self._device.type == "cuda"
        self._handles: list[Any] = []
        #: the current pass: its start, whether the ranks exchange gradients in it, and the last gradient so far
        self._start: Any = None
        self._synchronizes, self._last_index = False, -1
        self._end: Any = None
        #: parameter whose gradient was the last one in the previous pass
        self._expected_last = -1
        #: passes whose times are unknown yet: start, end, and whether they end a step
        self._passes: deque[tuple[Any, Any, bool]] = deque(maxlen=_MAX_PENDING_PASSES)
        self._step_seconds, self._times = 0.0, list[float]()
        self._steps = 0
        #: exchanges in flight, with their tensors
        self._exchanges: deque[tuple[Any, Any, list[Any]]] = deque()

    def start(self) -> None:
        """Connect the ranks, and install the hooks. Collective."""
        dist = self._dist
        if len(self._ranks) < 2:
            return
        # a group of its own: the others' collectives and their order stay as they are, and gloo leaves GPUs alone
        self._group = dist.new_group(self._ranks, timedelta(seconds=_TIMEOUT_S), backend="gloo",
                                     use_local_synchronization=len(self._ranks) < dist.get_world_size())
        nodes = all_gather_objects(node_name(), self._group)
        self._reporter = SlowRankReporter(dict(zip(self._ranks, nodes, strict=True)))
        self._handles.append(self._model.module.register_forward_pre_hook(_ForwardHook(self)))
        for index, tensor in enumerate(self._parameters):
            self._handles.append(tensor.register_post_accumulate_grad_hook(partial(self._on_gradient, index)))

    def stop(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before_forward(self) -> None:
        """A forward pass of the inner module starts, after DistributedDataParallel has synchronized the buffers."""
        if self._torch.compiler.is_compiling():
            return
        if self._start is not None and self._last_index >= 0:
            self._end_pass()
        if not self._torch.is_grad_enabled() or not self._model.training:
            return
        self._synchronizes = self._model.require_backward_grad_sync
        if self._start is not None:
            return  # a further forward pass before the backward pass
        self._read_times()
        self._last_index, self._end = -1, None
        # last, so that the monitoring itself does not count
        self._start = self._now()

    def _on_gradient(self, index: int, tensor: Any) -> None:
        # for each parameter, so as short as possible
        self._last_index = index
        if not self._on_gpu:
            self._end = time.perf_counter()
        elif index == self._expected_last:
            self._end = self._now()

    def _now(self) -> Any:
        """The time in s; on a GPU an event, whose time is known when the GPU has reached it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def _end_pass(self) -> None:
        """The previous pass is over: queue its time, unless on a GPU another gradient was the last one."""
        is_known = not self._on_gpu or self._last_index == self._expected_last
        self._expected_last = self._last_index
        self._passes.append((self._start, self._end if is_known else None, self._synchronizes))
        self._start = None

    def _read_times(self) -> None:
        while self._passes:
            start, end, ends_step = self._passes[0]
            if self._on_gpu and end is not None and not end.query():
                return
            self._passes.popleft()
            if end is not None:
                self._step_seconds += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            if ends_step:
                self._end_step()

    def _end_step(self) -> None:
        if self._step_seconds:
            self._times.append(self._step_seconds)
        self._step_seconds = 0.0
        self._steps += 1
        if self._steps % WINDOW_STEPS == 0:
            self._read_exchanges()
            self._start_exchange(median(self._times) if self._times else 0.0)
            self._times.clear()

    def _start_exchange(self, seconds: float) -> None:
        torch, dist = self._torch, self._dist
        own = torch.tensor([float(self._steps - WINDOW_STEPS + 1), seconds], dtype=torch.float64)
        received = [torch.zeros_like(own) for _ in self._ranks] if self.is_first else None
        work = dist.gather(own, received, dst=self._ranks[0], group=self._group, async_op=True)
        self._exchanges.append((work, own, received or []))

    def _read_exchanges(self) -> None:
        """Judge the windows that all ranks have sent; never waits."""
        while self._exchanges and self._exchanges[0][0].is_completed():
            work, own, received = self._exchanges.popleft()
            work.wait()  # raises the error of a failed exchange
            if not self.is_first:
                continue
            windows = [(int(first_step), seconds) for first_step, seconds in (tensor.tolist() for tensor in received)]
            # the ranks count alike, since DistributedDataParallel needs all of them in each step
            values = {rank: seconds for rank, (first_step, seconds) in zip(self._ranks, windows, strict=True)
                      if first_step == int(own[0]) and seconds > 0}
            if self._reporter.add_window(values, int(own[0])):
                nodes = self._reporter.nodes_to_exclude
                start_requeue(nodes).add_done_callback(partial(_report_requeue, tuple(nodes)))
        if len(self._exchanges) > _MAX_EXCHANGES:
            raise UnavailableError(f"a rank has sent no times for {_MAX_EXCHANGES * WINDOW_STEPS} steps")


class _ForwardHook:
    """Hook of the inner module. Its first exception ends the monitoring, not the training."""

    def __init__(self, monitor: DdpMonitor) -> None:
        self._monitor = monitor

    def __call__(self, *arguments: Any) -> None:
        try:
            self._monitor.before_forward()
        except Exception as error:
            self._monitor.stop()
            if self._monitor.is_first:
                _warn_of_end(error)

    def __reduce__(self) -> tuple[Any, ...]:
        # copies of the module (copy.deepcopy, torch.save) get a callable without effect, of the standard library
        return partial, (nullcontext.__exit__, None)


def _report_requeue(nodes: tuple[str, ...], requeue: Future[str]) -> None:
    if error := requeue.exception():
        warn_of_refusal(nodes, error)
    else:
        warn(f"train: {requeue.result()}")


def _warn_of_end(error: Exception) -> None:
    warn(f"train: slow ranks are not watched: {error or type(error).__name__}")


class SlowRankMonitor:
    """One rank's part in the detection of slow ranks in a run of the library.

    At the end of each window of WINDOW_STEPS steps every worker sends the median of its compute times to the first
    alive worker, which reads them half a window later, when ranks that are some steps behind have sent theirs, too.
    No rank waits: a missing value is judged with the next window. The time of a step excludes communication and
    waiting for peers, whatever the strategy (PhaseTimer); it includes the batch.

    Nothing is monitored with one worker, on a parameter server, with virtual ranks, whose clocks are no measure, and
    with load balancing (see slow_ranks).

    Args:
        request_stop: requests a checkpoint of all ranks after which the run stops; None without checkpoints.

    Attributes:
        nodes_to_leave: node -> reason, on the first worker after it has requested a stop so that the job starts again
            without these nodes; else empty.
    """

    def __init__(self, world: World, comm_thread: CommThread, request_stop: Callable[[], None] | None) -> None:
        self._world, self._comm_thread, self._request_stop = world, comm_thread, request_stop
        self._is_active = not isinstance(world.transport, VirtualTransport) and not world.is_server \
            and world.worker_count > 1 and not world.config.load_balance
        self._reporter = SlowRankReporter(dict(enumerate(world.nodes)))
        self.nodes_to_leave: dict[str, str] = {}
        self._times: list[float] = []
        #: the main rank's own time of the last window, and the others' that are being received
        self._own_seconds: float | None = None
        self._receiving: Future[dict[int, float]] | None = None
        self._first_step = 0
        self._sends: list[tuple[Any, npt.NDArray[np.float64]]] = []
        #: the check whether the job can be requeued without the slow nodes
        self._requeue_check: Future[str] | None = None

    @property
    def found(self) -> list[dict[str, Any]]:
        """See SlowRankReporter; empty except on the first worker."""
        return self._reporter.found

    def after_step(self, step: int, seconds: float) -> None:
        """Record the compute time of a step in s; `step` is the number of completed steps."""
        if not self._is_active:
            return
        self._times.append(seconds)
        offset = step % WINDOW_STEPS
        if not offset:
            # after a resume the first window may be shorter
            if len(self._times) == WINDOW_STEPS:
                self._end_window(step)
            self._times.clear()
        elif offset == WINDOW_STEPS // 2 and self._own_seconds is not None:
            self._receiving = self._comm_thread.submit(self._receive)
        if self._receiving and self._receiving.done():
            self._judge(self._receiving)
        if self._requeue_check and self._requeue_check.done():
            self._stop_if_possible(self._requeue_check)

    def finish(self) -> None:
        """After the last step of all workers: receive what no window has read."""
        if self._is_active and self._world.is_main:
            self._comm_thread.call(self._receive)

    def continue_with_all_nodes(self, error: object) -> None:
        """The job was not requeued, so the run continues."""
        if self.nodes_to_leave:
            warn_of_refusal(self.nodes_to_leave, error)
            self.nodes_to_leave = {}

    def _end_window(self, step: int) -> None:
        seconds = median(self._times)
        if self._world.is_main:
            self._own_seconds, self._first_step = seconds, step - WINDOW_STEPS + 1
        else:
            self._comm_thread.submit(lambda: self._send(seconds))

    def _send(self, seconds: float) -> None:
        # if a rank has failed, the calls raise errors; the strategy's next op reports the failure
        transport, array = self._world.transport, np.array([seconds])
        pending, self._sends = self._sends, []
        self._sends = [(request, sent) for request, sent in pending if not transport.testall([request])]
        self._sends.append((transport.isend(self._world.alive_with_role("worker")[0], array, Tag.STEP_TIME), array))

    def _receive(self) -> dict[int, float]:
        """The newest value of each rank that has sent one."""
        transport, seconds = self._world.transport, dict[int, float]()
        while (peer := transport.iprobe(Tag.STEP_TIME)) is not None:
            array = np.empty(1)
            transport.waitall([transport.irecv(peer, array, Tag.STEP_TIME)])
            seconds[peer] = float(array[0])
        return seconds

    def _judge(self, received: Future[dict[int, float]]) -> None:
        own_seconds, self._own_seconds, self._receiving = self._own_seconds, None, None
        if received.exception() or own_seconds is None:
            return
        seconds = {self._world.rank: own_seconds, **received.result()}
        if self._reporter.add_window(seconds, self._first_step):
            nodes = self._reporter.nodes_to_exclude
            if self._request_stop:
                self._requeue_check = start_requeue(nodes, dry_run=True)
            else:
                warn_of_refusal(nodes, "it has no checkpoints to resume from (--checkpoint-dir)")

    def _stop_if_possible(self, check: Future[str]) -> None:
        self._requeue_check = None
        if error := check.exception():
            warn_of_refusal(self._reporter.nodes_to_exclude, error)
        elif self._request_stop:
            self.nodes_to_leave = self._reporter.nodes_to_exclude
            self._request_stop()
