"""One cell of the matrix on one rank: a program of MPI, whose ranks train as a framework does.

    srun --mpi=pmix python -m slurmdl.bench.matrix.program WORK.json RESULT

Each worker writes RESULT.<rank>.json, so that what was measured stays, whatever becomes of the others. Steps are
timed by the training thread: from one to the next it waits for nothing but what the framework makes it wait for.
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

from slurmdl import wholefile
from slurmdl.bench import frameworks
from slurmdl.bench.frameworks.framework import Framework, Training
from slurmdl.bench.machine import Processors
from slurmdl.bench.sockets import Sent
from slurmdl.errors import SlurmdlError, TrainError
from slurmdl.train import runtime
from slurmdl.train.library import ending
from slurmdl.train.report.meters import PHASES

#: steps that PyTorch's profiler watches, after those that are timed
WATCHED = 3
#: what communication is called by PyTorch's process groups
_OF_COMMUNICATION = ("gloo:", "nccl:", "mpi:")


def main() -> None:
    ending.end_together()
    work_file, result = sys.argv[1:]
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    framework = frameworks.load(work["framework"])
    try:
        lacking = framework.missing()
        figures = {"missing": lacking} if lacking else measure(framework, work)
    except SlurmdlError:
        raise
    except Exception as error:
        traceback.print_exc()  # an adapter's author wants to know where
        raise TrainError(f"framework {work['framework']}: {type(error).__name__}: {error}") from error
    if figures is not None:
        _write(result, figures)
    # PyTorch's gloo threads can abort a shutdown of the interpreter (pytorch#190489)
    ending.leave(0)


def measure(framework: Framework, work: Mapping[str, Any]) -> dict[str, Any] | None:
    """Figures of a rank; None of one that only serves."""
    import torch

    from slurmdl.train.trainer import optimizers
    from slurmdl.train.trainer.data import read
    from slurmdl.train.trainer.options import parse
    from slurmdl.train.trainer.task import Images

    torch.set_num_threads(max(1, int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))))
    words = [f"--{key}={work[key]}" for key in ("model", "data", "batch", "lr", "seed", "compute") if work[key]]
    options = parse(words, {})
    transport = runtime.connect()
    rank, size = transport.rank, transport.size
    task = Images(options, read(options.data, options.seed))
    optimizer = optimizers.build(options.optimizer, task.module.parameters(), options.lr, options.momentum,
                                 options.weight_decay)
    parameters = sum(tensor.numel() for tensor in task.module.parameters())
    training = framework.start(transport, work["strategy"], task.module, optimizer)
    if training is None:
        return None
    if options.compute:  # after the framework's own hooks, so that what passes in them is the backward pass to it
        each = options.compute.seconds / options.batch
        task.pace(lambda images: each * images, time.sleep)
    task.module = training.module
    clock = Clock(task, training, task.batches(rank, size))
    alone = 0.0 if training.phases else clock.alone(work["warm_up"])
    for _ in range(work["warm_up"]):
        clock.step()
    steps, course, passed, processors, sent = [], [], 0.0, Processors(), Sent()
    behind = training.hidden() if training.hidden else 0.0
    for number in range(1, work["steps"] + 1):
        steps.append(clock.step())
        passed += steps[-1]["wall"]
        if work["evaluate_every"] and number % work["evaluate_every"] == 0:
            course.append((passed, task.score()[1]))
    idle, by_peer = processors.idle(), sent.bytes()
    if training.phases is None:
        for its in steps:
            its["communication"] += max(0.0, its["backward"] - alone)
            its["backward"] = min(its["backward"], alone)
    hidden = max(0.0, training.hidden() - behind) / work["steps"] if training.hidden else None
    communication = _watched(clock) if training.phases is None else None
    further = training.close()
    return {"rank": rank, "node": runtime.node_name(), "zone": (runtime.zone_path() or ("",))[-1],
            "own": sorted(sent.own), "sent": by_peer, "parameters": parameters, "steps": steps, "course": course,
            "communication": communication, "hidden": hidden, "idle": idle,
            "memory": _memory(), "bytes": further.get("bytes"), "torch": torch.__version__}


class Clock:
    """Makes steps and times their phases."""

    def __init__(self, task: Any, training: Training, batches: Any) -> None:
        self._task, self._training, self._batches = task, training, batches

    def alone(self, steps: int) -> float:
        """Median seconds of backward passes that send nothing; what they find is thrown away."""
        found = []
        for _ in range(steps):
            with self._training.apart():
                loss = self._task.loss(next(self._batches))
                begun = time.perf_counter()
                loss.backward()
                found.append(time.perf_counter() - begun)
        self._training.optimizer.zero_grad()
        return statistics.median(found)

    def step(self) -> dict[str, float]:
        """Make a step; seconds of all of it (`wall`), and of its phases."""
        training, now = self._training, time.perf_counter
        before = training.phases() if training.phases else {}
        begun = now()
        batch = next(self._batches)
        fetched = now()
        training.optimizer.zero_grad()
        zeroed = now()
        loss = self._task.loss(batch)
        forward = now()
        loss.backward()
        backward = now()
        training.optimizer.step()
        stepped = now()
        training.after()
        ended = now()
        if training.phases:
            found = {phase: seconds - before.get(phase, 0.0) for phase, seconds in training.phases().items()}
        else:
            found = {**dict.fromkeys(PHASES, 0.0), "forward": forward - zeroed, "backward": backward - forward,
                     "optimizer": stepped - backward, "communication": ended - stepped}
        found["data"] += fetched - begun
        found["optimizer"] += zeroed - fetched
        return {**found, "wall": ended - begun}


def _watched(clock: Clock) -> float:
    """Seconds of communication in a step, hidden behind computation or not, as PyTorch's profiler sees it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(WATCHED):
            clock.step()
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events()
                   if event.name.startswith(_OF_COMMUNICATION))
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered * 1e-6 / WATCHED


def _memory() -> int:
    """Bytes of memory that this process had at most; proc(5), VmHWM."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def _write(result: str, figures: Mapping[str, Any]) -> None:
    wholefile.write(f"{result}.{figures.get('rank', 0)}.json", json.dumps(figures))


if __name__ == "__main__":
    main()
