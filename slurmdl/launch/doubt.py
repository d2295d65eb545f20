"""What placement does not model, and Slurm's own word on whether a job starts now on the nodes that were chosen."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl import process
from slurmdl.errors import InputError, UnavailableError
from slurmdl.topology import hostlist

if TYPE_CHECKING:
    from slurmdl.cluster.model import ClusterSnapshot
    from slurmdl.launch.submission import Command
    from slurmdl.request import JobRequest

#: seconds between the two clocks, and between the question and the answer, that still count as now
_NOW = 5.0
_ANSWER = re.compile(r"\bto start at (\S+) (?:a )?using \d+ processors on nodes (\S+)")


@dataclass(frozen=True)
class Start:
    """When and where Slurm would start a job.

    Attributes
    ----------
    at : seconds since the epoch.
    nodes : as `sbatch --test-only` lists them, expanded.
    """

    at: float
    nodes: tuple[str, ...]


def doubt(request: JobRequest, cluster: ClusterSnapshot, nodes: Sequence[str]) -> str:
    """Why only Slurm knows whether the job starts now on these nodes, which are free; "" where it is known."""
    if request.not_modelled:
        return request.not_modelled
    for known in cluster.reservations:
        if not known.active and known.name != request.reservation and not set(known.nodes).isdisjoint(nodes):
            return f"the reservation {known.name} will hold some of the nodes"
    return ""


def ask(command: Command, nodes: Sequence[str]) -> str:
    """Ask Slurm with `sbatch --test-only`: why the job does not start now on exactly these nodes, "" where it does.

    Parameters
    ----------
    command : submits the job, bound to these nodes.
    """
    program, *words = command.argv
    try:
        answer = process.ask([program, "--test-only", *words], env=command.env,
                             stdin=(command.stdin or b"").decode(errors="replace"))
    except UnavailableError as error:
        return str(error)
    start = parse(answer.err)
    if start is None:
        return f"Slurm says: {answer.first_error or 'nothing'}"
    if set(start.nodes) != set(nodes):
        return f"Slurm would take {hostlist.fold(start.nodes)}"
    wait = start.at - time.time()
    return f"Slurm would start it there in {wait:.0f} s" if wait > _NOW else ""


def parse(text: str) -> Start | None:
    """Of what `sbatch --test-only` writes to stderr the start that it tells, None where it tells of none."""
    match = _ANSWER.search(text)
    try:
        return Start(time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")),
                     tuple(hostlist.expand(match[2]))) if match else None
    except (ValueError, OverflowError, InputError):
        return None
