"""The nodes and CPUs that Slurm gave this job, as its environment tells them (sbatch(1), salloc(1))."""

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
    """What one job was given.

    Attributes
    ----------
    job : job id; of an array's task, its own.
    nodes : in Slurm's order, that of SLURM_JOB_NODELIST.
    cpus : CPUs of each node that belong to the job.
    tasks : the job's own tasks on each node (SLURM_TASKS_PER_NODE), () where that does not cover the nodes.
    """

    job_id: int
    nodes: tuple[str, ...]
    cpus_per_node: tuple[int, ...]
    tasks_per_node: tuple[int, ...] = ()

    def restricted_to(self, nodes: Collection[str]) -> Allocation:
        """The part of it on these nodes, whose tasks are not known."""
        kept = [(node, cpus) for node, cpus in zip(self.nodes, self.cpus_per_node, strict=True) if node in nodes]
        return Allocation(self.job_id, tuple(node for node, _ in kept), tuple(cpus for _, cpus in kept))


def fold_counts(counts: Iterable[int]) -> str:
    """(2, 2, 2, 1) -> `2(x3),1`, the inverse of `unfold`."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else f"{count}" for count, length in runs)


def expand_counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> (2, 2, 2, 1). InputError where it is not of this form."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT_PATTERN.fullmatch(part)
        if not match:
            raise InputError(f"{text!r}: {part!r} is not COUNT or COUNT(xREPEATS)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation of the job that this process runs in.

    Raises
    ------
    UsageError : there is no job around this process.
    PlacementError : there is one, but the environment does not tell its nodes and their CPUs.
    """
    job, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job:
        raise UsageError("srun: not inside a job (SLURM_JOB_ID is not set); call it from a job script or from salloc")
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodelist or not cpus or not job.isdigit():
        raise PlacementError("SLURM_JOB_NODELIST and SLURM_JOB_CPUS_PER_NODE do not tell the nodes of the job")
    try:
        nodes, counts = tuple(hostlist.expand_hostlist(nodelist)), expand_counts(cpus)
        tasks = expand_counts(environ.get("SLURM_TASKS_PER_NODE") or "0")
    except InputError as error:
        raise PlacementError(str(error)) from error
    if len(counts) != len(nodes):
        raise PlacementError(f"SLURM_JOB_CPUS_PER_NODE={cpus} does not fit the {len(nodes)} nodes of the job")
    return Allocation(int(job), nodes, counts, tasks if len(tasks) == len(nodes) else ())
