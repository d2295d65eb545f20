"""What a run measured: time, loss and drift of every step of every rank, bytes by level, and the summary of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.stateful import Stateful
from slurmdl.train.trace import Trace

#: what a rank's time is spent on. Communication is that of the training thread, in mixing models and in waiting for
#: what the communication thread has not ended in time; waiting is the part of it in which the first chunk of the
#: expected message was not there, since the other rank was not so far
PHASES = ("data", "forward", "backward", "communication", "waiting", "optimizer")


#: values from which a median is taken, and points of a curve
MAX_SAMPLES, MAX_POINTS = 512, 400

#: workers whose figures a table shows one by one, and the ratio of such figures from which on it shows them
MAX_LISTED_WORKERS, UNEVEN_RATIO = 16, 1.05


class Series(Stateful):
    """A figure of each step, of which only sums are held.

    Attributes
    ----------
    count, total, last : number, sum and last one of the values.
    """

    state_fields: tuple[str, ...] = ("count", "total", "last")

    def __init__(self) -> None:
        self.count = 0
        self.total = self.last = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.last = value


class SampledSeries(Series):
    """As Series, with the median: of all values up to SAMPLES, of more values that of SAMPLES drawn at random."""

    state_fields = ("_drawn",)

    def __init__(self) -> None:
        super().__init__()
        self._reservoir = np.zeros(MAX_SAMPLES)
        self._rng = random.Random(1)

    def add(self, value: float) -> None:
        # each value is among the drawn ones with the same probability (Vitter's algorithm R)
        place = self.count if self.count < MAX_SAMPLES else self._rng.randrange(self.count + 1)
        if place < MAX_SAMPLES:
            self._reservoir[place] = value
        super().add(value)

    @property
    def median(self) -> float:
        """0 without values."""
        return float(np.median(self._reservoir[:self.count])) if self.count else 0.0


class Curve(Series):
    """As Series, with at most POINTS points of its curve against steps and time.

    A point is the mean over a window of values. When there are POINTS of them, each two become one, and windows are
    twice as wide from then on.
    """

    state_fields = ("_points", "_used", "_width")

    def __init__(self) -> None:
        super().__init__()
        #: step, time and value: mean over the window; the last row in use is that of a window that is not full
        self._points = np.zeros((MAX_POINTS, 3))
        self._num_points, self._window = 0, 1

    def add_at(self, step: int, seconds: float, value: float) -> None:
        """Add the value of a step that ended after so many seconds."""
        filled = self.count % self._window
        if not filled and self._num_points == MAX_POINTS:
            self._points[:MAX_POINTS // 2] = self._points.reshape(-1, 2, 3).mean(axis=1)
            self._num_points, self._window = MAX_POINTS // 2, 2 * self._window
        if not filled:
            self._points[self._num_points] = 0.0
            self._num_points += 1
        point = self._points[self._num_points - 1]
        point += (np.array([step, seconds, value]) - point) / (filled + 1)
        self.add(value)

    @property
    def points(self) -> npt.NDArray[np.float64]:
        """Shape (points, 3): step, seconds and value."""
        return self._points[:self._num_points]


class StepMeter(Stateful):
    """Time of the steps of one rank, in seconds, in memory that does not grow with their number.

    Attributes
    ----------
    wall : the whole step.
    comm : communication and waiting that were not hidden behind computation; the rest of `wall` is computation.
    loss : of the rank's own batch, where the script tells it; empty on a server.
    drift : of the model since the last exchange, where the strategy looks at it.
    phases : the sum over all steps, one of PHASES each.
    hidden : for which errands of communication were carried out and the training thread did something else.
    between : from the end of a step to the beginning of the next, as for evaluation; without checkpoints.
    checkpoint : for checkpoints: agreeing on them, writing them, and waiting until all have done so.
    samples : of the rank's own batch; 0 where that is not known.
    """

    state_fields = ("wall", "comm", "loss", "drift", "phases", "hidden", "between", "checkpoint", "samples")

    def __init__(self) -> None:
        self.wall, self.exposed_comm, self.samples = SampledSeries(), Series(), Series()
        self.loss, self.drift = Curve(), Curve()
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.overlapped_comm = self.between_steps = self.checkpoint = 0.0

    def add_loss(self, loss: float) -> None:
        """Of the step that is under way or just over."""
        self.loss.add_at(max(self.wall.count, 1), self.wall.total, loss)

    def add_drift(self, drift: float) -> None:
        """Of the step that is under way."""
        self.drift.add_at(self.wall.count + 1, self.wall.total, drift)

    @property
    def totals(self) -> StepTotals:
        return StepTotals(self.wall.count, self.wall.total, self.wall.median, self.exposed_comm.total,
                      self.loss.last if self.loss.count else None, int(
                          self.samples.total), self.phases, self.overlapped_comm,
                      self.between_steps, self.checkpoint)

    @contextmanager
    def time_step(self, comm_thread: CommThread, now: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Time what stands in the `with` block as one step, of computation and communication alone."""
        before, start = comm_thread.blocked_seconds, now()
        yield
        self.wall.add(now() - start)
        self.exposed_comm.add(comm_thread.blocked_seconds - before)


