"""One job as the controller knows it: the output of `scontrol -o show job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.slurm import hostlist, process


@dataclass(frozen=True)
class JobRecord:
    """Fields of a job, or of one component of a heterogeneous job.

    Attributes:
        job_id: ID by which scontrol finds this job and no other, ARRAY_TASK for a task of an array.
        state: base state, e.g. RUNNING; COMPLETING while processes of a requeued job end.
        reason: why the job is in its state, e.g. TimeLimit, or "None".
        requeue: whether it may be requeued (sbatch --requeue).
        batch: whether it has a batch script; only such jobs can be requeued.
        restarts: how often it was requeued.
        user: name of its owner.
        partitions, excluded, required: partitions, ExcNodeList and ReqNodeList.
        min_nodes: nodes that it needs.
    """

    job_id: str
    state: str
    reason: str
    requeue: bool
    batch: bool
    restarts: int
    user: str
    partitions: tuple[str, ...]
    excluded: tuple[str, ...]
    required: tuple[str, ...]
    min_nodes: int


def own_job_id(environ: Mapping[str, str]) -> str:
    """ID of the job of this process by which scontrol finds it, or "" outside of a job.

    One task of a job array has the array's ID as its SLURM_JOB_ID, by which Slurm's commands mean the whole array.
    A job that an array task submits inherits the task's SLURM_ARRAY_* variables.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id and environ.get("SLURM_ARRAY_JOB_ID") == job_id:
        return f"{job_id}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return job_id


def query_job(job_id: str, timeout: float = process.QUERY_TIMEOUT_S) -> list[JobRecord]:
    """Query one job; a heterogeneous job has a record for each component, the leader first.

    Raises UsageError if there is no such job, or it is an array and no task is named; UnavailableError if the
    controller does not answer.
    """
    result = process.run_command(["scontrol", "-o", "show", "job", job_id], timeout=timeout)
    if result.returncode:
        if "Invalid job id" in result.stderr:
            raise UsageError(f"job {job_id}: unknown to Slurm; `squeue --me` lists your jobs")
        raise UnavailableError(f"scontrol show job {job_id}: {result.first_error or 'no message'}")
    return parse_job_records(result.stdout, job_id)


def parse_job_records(text: str, job_id: str) -> list[JobRecord]:
    """Parse the output of `scontrol -o show job`. UsageError as `query_job`, InputError if a field is missing."""
    lines = [line for line in text.splitlines() if line.startswith("JobId=")]
    fields_of_jobs = [_parse_fields(line.split()) for line in lines]
    if not lines:
        raise InputError(f"scontrol show job {job_id}: no job in the output")
    if not all("HetJobId" in fields for fields in fields_of_jobs):
        tasks = [_task_id(fields, job_id) for fields in fields_of_jobs]
        if len(lines) > 1 or not tasks[0].rpartition("_")[2].isdigit():
            raise UsageError(f"job {job_id} is an array; name one of its tasks, e.g. {tasks[0]}")
    return [_parse_record(fields, job_id) for fields in fields_of_jobs]


def _task_id(fields: Mapping[str, str], job_id: str) -> str:
    """ARRAY_TASK of a task of an array, else the job's ID. Tasks that are all pending share one record."""
    if "ArrayJobId" not in fields:
        return fields.get("JobId", job_id)
    return job_id if "_" in job_id else f"{fields['ArrayJobId']}_{fields.get('ArrayTaskId', '?')}"


def _parse_fields(words: Sequence[str]) -> dict[str, str]:
    """Field -> value; of a field that a job's name or command repeats, the first one is Slurm's."""
    fields: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if separator:
            fields.setdefault(name, "" if value in ("(null)", "N/A") else value)
    return fields


def _parse_record(fields: dict[str, str], job_id: str) -> JobRecord:
    try:
        excluded, required = (tuple(hostlist.expand_hostlist(fields[name])) if fields[name] else ()
                              for name in ("ExcNodeList", "ReqNodeList"))
        return JobRecord(
            _task_id(fields, job_id), fields["JobState"], fields["Reason"], fields["Requeue"] != "0",
            fields["BatchFlag"] != "0", int(fields["Restarts"]), fields["UserId"].partition("(")[0],
            tuple(filter(None, fields["Partition"].split(","))), excluded, required,
            int(fields["NumNodes"].partition("-")[0]))
    except (KeyError, ValueError) as error:
        raise InputError(f"scontrol show job {job_id}: no valid field {error}") from error
