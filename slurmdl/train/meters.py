"""Measurements of a run: time and loss of each step, bytes by locality level, summary of all ranks, and traces."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmdl.errors import TrainError, warn
from slurmdl.text import pluralize
from slurmdl.train.checkpointed_fields import CheckpointedFields

#: distance of a message: same node, another node of the zone, another zone
LOCALITY_LEVELS = ("intra_node", "intra_zone", "inter_zone")
#: rows of the trace, one per thread
TRAINING_ROW, COMM_ROW = 0, 1
#: completes the JSON document after each event; the next event overwrites it
_JSON_END = b"\n]}\n"


class Trace:
    """Trace of one rank: `rank-N.json` in a directory, in the Trace Event Format (complete events, "X"). Thread-safe.

    Each event is written when it ends, so the trace of a killed rank is valid JSON. Raises TrainError if the
    directory cannot be created or written.
    """

    def __init__(self, trace_dir: str, rank: int, node: str) -> None:
        self._path, self._rank = os.path.join(trace_dir, f"rank-{rank}.json"), rank
        self._lock = threading.RLock()
        metadata: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, {node}"}},
            *({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
              for row, name in ((TRAINING_ROW, "training"), (COMM_ROW, "communication")))]
        header = b'{"traceEvents": [\n' + b",\n".join(json.dumps(event).encode() for event in metadata)
        self._offset = len(header)  # of the next event
        try:
            os.makedirs(trace_dir, exist_ok=True)
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.write(self._file, header + _JSON_END)
        except OSError as error:
            raise TrainError(f"trace {self._path}: {error.strerror}") from error

    def add(self, name: str, start: float, end: float, row: int = TRAINING_ROW) -> None:
        """Add an event from `start` to `end`, in s on the rank's clock; on a write error, warn and stop tracing."""
        event = b",\n" + json.dumps({"name": name, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6,
                                     "pid": self._rank, "tid": row}).encode()
        with self._lock:
            if self._file is None:
                return
            try:
                if os.pwrite(self._file, event + _JSON_END, self._offset) < len(event + _JSON_END):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._offset += len(event)
            except OSError as error:
                warn(f"train: trace {self._path}: {error.strerror}; it ends here")
                with suppress(OSError):
                    os.pwrite(self._file, _JSON_END, self._offset)
                    os.ftruncate(self._file, self._offset + len(_JSON_END))
                self.close()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


#: phases of the training thread. `communication` is model mixing and waiting for the communication thread;
#: `peer_wait` is the part of it before the first chunk of the next message has arrived
PHASES = ("data", "forward", "backward", "communication", "peer_wait", "optimizer")

#: size of the sample for a median
MAX_SAMPLES = 512
#: workers that the table lists one by one, and the max/min ratio above which it shows per-worker values
MAX_LISTED_WORKERS, UNEVEN_RATIO = 16, 1.05


class Series(CheckpointedFields):
    """Count, sum and last value of a per-step quantity."""

    state_fields: tuple[str, ...] = ("count", "total", "last")

    def __init__(self) -> None:
        self.count = 0
        self.total = self.last = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.last = value


class SampledSeries(Series):
    """Series with a median, taken from a random sample of MAX_SAMPLES if there are more values."""

    state_fields = ("_reservoir",)

    def __init__(self) -> None:
        super().__init__()
        self._reservoir = np.zeros(MAX_SAMPLES)
        self._rng = random.Random(1)

    def add(self, value: float) -> None:
        # reservoir sampling (Vitter's algorithm R)
        index = self.count if self.count < MAX_SAMPLES else self._rng.randrange(self.count + 1)
        if index < MAX_SAMPLES:
            self._reservoir[index] = value
        super().add(value)

    @property
    def median(self) -> float:
        """The median, or 0 without values."""
        return float(np.median(self._reservoir[:self.count])) if self.count else 0.0


