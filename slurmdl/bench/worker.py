"""One rank of a cell of the matrix: an MPI program that trains with a framework.

    srun --mpi=pmix python -m slurmdl.bench.worker WORK.json RESULT

Each worker writes RESULT.<rank>.json, so that its measurements survive a failure of other ranks. The training thread
times the steps; between two steps it waits only if the framework makes it wait.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from slurmdl import files
from slurmdl.bench import frameworks
from slurmdl.bench.frameworks import Framework, TrainingSession
from slurmdl.bench.host_meters import CpuIdleMeter, TcpBytesSent
from slurmdl.errors import SlurmdlError, TrainError
from slurmdl.train import world
from slurmdl.train.library import shutdown
from slurmdl.train.meters import PHASES

PROFILED_STEPS = 3  # steps under PyTorch's profiler, after the timed ones
#: prefixes of communication events of PyTorch's process groups
_COMM_PREFIXES = ("gloo:", "nccl:", "mpi:")


def main() -> None:
    shutdown.install_excepthook()
    work_file, result = sys.argv[1:]
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    framework = frameworks.load(work["framework"])
    try:
        reason = framework.unavailable_reason()
        figures = {"missing": reason} if reason else measure(framework, work)
    except SlurmdlError:
        raise
    except Exception as error:
        traceback.print_exc()  # an adapter's author wants to know where
        raise TrainError(f"framework {work['framework']}: {type(error).__name__}: {error}") from error
    if figures is not None:
        files.write_atomic(f"{result}.{figures.get('rank', 0)}.json", json.dumps(figures))
    # PyTorch's gloo threads can abort a shutdown of the interpreter (pytorch#190489)
    shutdown.exit_process(0)


def measure(framework: Framework, work: Mapping[str, Any]) -> dict[str, Any] | None:
    """Train and return the measurements of this rank; None if it only serves."""
    import torch

    from slurmdl.train.trainer import models
    from slurmdl.train.trainer.data_readers import load_dataset
    from slurmdl.train.trainer.options import Options
    from slurmdl.train.trainer.workloads import Classification

    torch.set_num_threads(max(1, int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))))
    options = Options(**{key: work[key] for key in ("model", "data", "batch_size", "lr", "seed")})
    transport = world.init_mpi()
    rank, size = transport.rank, transport.size
    task = Classification(options, load_dataset(options.data, options.seed))
    optimizer = models.build_optimizer(options.optimizer, task.module.parameters(), options.lr, options.momentum,
                                           options.weight_decay)
    parameters = sum(tensor.numel() for tensor in task.module.parameters())
    session = framework.setup(transport, work["strategy"], task.module, optimizer)
    if session is None:
        return None
    if work["emulate_compute"]:  # after the framework's hooks, so that their time counts as backward pass
        each = work["emulate_compute"] / options.batch_size
        task.install_compute_emulation(lambda images: each * images, time.sleep)
    task.module = session.module
    timer = StepTimer(task, session, task.batches(rank, size))
    backward_without_comm = 0.0 if session.phase_seconds else timer.backward_without_comm(work["warmup_steps"])
    for _ in range(work["warmup_steps"]):
        timer.step()
    steps, accuracy_curve, passed_s, cpu_meter, sent = [], [], 0.0, CpuIdleMeter(), TcpBytesSent()
    overlapped_before = session.overlapped_comm() if session.overlapped_comm else 0.0
    for number in range(1, work["steps"] + 1):
        steps.append(timer.step())
        passed_s += steps[-1]["wall"]
        if work["evaluate_every"] and number % work["evaluate_every"] == 0:
            accuracy_curve.append((passed_s, task.evaluate()[1]))
    cpu_idle, by_peer = cpu_meter.idle_share(), sent.bytes()
    if session.phase_seconds is None:
        for step in steps:
            step["communication"] += max(0.0, step["backward"] - backward_without_comm)
            step["backward"] = min(step["backward"], backward_without_comm)
    overlapped = None
    if session.overlapped_comm:
        overlapped = max(0.0, session.overlapped_comm() - overlapped_before) / work["steps"]
    communication = _profiled_comm(timer) if session.phase_seconds is None else None
    further = session.close() or {}
    return {"rank": rank, "node": world.node_name(), "zone": (world.zone_path() or ("",))[-1],
            "local_addresses": sorted(sent.local_addresses), "sent": by_peer, "parameters": parameters,
            "steps": steps, "accuracy_curve": accuracy_curve, "communication": communication,
            "overlapped_comm": overlapped, "cpu_idle": cpu_idle, "memory": _memory(),
            "bytes_sent": further.get("bytes_sent"), "torch": torch.__version__}


class StepTimer:
    def __init__(self, task: Any, session: TrainingSession, batches: Any) -> None:
        self._task, self._session, self._batches = task, session, batches

    def backward_without_comm(self, steps: int) -> float:
        """Return the median seconds of backward passes without communication; their gradients are discarded."""
        durations = []
        for _ in range(steps):
            with self._session.no_sync():
                loss = self._task.loss(next(self._batches))
                start = time.perf_counter()
                loss.backward()
                durations.append(time.perf_counter() - start)
        self._session.optimizer.zero_grad()
        return statistics.median(durations)

    def step(self) -> dict[str, float]:
        """Make a step; return its seconds (`wall`) and those of its phases."""
        session, now = self._session, time.perf_counter
        before = session.phase_seconds() if session.phase_seconds else {}
        begun = now()
        batch = next(self._batches)
        fetched = now()
        session.optimizer.zero_grad()
        zeroed = now()
        loss = self._task.loss(batch)
        forward = now()
        loss.backward()
        backward = now()
        session.optimizer.step()
        stepped = now()
        session.after_step()
        ended = now()
        if session.phase_seconds:
            phases = {phase: seconds - before.get(phase, 0.0) for phase, seconds in session.phase_seconds().items()}
        else:
            phases = {**dict.fromkeys(PHASES, 0.0), "forward": forward - zeroed, "backward": backward - forward,
                     "optimizer": stepped - backward, "communication": ended - stepped}
        phases["data"] += fetched - begun
        phases["optimizer"] += zeroed - fetched
        return {**phases, "wall": ended - begun}


def _profiled_comm(timer: StepTimer) -> float:
    """Return the communication seconds of a step, overlapped or exposed, measured by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            timer.step()
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events()
                   if event.name.startswith(_COMM_PREFIXES))
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered * 1e-6 / PROFILED_STEPS


def _memory() -> int:
    """Return the peak memory of this process in bytes; proc(5), VmHWM."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
