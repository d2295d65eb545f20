"""Jobs: allocation in the environment (sbatch(1), salloc(1)), job ID in sbatch's output, nodes, steps, shrinking."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from slurmdl.errors import InputError, PlacementError, UnavailableError, UsageError
from slurmdl.slurm import hostlist, job_record, process
from slurmdl.text import pluralize, truncate

#: sbatch's message; with several clusters it names the cluster
_SUBMITTED_PATTERN = rb"Submitted batch job ([0-9]{1,10})(?: on cluster \S+)?"
_PARSABLE_PATTERN = rb"([0-9]{1,10})(?:;\S+)?"
_COUNT_PATTERN = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
#: checks for other steps, and seconds between checks
_STEP_CHECKS, _STEP_CHECK_INTERVAL_S = 3, 0.3
#: largest ID of a step of srun (slurm.h); larger or negative ones are special steps, such as the batch script
_MAX_NORMAL_STEP_ID = 0xfffffff0


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


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a running job in Slurm's order, and the node of its batch script."""

    nodes: tuple[str, ...]
    batch_host: str

    def without(self, nodes: Collection[str]) -> JobNodes:
        """The job without some of its nodes."""
        return JobNodes(tuple(node for node in self.nodes if node not in nodes), self.batch_host)

    @classmethod
    def query(cls, job_id: str) -> JobNodes:
        """Query the controller. Raises as `query_job`, and InputError if the job has no nodes."""
        record = job_record.query_job(job_id)[0]
        if not record.nodes:
            raise InputError(f"squeue --jobs={job_id}: the job has no nodes")
        return cls(record.nodes, record.batch_host or record.nodes[0])


def other_steps_run(job_id: str) -> bool:
    """Whether the job has a running step besides the batch step and the like; `job_id` as of job_record.own_job_id.

    A busy controller lists a step for a moment after its end, so a listed step is checked again.
    """
    for check in range(_STEP_CHECKS):
        time.sleep(_STEP_CHECK_INTERVAL_S if check else 0.0)
        steps = process.check_output(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]).split()
        if not any(step.rpartition(".")[2].isdigit() for step in steps):
            return False
    return True


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