class PhaseTimer:
    """Shares out the time of the training thread among the phases, into a Meter.

    Parameters
    ----------
    now : the rank's clock, in s.
    waited : how long it has waited so far for a peer's first chunk, in s, as far as the training thread stood still.
    """

    def __init__(self, meter: StepMeter, now: Callable[[], float], peer_wait_clock: Callable[[], float],
                 trace: Trace | None = None) -> None:
        self._meter, self._now, self._peer_wait_clock, self._trace = meter, now, peer_wait_clock, trace
        self._phase, self._phase_start = "", now()
        self._step_start, self._step_comm, self._peer_wait_at_start = 0.0, 0.0, 0.0
        self._is_first_step = True

    @property
    def is_between_steps(self) -> bool:
        """Whether no step is under way."""
        return not self._phase

    def enter(self, phase: str) -> None:
        """From now on it is this phase, one of PHASES, and a step is under way."""
        if phase == self._phase:
            return
        moment = self._now()
        if self._phase:
            self._add_phase_time(moment)
        else:
            if not self._is_first_step:
                self._meter.between_steps += moment - self._phase_start
            self._is_first_step = False
            self._step_start, self._step_comm = moment, 0.0
            self._peer_wait_at_start = self._peer_wait_clock()
        self._phase, self._phase_start = phase, moment

    def discard_empty_step(self) -> None:
        """If a step has only just begun it is none, since there were no more data."""
        if self._phase_start == self._step_start:
            moment = self._now()
            self._meter.between_steps += moment - self._phase_start
            self._phase, self._phase_start = "", moment

    def add_checkpoint(self, start: float) -> None:
        """From `start` until now, between two steps, a checkpoint was made."""
        moment = self._now()
        if not self._is_first_step:
            self._meter.between_steps += start - self._phase_start
        self._meter.checkpoint += moment - start
        self._phase_start = moment
        if self._trace:
            self._trace.add("checkpoint", start, moment)

    def end_step(self) -> None:
        """The step is over; the next one begins with the next phase."""
        moment, meter = self._now(), self._meter
        self._add_phase_time(moment)
        waited = min(self._peer_wait_clock() - self._peer_wait_at_start, self._step_comm)
        meter.phases["communication"] -= waited
        meter.phases["waiting"] += waited
        meter.wall.add(moment - self._step_start)
        meter.exposed_comm.add(self._step_comm)
        self._phase, self._phase_start = "", moment

    def _add_phase_time(self, moment: float) -> None:
        took = moment - self._phase_start
        self._meter.phases[self._phase] += took
        if self._phase == "communication":
            self._step_comm += took
        if self._trace:
            self._trace.add(self._phase, self._phase_start, moment)


