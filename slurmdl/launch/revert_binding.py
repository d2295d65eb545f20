"""What `auto` added to a job, a node list or a preferred zone, is taken back where the job does not start with it.

What the controller does, tried on Slurm 22.05 with its default SchedulerParameters: before sbatch gets its answer
the new job has been tried against its nodes once. Where they are free its reason is None, and it starts at the
scheduler's next pass, here 0.4 to 2.2 s later (slurm.conf(5), batch_sched_delay: 3 s); no update of the job brings
that pass forward. Where they were taken meanwhile it is Resources or ReqNodeNotAvail, where other jobs go first
Priority. So the one look comes at once, and costs no patience: what is pending for a reason is let go.

A node list would wait for its nodes; a preference costs a pass of the backfill scheduler, here 24 to 30 s, and
none once it is taken back (1.8 s, as without one).

With None one gap is left: nodes that are lost before that pass. For it a shell that outlives this process takes the
choice back after the pass; the controller refuses that for a job that runs, so it needs no further look.
"""

from __future__ import annotations

import re

from slurmdl.errors import UnavailableError, warn
from slurmdl.slurm import process

#: sbatch's own words; a cluster is named where there are several
_SUBMITTED_PATTERN = rb"Submitted batch job ([0-9]{1,10})(?: on cluster \S+)?"
_PARSABLE_PATTERN = rb"([0-9]{1,10})(?:;\S+)?"
#: seconds that the look, and taking the list back, may take
_TIMEOUT_S = 1.0
#: seconds after which the scheduler has passed: batch_sched_delay and a tick of the controller's clock
_SCHEDULER_PASS_S = 4.0


def parse_job_id(line: bytes, is_parsable: bool) -> str:
    """The number of the job that sbatch names on a line of its stdout, "" where the line is another program's.

    Parameters
    ----------
    parsable : sbatch was told to print the number alone (--parsable).
    """
    match = re.fullmatch(_PARSABLE_PATTERN if is_parsable else _SUBMITTED_PATTERN, line)
    return match[1].decode() if match else ""


def revert_unless_started(job_id: str, field: str) -> None:
    """Look after a job that was submitted.

    Parameters
    ----------
    what : key of `scontrol update` that takes the choice back when it is empty: ReqNodeList or Prefer.
    """
    update = ["scontrol", "update", f"JobId={job_id}", f"{field}="]
    try:
        record = process.run_command(["scontrol", "-o", "show", "job", job_id], timeout=_TIMEOUT_S).stdout
        if re.search(r"\bJobState=PENDING Reason=None\b", record):
            process.run_detached_after(update, _SCHEDULER_PASS_S)
        elif not re.search(r"\bJobState=(?!PENDING)", record):
            process.run_command(update, timeout=_TIMEOUT_S)
    except UnavailableError as error:
        process.run_detached_after(update, _SCHEDULER_PASS_S)
        warn(f"job {job_id} keeps its choice of nodes for {_SCHEDULER_PASS_S:g} s: {error}")