class StepMeter(CheckpointedFields):
    """Step times of one rank in seconds, in constant memory.

    Attributes:
        exposed_comm: communication and waiting that computation did not hide.
        loss: of the rank's own batch, if the script reports it; empty on a server.
        phases: phase -> sum over all steps.
        overlapped_comm: communication during which the training thread was busy otherwise.
        between_steps: from the end of a step to the start of the next, for example evaluation; without checkpoints.
        checkpoint: agreement on checkpoints, writing them, and waiting for the other ranks.
        samples: of the rank's own batch; 0 if unknown.
    """

    state_fields = ("wall", "exposed_comm", "loss", "phases", "overlapped_comm", "between_steps", "checkpoint",
                    "samples")

    def __init__(self) -> None:
        self.wall, self.exposed_comm, self.loss, self.samples = SampledSeries(), Series(), Series(), Series()
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.overlapped_comm = self.between_steps = self.checkpoint = 0.0

    @property
    def totals(self) -> StepTotals:
        return StepTotals(self.wall.count, self.wall.total, self.wall.median, self.exposed_comm.total,
                          self.loss.last if self.loss.count else None, int(self.samples.total), self.phases,
                          self.overlapped_comm, self.between_steps, self.checkpoint)


class PhaseTimer:
    """Attribute the training thread's time to phases of a StepMeter.

    Args:
        now: the rank's clock, in s.
        peer_wait_clock: time for which the training thread has waited for first chunks so far, in s.
    """

    def __init__(self, meter: StepMeter, now: Callable[[], float], peer_wait_clock: Callable[[], float],
                 trace: Trace | None = None) -> None:
        self._meter, self._now, self._peer_wait_clock, self._trace = meter, now, peer_wait_clock, trace
        self._phase, self._phase_start = "", now()
        self._step_start, self._step_comm, self._peer_wait_at_start = 0.0, 0.0, 0.0
        self._is_first_step = True

    @property
    def is_between_steps(self) -> bool:
        return not self._phase

    def enter(self, phase: str) -> None:
        """Enter a phase, one of PHASES; starts a step if none is in progress."""
        if phase == self._phase:
            return
        now = self._now()
        if self._phase:
            self._add_phase_time(now)
        else:
            if not self._is_first_step:
                self._meter.between_steps += now - self._phase_start
            self._is_first_step = False
            self._step_start, self._step_comm = now, 0.0
            self._peer_wait_at_start = self._peer_wait_clock()
        self._phase, self._phase_start = phase, now

    def discard_empty_step(self) -> None:
        """Discard a step that has just started, because no data were left."""
        if self._phase_start == self._step_start:
            now = self._now()
            self._meter.between_steps += now - self._phase_start
            self._phase, self._phase_start = "", now

    def add_checkpoint(self, start: float) -> None:
        """Attribute the time from `start` until now, between two steps, to a checkpoint."""
        now = self._now()
        if not self._is_first_step:
            self._meter.between_steps += start - self._phase_start
        self._meter.checkpoint += now - start
        self._phase_start = now
        if self._trace:
            self._trace.add("checkpoint", start, now)

    def end_step(self) -> None:
        """End the step; the next phase starts another one."""
        now, meter = self._now(), self._meter
        self._add_phase_time(now)
        peer_wait = min(self._peer_wait_clock() - self._peer_wait_at_start, self._step_comm)
        meter.phases["communication"] -= peer_wait
        meter.phases["peer_wait"] += peer_wait
        meter.wall.add(now - self._step_start)
        meter.exposed_comm.add(self._step_comm)
        self._phase, self._phase_start = "", now

    def _add_phase_time(self, now: float) -> None:
        duration = now - self._phase_start
        self._meter.phases[self._phase] += duration
        if self._phase == "communication":
            self._step_comm += duration
        if self._trace:
            self._trace.add(self._phase, self._phase_start, now)


@dataclass(frozen=True)
class StepTotals:
    """Totals of a StepMeter in s: `wall` and `median` are those of the step times, `loss` is the last one."""

    steps: int
    wall: float
    median: float
    exposed_comm: float
    loss: float | None
    samples: int
    phases: Mapping[str, float]
    overlapped_comm: float
    between_steps: float
    checkpoint: float


