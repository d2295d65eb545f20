"""Jobs: the allocation in the environment (sbatch(1), salloc(1)), records, steps and shrinking by Slurm's commands.

`scontrol show job` prints the job's name, comment and command, in which its owner can write any field of any job,
with line breaks. squeue prints the requested fields only, so none of them is text of a user.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from slurmdl.errors import InputError, PlacementError, UnavailableError, UsageError
from slurmdl.slurm import hostlist, process
from slurmdl.text import pluralize, truncate

#: sbatch's message; with several clusters it names the cluster
_SUBMITTED_PATTERN = rb"Submitted batch job ([0-9]{1,10})(?: on cluster \S+)?"
_PARSABLE_PATTERN = rb"([0-9]{1,10})(?:;\S+)?"
_COUNT_PATTERN = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
#: checks for other steps, and seconds between checks
_STEP_CHECKS, _STEP_CHECK_INTERVAL_S = 3, 0.3
#: largest ID of a step of srun (slurm.h); larger or negative ones are special steps, such as the batch script
_MAX_NORMAL_STEP_ID = 0xfffffff0
#: two formats: excluded nodes are in --format only, what is in the second one in --Format only (Slurm 22.05)
_FORMAT = "%A|%i|%F|%K|%T|%P|%x|%n|%D|%N|%B|%r"
_LONG_FORMAT = "JobID:|,HetJobID:|,Requeue:|,BatchFlag:|,RestartCnt"
_NO_VALUE = ("", "N/A", "n/a", "(null)")
#: variables of a job that would change the step
_STEP_VARIABLES = ("SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST", "SLURM_LABELIO",
                   "SLURM_MULTI_PROG", "SLURM_STDOUTMODE", "SLURM_STDINMODE", "SLURM_STDERRMODE",
                   "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_MEM_PER_CPU",
                   "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU", "SLURM_OVERCOMMIT")


@dataclass(frozen=True)
class Allocation:
    """Nodes, CPUs and tasks of a job.

    Attributes:
        job_id: of an array task, its own.
        nodes: in Slurm's order, that of SLURM_JOB_NODELIST.
        cpus_per_node: CPUs of each node that belong to the job.
        tasks_per_node: SLURM_TASKS_PER_NODE; () if that does not cover the nodes.
    """

    job_id: int
    nodes: tuple[str, ...]
    cpus_per_node: tuple[int, ...]
    tasks_per_node: tuple[int, ...] = ()

    def restricted_to(self, nodes: Collection[str]) -> Allocation:
        """The allocation on a part of its nodes, without task counts."""
        kept = [(node, cpus) for node, cpus in zip(self.nodes, self.cpus_per_node, strict=True) if node in nodes]
        return Allocation(self.job_id, tuple(node for node, _ in kept), tuple(cpus for _, cpus in kept))


def fold_counts(counts: Iterable[int]) -> str:
    """(2, 2, 2, 1) -> `2(x3),1`, the inverse of `expand_counts`."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else f"{count}" for count, length in runs)


def expand_counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> (2, 2, 2, 1). InputError for another form, or for more counts than a hostlist has names."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT_PATTERN.fullmatch(part)
        if not match:
            raise InputError(f"{truncate(text, 60)!r}: invalid part {truncate(part, 60)!r}; expected COUNT or "
                             "COUNT(xREPEATS)")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > hostlist.MAX_NAMES:
            raise InputError(f"{truncate(text, 60)!r}: more than {hostlist.MAX_NAMES} counts")
        counts += [int(match[1])] * repeats
    return tuple(counts)


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a step of srun.

    SLURM_STEP_ID alone does not tell: batch scripts have it from Slurm 26.05 on, and so has the shell of salloc in an
    interactive step.
    """
    step_id = environ.get("SLURM_STEP_ID", "")
    return step_id.isdigit() and int(step_id) <= _MAX_NORMAL_STEP_ID


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation of the job in which this process runs.

    Raises UsageError if this process runs in no job, PlacementError if the environment does not hold the job's nodes
    and CPUs.
    """
    job_id, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job_id:
        raise UsageError("not inside a job (SLURM_JOB_ID is not set), where ranks are mapped")
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodelist or not cpus or not job_id.isdigit():
        raise PlacementError("SLURM_JOB_NODELIST, SLURM_JOB_CPUS_PER_NODE: missing; expected the nodes of the job")
    try:
        nodes, cpu_counts = tuple(hostlist.expand_hostlist(nodelist)), expand_counts(cpus)
        task_counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE") or "0")
    except InputError as error:
        raise PlacementError(str(error)) from error
    if len(cpu_counts) != len(nodes):
        raise PlacementError(f"SLURM_JOB_CPUS_PER_NODE={cpus} does not fit the job's {pluralize(len(nodes), 'node')}")
    return Allocation(int(job_id), nodes, cpu_counts, task_counts if len(task_counts) == len(nodes) else ())


def own_job_id(environ: Mapping[str, str]) -> str:
    """ID of the job of this process by which scontrol finds it, or "" outside of a job.

    One task of a job array has the array's ID as its SLURM_JOB_ID, by which Slurm's commands mean the whole array.
    A job that an array task submits inherits the task's SLURM_ARRAY_* variables.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id and environ.get("SLURM_ARRAY_JOB_ID") == job_id:
        return f"{job_id}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return job_id


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
    # without --local squeue first asks the controller for the clusters of a federation
    return ["squeue", "--local", "--noheader", "--all", "--noconvert", "--states=all", f"--jobs={job_id}", option]


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


def other_steps_run(job_id: str) -> bool:
    """Whether the job has a running step besides the batch step and the like; `job_id` as of own_job_id.

    A busy controller lists a step for a moment after its end, so a listed step is checked again.
    """
    for check in range(_STEP_CHECKS):
        time.sleep(_STEP_CHECK_INTERVAL_S if check else 0.0)
        steps = process.check_output(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]).split()
        if not any(step.rpartition(".")[2].isdigit() for step in steps):
            return False
    return True


def node_step_argv(nodes: Sequence[str], environ: Mapping[str, str], job_name: str,
                   options: Sequence[str] = ()) -> list[str]:
    """srun's command line for a program with one task on each of these nodes.

    In a job the step takes no CPU and no memory from other steps.

    The end of one task ends no other task. `job_name` is the name of the job if this starts one.
    """
    count = str(len(nodes))
    argv = ["srun", "--input=0", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered", f"--nodes={count}",
            f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={hostlist.fold_hostlist(nodes)}"]
    return [*argv, *(["--overlap", "--mem=0"] if "SLURM_JOB_ID" in environ else [f"--job-name={job_name}"]), *options]


def node_step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the step: without the variables of a job that would change it."""
    return {name: value for name, value in environ.items() if name not in _STEP_VARIABLES}


def shrink_job_error(job_id: str, nodes: Sequence[str]) -> str:
    """Release all other nodes of a job; return why that failed, or ""."""
    import tempfile

    # scontrol writes scripts into its working directory that set the variables of the resized job
    with tempfile.TemporaryDirectory(prefix="slurmdl-") as directory:
        try:
            result = process.run_command(["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}"],
                                         cwd=directory)
        except UnavailableError as error:
            return str(error)
    return result.first_error or f"exit status {result.returncode}" if result.returncode else ""


def parse_job_id(line: bytes, is_parsable: bool) -> str:
    """Return the job ID in a line of sbatch's stdout, or "" if the line has another source.

    With `is_parsable` sbatch prints the job ID alone (--parsable).
    """
    match = re.fullmatch(_PARSABLE_PATTERN if is_parsable else _SUBMITTED_PATTERN, line)
    return match[1].decode() if match else ""
