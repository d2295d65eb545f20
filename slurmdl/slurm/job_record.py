"""One job as the controller knows it, by squeue.

`scontrol show job` prints the job's name, comment and command, in which its owner can write any field of any job,
with line breaks. squeue prints the requested fields only, so none of them is text of a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.slurm import hostlist, process

#: two formats: excluded nodes are in --format only, what is in the second one in --Format only (Slurm 22.05)
_FORMAT = "%A|%i|%F|%K|%T|%P|%x|%n|%D|%N|%B|%r"
_LONG_FORMAT = "JobID:|,HetJobID:|,Requeue:|,BatchFlag:|,RestartCnt"
_NO_VALUE = ("", "N/A", "n/a", "(null)")


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
        partitions, excluded, required: partitions, ExcNodeList and ReqNodeList.
        min_nodes: nodes that it needs.
        nodes: its nodes in Slurm's order; () before its start.
        batch_host: node of its batch script; "" before its start, and if it has none.
    """

    job_id: str
    state: str
    reason: str
    requeue: bool
    batch: bool
    restarts: int
    partitions: tuple[str, ...]
    excluded: tuple[str, ...]
    required: tuple[str, ...]
    min_nodes: int
    nodes: tuple[str, ...]
    batch_host: str


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
    waits = [process.start_command(_squeue(job_id, option), timeout=timeout)
             for option in (f"--format={_FORMAT}", f"--Format={_LONG_FORMAT}")]
    text, long_text = [_job_lines(wait(), job_id) for wait in waits]
    return parse_job_records(text, long_text, job_id)


def query_states(job_id: str, timeout: float = process.QUERY_TIMEOUT_S) -> list[tuple[str, str]]:
    """State and reason of a job, of each task of an array; [] if Slurm does not know it (any more).

    Raises UnavailableError if the controller does not answer.
    """
    try:
        lines = _job_lines(process.run_command(_squeue(job_id, "--format=%T|%r"), timeout=timeout), job_id)
    except UsageError:
        return []
    return [(state, reason) for state, _, reason in (line.partition("|") for line in lines.splitlines())]


def _squeue(job_id: str, option: str) -> list[str]:
    return ["squeue", "--noheader", "--all", "--noconvert", "--states=all", f"--jobs={job_id}", option]


def _job_lines(result: process.CommandResult, job_id: str) -> str:
    if result.returncode and "Invalid job id" not in result.stderr:
        raise UnavailableError(f"squeue --jobs={job_id}: {result.first_error or 'no message'}")
    if result.returncode or not result.stdout.strip():
        raise UsageError(f"job {job_id}: unknown to Slurm; `squeue --me` lists your jobs")
    return result.stdout


def parse_job_records(text: str, long_text: str, job_id: str) -> list[JobRecord]:
    """Parse squeue's lines in both formats. UsageError as `query_job`, InputError if a field is missing."""
    try:
        more = {fields[0]: fields for fields in (_split(line) for line in long_text.splitlines())}
        rows = sorted((_split(line) for line in text.splitlines()), key=lambda row: int(row[0]))
        if "+" in job_id:  # squeue prints all components of the job
            rows = [row for row in rows if row[1] == job_id]
        pairs = [(row, more[row[0]]) for row in rows]
        if not pairs:
            raise InputError(f"squeue --jobs={job_id}: no job in the output")
        if not all(het_job for _, (_, het_job, *_) in pairs):
            task = _task_id(rows[0], job_id)
            if len(rows) > 1 or not task.rpartition("_")[2].isdigit():
                raise UsageError(f"job {job_id} is an array; name one of its tasks, e.g. {task}")
        return [_parse_record(row, long_row, job_id) for row, long_row in pairs]
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(f"squeue --jobs={job_id}: no valid line: {error}") from error


def _split(line: str) -> list[str]:
    return ["" if value.strip() in _NO_VALUE else value.strip() for value in line.split("|", _FORMAT.count("|"))]


def _task_id(row: list[str], job_id: str) -> str:
    """ARRAY_TASK of a task of an array, else the job's ID. Tasks that are all pending share one record."""
    if not row[3]:
        return row[0]
    return job_id if "_" in job_id else f"{row[2]}_{row[3]}"


def _parse_record(row: list[str], long_row: list[str], job_id: str) -> JobRecord:
    _, _, _, _, state, partitions, excluded, required, min_nodes, nodes, batch_host, reason = row
    _, _, requeue, batch_flag, restarts = long_row
    return JobRecord(
        _task_id(row, job_id), state, reason, requeue != "0", batch_flag != "0", int(restarts),
        tuple(filter(None, partitions.split(","))), _expand(excluded), _expand(required), int(min_nodes),
        _expand(nodes), batch_host if batch_flag != "0" else "")


def _expand(nodes: str) -> tuple[str, ...]:
    return tuple(hostlist.expand_hostlist(nodes)) if nodes else ()