@dataclass(frozen=True)
class RankReport:
    """One rank's results at the end of a run.

    Attributes:
        bytes_sent: locality level -> payload bytes sent by this rank.
        consensus_distance: of this rank's model from the mean of all, relative to the mean's norm.
        score: (loss, accuracy) of the final model on the test images, on the rank that evaluated it, else None.
        score_before_averaging: the same of this rank's own model, before the final average.
        exchanges, exchanges_skipped: see Strategy.
        batch_size: samples per step; 0 on a server, or if unknown.
        parameters_crc32: CRC-32 of the parameters, or of the shards of a server.
        slow_ranks: findings of the first worker (SlowRankReporter.found).
    """

    totals: StepTotals
    bytes_sent: dict[str, int]
    consensus_distance: float = 0.0
    score: tuple[float, float] | None = None
    score_before_averaging: tuple[float, float] | None = None
    exchanges: int = 0
    exchanges_skipped: int = 0
    batch_size: int = 0
    parameters_crc32: int = 0
    slow_ranks: Sequence[Mapping[str, Any]] = ()


def summarize(reports: Sequence[RankReport | None], roles: Sequence[str]) -> dict[str, Any]:
    """Summarize the reports of all ranks, in rank order, None for failed ranks.

    Returns:
        batch_size: samples per worker and step, 0 if unknown.
        steps: of the worker with most steps.
        steps_per_worker, batch_size_per_worker, seconds_per_worker: of each worker, in rank order: steps, mean
            samples of a step, and sum of the step times.
        samples_per_second: samples of all workers in all steps / train_seconds.
        train_seconds: the slowest worker's sum of step times.
        seconds_per_step: the slowest worker's median step time.
        samples_per_second_median_step: samples of all workers in one step / seconds_per_step.
        compute_seconds, exposed_comm_seconds: of the whole run, mean over the workers.
        phases: phase -> seconds of the whole run, mean over the workers.
        overlapped_comm_seconds, between_steps_seconds, checkpoint_seconds: see StepMeter; mean over the workers.
        bytes_sent: locality level -> payload bytes of all ranks and steps, with the final average.
        exchanges, exchanges_skipped: mean over the workers.
        train_loss: mean of the workers' batches in the last step; None if no loss was reported.
        test_accuracy_local_mean, test_accuracy_local_worst: of the workers' own models, before the final average.
        consensus_distance: the largest distance of a worker's model from the mean before the final average, relative.
        parameters_crc32: CRC-32 of the final parameters, in hexadecimal.
        slow_ranks: rank, node, since_step and factor of each rank that computed slowly.
    """
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    workers = [report for report, role in zip(reports, roles, strict=True) if report and role == "worker"]
    alive = [report for report in reports if report]
    totals = [report.totals for report in workers]
    wall = [total.wall for total in totals]
    exposed_comm = mean(total.exposed_comm for total in totals)
    slowest = max(total.median for total in totals)
    test_loss, test_accuracy = next((report.score for report in alive if report.score), (None, None))
    losses = [total.loss for total in totals if total.loss is not None]
    local = [report.score_before_averaging[1] for report in workers if report.score_before_averaging]
    batch_size = max(report.batch_size for report in workers)
    return {"batch_size": batch_size, "steps": max(total.steps for total in totals), "train_seconds": max(wall),
            "steps_per_worker": [total.steps for total in totals], "seconds_per_worker": wall,
            "batch_size_per_worker": [total.samples / max(total.steps, 1) for total in totals],
            "samples_per_second": sum(total.samples for total in totals) / max(wall) if max(wall) else 0.0,
            "seconds_per_step": slowest,
            "samples_per_second_median_step": len(workers) * batch_size / slowest if slowest else 0.0,
            "compute_seconds": mean(wall) - exposed_comm, "exposed_comm_seconds": exposed_comm,
            "phases": {phase: mean(total.phases[phase] for total in totals) for phase in PHASES},
            "overlapped_comm_seconds": max(0.0, mean(total.overlapped_comm for total in totals)),
            "between_steps_seconds": mean(total.between_steps for total in totals),
            "checkpoint_seconds": mean(total.checkpoint for total in totals),
            "bytes_sent": {level: sum(report.bytes_sent[level] for report in alive) for level in LOCALITY_LEVELS},
            "exchanges": mean(report.exchanges for report in workers),
            "exchanges_skipped": mean(report.exchanges_skipped for report in workers),
            "train_loss": mean(losses) if losses else None,
            "test_loss": test_loss, "test_accuracy": test_accuracy,
            "test_accuracy_local_mean": mean(local) if local else None,
            "test_accuracy_local_worst": min(local) if local else None,
            "consensus_distance": max(report.consensus_distance for report in workers),
            "parameters_crc32": f"{workers[0].parameters_crc32:08x}",
            "slow_ranks": [dict(finding) for report in alive for finding in report.slow_ranks]}