@dataclass(frozen=True)
class StepTotals:
    """What a Meter comes to.

    Attributes
    ----------
    steps : how many.
    wall, median : their sum and their median, in s.
    comm : of all steps, in s.
    loss : the last one, None where none was told.
    samples : of all steps.
    phases, hidden, between, checkpoint : as a Meter has them.
    """

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
    """What one rank hands in at the end.

    Attributes
    ----------
    sent : level -> payload bytes sent by this rank.
    consensus : distance of this rank's model from the mean of all, relative to the mean's norm.
    score : (loss, accuracy) of the final model on the test images, from the rank that evaluated it, else None.
    before : the same of this rank's own model, before the final average.
    fired, skipped : exchanges made, and exchanges that a trigger held back.
    batch : samples per step; 0 on a server, and where it is not known.
    checksum : CRC-32 of the parameters; on a server of what it has of them.
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


def summarize(reports: Sequence[RankReport | None], roles: Sequence[str]) -> dict[str, Any]:
    """The figures of a run from the reports of all ranks, in rank order, None for those that are lost.

    Returns
    -------
    batch : samples per worker and step, 0 where it is not known.
    steps : number of steps, of the worker that made most.
    steps_per_worker, batch_per_worker, seconds_per_worker : of each worker, in rank order: steps, samples in a step
        in the mean, and the sum over the steps.
    samples_per_second : samples of all workers in all steps / `seconds`.
    seconds : the slowest worker's sum over the steps.
    seconds_per_step : the slowest worker's median over the steps.
    images_per_second : images of all workers in one step / seconds_per_step.
    compute_seconds, comm_seconds : of the whole run, mean over the workers.
    phases : phase -> seconds of the whole run, mean over the workers.
    hidden_seconds : of communication behind computation, mean over the workers.
    between_seconds : between the steps, mean over the workers.
    checkpoint_seconds : for checkpoints, between the steps, too; mean over the workers.
    bytes : level -> payload bytes sent, all ranks, all steps, the final average included.
    fired, skipped : exchanges of a worker, mean over the workers.
    train_loss : of the workers' batches in the last step, mean; None where no loss was told.
    loss, accuracy : of the final model on the test images; None where there are none.
    accuracy_before, accuracy_worst : of the workers' own models before the final average: mean, and worst.
    consensus : the farthest worker's distance from the mean model before the final average, relative to it.
    checksum : CRC-32 of the final parameters, in hexadecimal.
    """
    workers = [report for report, role in zip(reports, roles, strict=True) if report and role == "worker"]
    living = [report for report in reports if report]
    totals = [report.totals for report in workers]
    wall, comm, steps = ([getattr(its, name) for its in totals] for name in ("wall", "comm", "steps"))
    slowest = max(its.median for its in totals)
    loss, accuracy = next((report.score for report in living if report.score), (None, None))
    losses = [its.loss for its in totals if its.loss is not None]
    before = [report.score_before_averaging[1] for report in workers if report.score_before_averaging]
    batch = max(report.batch_size for report in workers)
    return {"batch": batch, "steps": max(steps), "seconds": max(wall), "steps_per_worker": steps,
            "seconds_per_worker": wall,
            "batch_per_worker": [its.samples / max(its.steps, 1) for its in totals],
            "samples_per_second": sum(its.samples for its in totals) / max(wall) if max(wall) else 0.0,
            "seconds_per_step": slowest,
            "images_per_second": len(workers) * batch / slowest if slowest else 0.0,
            "compute_seconds": float(np.mean(wall) - np.mean(comm)), "comm_seconds": float(np.mean(comm)),
            "phases": {phase: float(np.mean([its.phases[phase] for its in totals])) for phase in PHASES},
            "hidden_seconds": max(0.0, float(np.mean([its.overlapped_comm for its in totals]))),
            "between_seconds": float(np.mean([its.between_steps for its in totals])),
            "checkpoint_seconds": float(np.mean([its.checkpoint for its in totals])),
            "bytes": {level: sum(report.bytes_sent[level] for report in living) for level in LOCALITY_LEVELS},
            "fired": float(np.mean([report.exchanges for report in workers])),
            "skipped": float(np.mean([report.exchanges_skipped for report in workers])),
            "train_loss": float(np.mean(losses)) if losses else None, "loss": loss, "accuracy": accuracy,
            "accuracy_before": float(np.mean(before)) if before else None,
            "accuracy_worst": min(before) if before else None,
            "consensus": max(report.consensus_distance for report in workers), "checksum": f"{workers[0].parameters_crc32:08x}"}


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as text, one figure a line; figures that the run does not have are left out."""
    s = summary
    total = s["comm_seconds"] + s["compute_seconds"]
    roles = Counter(place["role"] for place in s["map"])
    model = f"{s['model']}, " if "model" in s else ""
    sent, full = sum(s["bytes"].values()), 4 * s["parameters"] * s["workers"] * s["steps"]
    timed = s["phases"] if any(s["phases"].values()) else {"compute": s["compute_seconds"],
                                                           "communication": s["comm_seconds"]}

    def shown(seconds: float) -> str:
        return f"{seconds:.2f} s ({seconds / total if total else 0:.0%})"

    def given(name: str, key: str, form: str) -> list[tuple[str, str]]:
        return [] if s[key] is None else [(name, format(s[key], form))]

    def each(name: str, key: str, form: str) -> list[tuple[str, str]]:
        """Of each worker, where they differ by more than what is left over at the end of an epoch."""
        if max(s[key]) <= UNEVEN_RATIO * min(s[key]):
            return []
        if len(s[key]) > MAX_LISTED_WORKERS:
            return [(name, f"{min(s[key]):{form}} to {max(s[key]):{form}}")]
        return [(name, ", ".join(format(value, form) for value in s[key]))]

    uneven = [*each("  of each worker", "steps_per_worker", "d"),
              *each("batch, each worker", "batch_per_worker", ".1f")]
    rows = [("strategy", f"{s['strategy']}, {s['traffic']}"),
            *given("spectral gap", "spectral_gap", ".3f"),
            ("ranks", f"{s['ranks']} ({', '.join(f'{count} {role}' for role, count in sorted(roles.items()))})"),
            ("nodes", f"{s['nodes']}"),
            ("zones", f"{s['zones'] or 'none known'}"),
            ("model", f"{model}{s['parameters']:,} parameters"),
            ("steps", f"{s['steps']}" + (f" of {s['batch']} images per worker" if s["batch"] else "")),
            *uneven,
            ("seconds/step", f"{s['seconds_per_step']:.4f}"),
            *([("images/s", f"{s['samples_per_second' if uneven else 'images_per_second']:,.0f}")] if s["batch"]
              else []),
            *((phase, shown(seconds)) for phase, seconds in timed.items()),
            *([("  hidden", f"{s['hidden_seconds']:.2f} s of communication went on behind computation")]
              if s["hidden_seconds"] >= 0.005 else []),
            ("between steps", f"{s['between_seconds']:.2f} s"),
            *([("checkpoints", f"{s['checkpoint_seconds']:.2f} s")] if s["checkpoint_seconds"] else []),
            *((f"bytes, {level}", f"{s['bytes'][level]:,}") for level in LOCALITY_LEVELS),
            *([("bytes, all", f"{sent:,}, {sent / full:.2%} of fp32 gossip at every step")] if full else []),
            *([("aggregation", "{:.0%} within nodes, {:.0%} within zones".format(*s["aggregation"]))]
              if s["aggregation"] else []),
            ("exchanges", f"{s['fired']:.0f} made, {s['skipped']:.0f} skipped"),
            *given("test loss", "loss", ".4f"),
            *given("accuracy", "accuracy", ".2%"),
            *given("  before the average", "accuracy_before", ".2%"),
            *given("  of the worst rank", "accuracy_worst", ".2%"),
            ("consensus", f"{s['consensus']:.2e}"),
            ("checksum", s["checksum"])]
    return "\n".join(f"{name:<22}{value}" for name, value in rows)
