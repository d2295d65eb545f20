"""What placement does not model, and Slurm's own word on whether a job starts now on the nodes that were chosen."""

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

#: seconds between the two clocks, and between the question and the answer, that still count as now
_NOW_TOLERANCE_S = 5.0
_START_PATTERN = re.compile(r"\bto start at (\S+) (?:a )?using \d+ processors on nodes (\S+)")


@dataclass(frozen=True)
class PredictedStart:
    """When and where Slurm would start a job.

    Attributes
    ----------
    at : seconds since the epoch.
    nodes : as `sbatch --test-only` lists them, expanded.
    """

    timestamp: float
    nodes: tuple[str, ...]


def unpredictable_start_reason(request: JobRequest, cluster: ClusterSnapshot, nodes: Sequence[str]) -> str:
    """Why only Slurm knows whether the job starts now on these nodes, which are free; "" where it is known."""
    if request.unmodelled_reason:
        return request.unmodelled_reason
    for known in cluster.reservations:
        if not known.active and known.name != request.reservation and not set(known.nodes).isdisjoint(nodes):
            return f"the reservation {known.name} will hold some of the nodes"
    return ""


def not_starting_reason(command: SubmitCommand, nodes: Sequence[str]) -> str:
    """Ask Slurm with `sbatch --test-only`: why the job does not start now on exactly these nodes, "" where it does.

    Parameters
    ----------
    command : submits the job, bound to these nodes.
    """
    program, *words = command.argv
    try:
        answer = process.run_command([program, "--test-only", *words], env=command.env,
                             stdin=(command.stdin or b"").decode(errors="replace"))
    except UnavailableError as error:
        return str(error)
    start = parse_test_only(answer.stderr)
    if start is None:
        return f"Slurm says: {answer.first_error or 'nothing'}"
    if set(start.nodes) != set(nodes):
        return f"Slurm would take {hostlist.fold_hostlist(start.nodes)}"
    wait = start.timestamp - time.time()
    return f"Slurm would start it there in {wait:.0f} s" if wait > _NOW_TOLERANCE_S else ""


def parse_test_only(text: str) -> PredictedStart | None:
    """Of what `sbatch --test-only` writes to stderr the start that it tells, None where it tells of none."""
    match = _START_PATTERN.search(text)
    try:
        return PredictedStart(time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")),
                     tuple(hostlist.expand_hostlist(match[2]))) if match else None
    except (ValueError, OverflowError, InputError):
        return None
