"""Whether a job starts at once on chosen nodes: predicted before its submission, and checked after it.

`sbatch --test-only` predicts what placement does not model, and names the nodes that Slurm would choose. An automatic
binding (node list or preferred zone) is reverted if the job does not start with it.

Observed with Slurm 22.05 and default SchedulerParameters: before sbatch gets its answer, the controller has tried the
new job against its nodes once. If they are free, the job's reason is None, and it starts at the next scheduling
pass, 0.4 to 2.2 s later (slurm.conf(5), batch_sched_delay: 3 s); no update of the job advances that pass. If the
nodes were taken meanwhile, the reason is Resources or ReqNodeNotAvail; Priority if other jobs go first. So one check
directly after the submission is enough: a job that is pending for a reason loses its binding.

A node list would wait for its nodes. A preference costs a pass of the backfill scheduler, 24 to 30 s; without it the
job starts after 1.8 s, like any other.

A job with reason None can still lose its nodes before that pass. So a shell that outlives this process clears the
field after the pass; the controller rejects that for a running job, so no further check is needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError, debug, warn
from slurmdl.slurm import hostlist, jobs, process

if TYPE_CHECKING:
    from slurmdl.launch.submission import SubmitCommand

#: start of a reason: sbatch does not accept the job
REJECTED = "Slurm rejects it"
#: a start within this time is now: offset of the clocks, and duration of the query
_NOW_TOLERANCE_S = 5.0
_START_PATTERN = re.compile(r"\bto start at (\S+) (?:a )?using \d+ processors on nodes (\S+)")
#: time limit of the check, and of the update
_TIMEOUT_S = 1.0
#: the next scheduling pass is over by then: batch_sched_delay and a tick of the controller's clock
_SCHEDULER_PASS_S = 4.0


@dataclass(frozen=True)
class PredictedStart:
    """Slurm's prediction for a job that is not submitted yet.

    Attributes:
        nodes: that Slurm would choose.
        wait_s: until the start.
        failure: why there is no prediction, or "".
    """

    nodes: tuple[str, ...] = ()
    wait_s: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        return self.failure or f"{hostlist.fold_hostlist(self.nodes)} in {self.wait_s:.0f} s"

    @property
    def is_now(self) -> bool:
        return not self.failure and self.wait_s <= _NOW_TOLERANCE_S

    def not_starting_reason(self, nodes: Sequence[str]) -> str:
        """Why the job does not start now on exactly these nodes, or ""."""
        if self.failure:
            return self.failure
        if set(self.nodes) != set(nodes):
            return f"Slurm would choose {hostlist.fold_hostlist(self.nodes)}"
        return "" if self.is_now else f"Slurm would start it there in {self.wait_s:.0f} s"


def predict_start(command: SubmitCommand) -> PredictedStart:
    """Query Slurm with `sbatch --test-only` about the job that a command submits."""
    program, *args = command.argv
    try:
        result = process.run_command([program, "--test-only", *args], env=command.env,
                                     stdin=(command.stdin or b"").decode(errors="replace"))
    except UnavailableError as error:
        return PredictedStart(failure=str(error))
    start = parse_test_only(result.stderr)
    if start is None:
        return PredictedStart(failure=f"{REJECTED}: {result.first_error or 'no message'}")
    start_time, nodes = start
    return PredictedStart(tuple(nodes), max(0.0, start_time - time.time()))


def parse_test_only(text: str) -> tuple[float, list[str]] | None:
    """The start (seconds since the epoch) and nodes in the stderr of `sbatch --test-only`; None if there is none."""
    match = _START_PATTERN.search(text)
    try:
        return (time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")),
                hostlist.expand_hostlist(match[2])) if match else None
    except (ValueError, OverflowError, InputError):
        return None


def revert_unless_started(job_id: str, field: str) -> None:
    """Clear a field of a submitted job unless the job starts at once.

    `field` is a key of `scontrol update`: ReqNodeList or Prefer.
    """
    update = ["scontrol", "update", f"JobId={job_id}", f"{field}="]
    try:
        states = jobs.query_states(job_id, timeout=_TIMEOUT_S)
        debug("job %s: state and reason %s", job_id, states)
        if ("PENDING", "None") in states:
            process.run_detached_after(update, _SCHEDULER_PASS_S)
        elif all(state == "PENDING" for state, _ in states):
            process.run_command(update, timeout=_TIMEOUT_S)
    except UnavailableError as error:
        process.run_detached_after(update, _SCHEDULER_PASS_S)
        warn(f"job {job_id} keeps its choice of nodes for {_SCHEDULER_PASS_S:g} s: {error}")
