"""Training runs on virtual ranks, in parallel."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

#: number of parallel processes
MAX_PROCESSES = 2
#: seconds between progress messages
PROGRESS_INTERVAL_S = 30


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        accuracy: test accuracy of the final model, in %.
        own: mean test accuracy of the local models before the final average, in %; equal to `accuracy` if there is
            none.
        sent: bytes that all ranks sent.
        share: share of communication and waiting in the step time.
        course: for each evaluation the virtual seconds, and the test accuracy of the averaged model and of the local
            model of rank 0, in %.
    """

    accuracy: float
    local_accuracy: float
    bytes_sent: int
    comm_share: float
    accuracy_curve: tuple[tuple[float, float, float], ...] = ()


def run_trainings(runs: Iterable[tuple[str, ...]]) -> Iterator[Outcome]:
    """Run `slurmdl train` with each list of options; yield the results in order. Progress goes to stderr."""
    runs_to_do = list(runs)
    start = last_report = time.monotonic()
    # spawn, because torch's threads do not survive a fork
    with ProcessPoolExecutor(MAX_PROCESSES, multiprocessing.get_context("spawn"), _discard_output) as pool:
        try:
            for done, result in enumerate(pool.map(run_training, runs_to_do, chunksize=4), 1):
                if time.monotonic() > last_report + PROGRESS_INTERVAL_S or done == len(runs_to_do):
                    last_report = time.monotonic()
                    print(f"{done} of {len(runs_to_do)} runs in {last_report - start:.0f} s", file=sys.stderr,
                          flush=True)
                yield result
        except BaseException:  # cancel the remaining runs
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def run_training(options: tuple[str, ...]) -> Outcome:
    """Run `slurmdl train` with these options."""
    from slurmdl.train.trainer.options import parse_train_options
    from slurmdl.train.trainer.trainer import train

    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics")
        summary = train(parse_train_options([*options, "--metrics", metrics], {}))
        assert summary is not None, "a simulation returns its summary"
        with open(metrics, encoding="utf-8") as file:
            steps = [json.loads(line) for line in file]
    clock, accuracy_curve = 0.0, []
    for step in steps:
        clock += step["seconds"]
        if "test_accuracy" in step:
            accuracy_curve.append((clock, 100 * step["test_accuracy_averaged_model"], 100 * step["test_accuracy"]))
    local_accuracy = summary["test_accuracy_local_mean"]
    local_accuracy = summary["test_accuracy"] if local_accuracy is None else local_accuracy
    total = summary["compute_seconds"] + summary["exposed_comm_seconds"]
    return Outcome(100 * summary["test_accuracy"], 100 * local_accuracy, sum(summary["bytes_sent"].values()),
                   summary["exposed_comm_seconds"] / total if total else 0.0, tuple(accuracy_curve))


def _discard_output() -> None:
    """Discard the output of a worker process; errors are raised."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
