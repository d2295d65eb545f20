"""Detection of slow ranks in a plain script on PyTorch's DistributedDataParallel.

    from slurmdl.train import watch_slow_ranks

    model = DistributedDataParallel(network)
    watch_slow_ranks(model)          # on all ranks
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

from slurmdl.errors import UnavailableError, warn
from slurmdl.train.slow_ranks import WINDOW_STEPS, SlowRankReporter, start_requeue, warn_of_refusal
from slurmdl.train.transports.torch_distributed import all_gather_objects
from slurmdl.train.world import is_rank_zero, node_name

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
