"""The allocation of this job, from its environment (sbatch(1), salloc(1))."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.slurm import hostlist

_COUNT_PATTERN = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class Allocation:
    """Nodes, CPUs and tasks of a job.

    Attributes
    ----------
    job_id : of an array task, its own.
    nodes : in Slurm's order, that of SLURM_JOB_NODELIST.
    cpus_per_node : CPUs of each node that belong to the job.
    tasks_per_node : SLURM_TASKS_PER_NODE; () if that does not cover the nodes.
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
    """`2(x3),1` -> (2, 2, 2, 1). InputError for another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT_PATTERN.fullmatch(part)
        if not match:
            raise InputError(f"{text!r}: invalid part {part!r}; expected COUNT or COUNT(xREPEATS)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation of the job in which this process runs.

    Raises
    ------
    UsageError : this process runs in no job.
    PlacementError : the environment does not hold the job's nodes and CPUs.
    """
    job_id, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job_id:
        raise UsageError("srun: not inside a job (SLURM_JOB_ID is not set); call it from a job script or from salloc")
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodelist or not cpus or not job_id.isdigit():
        raise PlacementError("SLURM_JOB_NODELIST, SLURM_JOB_CPUS_PER_NODE: missing; expected the nodes of the job")
    try:
        nodes, cpu_counts = tuple(hostlist.expand_hostlist(nodelist)), expand_counts(cpus)
        task_counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE") or "0")
    except InputError as error:
        raise PlacementError(str(error)) from error
    if len(cpu_counts) != len(nodes):
        raise PlacementError(f"SLURM_JOB_CPUS_PER_NODE={cpus} does not fit the {len(nodes)} nodes of the job")
    return Allocation(int(job_id), nodes, cpu_counts, task_counts if len(task_counts) == len(nodes) else ())