def format_summary(summary: dict[str, Any]) -> str:
    """Format the summary as a table, one value a line, without absent values."""
    s = summary
    total = s["exposed_comm_seconds"] + s["compute_seconds"]
    roles = Counter(rank["role"] for rank in s["rank_map"])
    model = f"{s['model']}, " if "model" in s else ""
    sent, full = sum(s["bytes_sent"].values()), 4 * s["parameters"] * s["num_workers"] * s["steps"]
    phases = s["phases"] if any(s["phases"].values()) else {"compute": s["compute_seconds"],
                                                            "communication": s["exposed_comm_seconds"]}

    def share(seconds: float) -> str:
        return f"{seconds:.2f} s ({seconds / total if total else 0:.0%})"

    def optional(label: str, key: str, spec: str) -> list[tuple[str, str]]:
        return [] if s[key] is None else [(label, format(s[key], spec))]

    def per_worker(label: str, key: str, spec: str) -> list[tuple[str, str]]:
        """Values of each worker, if they differ by more than the remainder of an epoch."""
        if max(s[key]) <= UNEVEN_RATIO * min(s[key]):
            return []
        if len(s[key]) > MAX_LISTED_WORKERS:
            return [(label, f"{min(s[key]):{spec}} to {max(s[key]):{spec}}")]
        return [(label, ", ".join(format(value, spec) for value in s[key]))]

    uneven = [*per_worker("steps, by worker", "steps_per_worker", "d"),
              *per_worker("batch size, by worker", "batch_size_per_worker", ".1f")]
    rate = s["samples_per_second" if uneven else "samples_per_second_median_step"]
    rows = [("strategy", f"{s['strategy']}, {s['comm_pattern']}"),
            *optional("spectral gap", "spectral_gap", ".3f"),
            ("ranks", f"{s['world_size']} ({', '.join(f'{count} {role}' for role, count in sorted(roles.items()))})"),
            ("nodes", f"{s['num_nodes']}"),
            ("zones", f"{s['num_zones'] or 'unknown'}"),
            ("model", f"{model}{s['parameters']:,} parameters"),
            ("steps", f"{s['steps']}" + (f" of {pluralize(s['batch_size'], 'sample')} per worker"
                                         if s["batch_size"] else "")),
            *uneven,
            ("seconds/step", f"{s['seconds_per_step']:.4f}"),
            *([("samples/s", f"{rate:,.0f}")] if s["batch_size"] else []),
            *((phase.replace("_", " "), share(seconds)) for phase, seconds in phases.items()),
            *([("  overlapped", f"{s['overlapped_comm_seconds']:.2f} s of communication during computation")]
              if s["overlapped_comm_seconds"] >= 0.005 else []),
            ("between steps", f"{s['between_steps_seconds']:.2f} s"),
            *([("checkpoints", f"{s['checkpoint_seconds']:.2f} s")] if s["checkpoint_seconds"] else []),
            *((f"bytes, {level.replace('_', '-')}", f"{s['bytes_sent'][level]:,}") for level in LOCALITY_LEVELS),
            *([("bytes, total", f"{sent:,}, {sent / full:.2%} of fp32 gossip in every step")] if full else []),
            *([("server traffic", "{:.0%} within nodes, {:.0%} within zones".format(*s["ps_locality"]))]
              if s["ps_locality"] else []),
            ("exchanges", f"{s['exchanges']:.0f} made, {s['exchanges_skipped']:.0f} skipped"),
            *optional("test loss", "test_loss", ".4f"),
            *optional("test accuracy", "test_accuracy", ".2%"),
            *optional("  local models, mean", "test_accuracy_local_mean", ".2%"),
            *optional("  local models, worst", "test_accuracy_local_worst", ".2%"),
            ("consensus distance", f"{s['consensus_distance']:.2e}"),
            ("parameters CRC-32", s["parameters_crc32"])]
    return "\n".join(f"{label:<22}{value}" for label, value in rows)
