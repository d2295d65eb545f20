"""Revert an automatic binding (node list or preferred zone) if the job does not start with it at once.

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

from slurmdl.errors import UnavailableError, warn
from slurmdl.slurm import process

#: time limit of the check, and of the update
_TIMEOUT_S = 1.0
#: the next scheduling pass is over by then: batch_sched_delay and a tick of the controller's clock
_SCHEDULER_PASS_S = 4.0


def revert_unless_started(job_id: str, field: str) -> None:
    """Clear a field of a submitted job unless the job starts at once.

    Parameters
    ----------
    field : key of `scontrol update`: ReqNodeList or Prefer.
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
