"""What a run measured: time and loss of every step of every rank, bytes by level, and the summary of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurmdl.train.courier import Courier
from slurmdl.train.messages import LEVELS


@dataclass
class Meter:
    """Time of the steps of one rank, in seconds; entry i of each list belongs to step i.

    Attributes
    ----------
    wall : the whole step.
    comm : waiting for messages that were not hidden behind computation; the rest of `wall` is computation.
    loss : of the rank's own batch; empty on a server.
    """

    wall: list[float] = field(default_factory=list)
    comm: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    @contextmanager
    def step(self, courier: Courier) -> Iterator[None]:
        """Time what stands in the `with` block as one step."""
        before, start = courier.seconds, time.perf_counter()
        yield
        self.wall.append(time.perf_counter() - start)
        self.comm.append(courier.seconds - before)


@dataclass(frozen=True)
class Report:
    """What one rank hands in at the end.

    Attributes
    ----------
    sent : level -> payload bytes sent by this rank.
    consensus : distance of this rank's model from the mean of all, relative to the mean's norm.
    score : (loss, accuracy) of the final model on the test images, from the rank that evaluated it, else None.
    """

    meter: Meter
    sent: dict[str, int]
    consensus: float = 0.0
    score: tuple[float, float] | None = None


def summarise(reports: Sequence[Report], roles: Sequence[str], batch: int) -> dict[str, Any]:
    """The figures of a run from the reports of all ranks, in rank order.

    Returns
    -------
    steps : number of steps.
    seconds : the slowest rank's sum over the steps.
    seconds_per_step : the slowest rank's median over the steps.
    images_per_second : images of all workers in one step / seconds_per_step.
    compute_seconds, comm_seconds : of the whole run, mean over the workers.
    bytes : level -> payload bytes sent, all ranks, all steps, the final average included.
    train_loss : of the workers' batches in the last step, mean.
    loss, accuracy : of the final model on the test images.
    consensus : the farthest worker's distance from the mean model before the final average, relative to it.
    """
    workers = [report for report, role in zip(reports, roles, strict=True) if role == "worker"]
    wall = np.array([report.meter.wall for report in reports])
    comm = np.array([report.meter.comm for report in workers])
    seconds_per_step = float(np.median(wall, axis=1).max())
    loss, accuracy = next(report.score for report in reports if report.score)
    return {"steps": wall.shape[1], "seconds": float(wall.sum(1).max()), "seconds_per_step": seconds_per_step,
            "images_per_second": len(workers) * batch / seconds_per_step,
            "compute_seconds": float(np.mean([sum(report.meter.wall) for report in workers]) - comm.sum(1).mean()),
            "comm_seconds": float(comm.sum(1).mean()),
            "bytes": {level: sum(report.sent[level] for report in reports) for level in LEVELS},
            "train_loss": float(np.mean([report.meter.loss[-1] for report in workers])),
            "loss": loss, "accuracy": accuracy, "consensus": max(report.consensus for report in workers)}


def table(summary: dict[str, Any]) -> str:
    """The summary as text, one figure a line."""
    s = summary
    share = s["comm_seconds"] / (s["comm_seconds"] + s["compute_seconds"])
    roles = Counter(place["role"] for place in s["map"])
    rows = [("strategy", f"{s['strategy']}, {s['traffic']}"),
            *([] if s["spectral_gap"] is None else [("spectral gap", f"{s['spectral_gap']:.3f}")]),
            ("ranks", f"{s['ranks']} ({', '.join(f'{count} {role}' for role, count in sorted(roles.items()))})"),
            ("nodes", f"{s['nodes']}"),
            ("zones", f"{s['zones'] or 'none known'}"),
            ("model", f"{s['model']}, {s['parameters']:,} parameters"),
            ("steps", f"{s['steps']} of {s['batch']} images per worker"),
            ("seconds/step", f"{s['seconds_per_step']:.4f}"),
            ("images/s", f"{s['images_per_second']:,.0f}"),
            ("compute", f"{s['compute_seconds']:.2f} s"),
            ("communication", f"{s['comm_seconds']:.2f} s ({share:.0%} of the time)"),
            *((f"bytes, {level}", f"{s['bytes'][level]:,}") for level in LEVELS),
            ("test loss", f"{s['loss']:.4f}"),
            ("accuracy", f"{s['accuracy']:.2%}"),
            ("consensus", f"{s['consensus']:.2e}")]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)
