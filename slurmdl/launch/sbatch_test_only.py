"""Predict whether a job starts now on chosen nodes; `sbatch --test-only` decides what placement does not model."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import hostlist, process

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.job_request import JobRequest
    from slurmdl.launch.submission import SubmitCommand

#: a start within this time is now: offset of the clocks, and duration of the query
_NOW_TOLERANCE_S = 5.0
_START_PATTERN = re.compile(r"\bto start at (\S+) (?:a )?using \d+ processors on nodes (\S+)")


@dataclass(frozen=True)
class PredictedStart:
    """Time (seconds since the epoch) and nodes of a job's start."""

    timestamp: float
    nodes: tuple[str, ...]


def unpredictable_start_reason(request: JobRequest, cluster: ClusterSnapshot, nodes: Sequence[str]) -> str:
    """Why only Slurm knows whether the job starts now on these free nodes, or ""."""
    if request.unmodelled_reason:
        return request.unmodelled_reason
    for reservation in cluster.reservations:
        if not (reservation.active or reservation.name == request.reservation
                or set(reservation.nodes).isdisjoint(nodes)):
            return f"the reservation {reservation.name} will hold some of the nodes"
    return ""


def not_starting_reason(command: SubmitCommand, nodes: Sequence[str]) -> str:
    """Query Slurm with `sbatch --test-only`: why the job does not start now on exactly these nodes, or "".

    Parameters
    ----------
    command : submits the job, bound to these nodes.
    """
    program, *args = command.argv
    try:
        result = process.run_command([program, "--test-only", *args], env=command.env,
                                     stdin=(command.stdin or b"").decode(errors="replace"))
    except UnavailableError as error:
        return str(error)
    start = parse_test_only(result.stderr)
    if start is None:
        return f"Slurm rejects it: {result.first_error or 'no message'}"
    if set(start.nodes) != set(nodes):
        return f"Slurm would choose {hostlist.fold_hostlist(start.nodes)}"
    wait_s = start.timestamp - time.time()
    return f"Slurm would start it there in {wait_s:.0f} s" if wait_s > _NOW_TOLERANCE_S else ""


def parse_test_only(text: str) -> PredictedStart | None:
    """Parse the stderr of `sbatch --test-only`; None if it predicts no start."""
    match = _START_PATTERN.search(text)
    try:
        return PredictedStart(time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")),
                              tuple(hostlist.expand_hostlist(match[2]))) if match else None
    except (ValueError, OverflowError, InputError):
        return None
