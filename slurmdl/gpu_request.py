"""GPU options of sbatch: the nodes and tasks that follow from them, and what each node must have.

Follows Slurm 22.05: sbatch and slurmctld derive counts and reject contradictions (gres_job_state_validate and
_test_gres_cnt in src/common/gres.c, after _opt_verify in src/sbatch/opt.c); select/cons_tres then chooses nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurmdl.errors import InputError, PlacementError
from slurmdl.text import pluralize

_TASK_TRES = re.compile(r"(?:(cpu)|gres[/:](gpu(?::[A-Za-z_][\w.+-]*)?))[=:]([0-9]{1,9})", re.IGNORECASE)
_GPU_COUNT = re.compile(r"(?:([A-Za-z_][\w.+-]*)(?:[:=]|$))?([0-9]{1,9})?")


@dataclass(frozen=True)
class GpuRequest:
    """What a job with GPU options needs of each of its nodes; 0 for a limit that was not given.

    Attributes:
        name: gpu or gpu:TYPE.
        per_node: GPUs that each node must have. The GPUs of --gpus are spread evenly: Slurm also takes nodes with
            fewer, next to nodes with more.
        per_task: GPUs of each task.
        memory_per_gpu_mb: replaces the memory per CPU or node, defaults included.
        unmodelled_reason: why Slurm may refuse a list of nodes that fit. It counts all free GPUs of a listed node
            towards the GPUs of the job, even those that the job does not take, and then compares the rest with what
            the next node needs (gres_sched_add, gres_select_filter_sock_core).
    """

    name: str = "gpu"
    per_node: int = 0
    per_task: int = 0
    cpus_per_gpu: int = 0
    memory_per_gpu_mb: int = 0
    unmodelled_reason: str = ""


@dataclass(frozen=True)
class TaskCounts:
    """Counts of a job as in JobRequest; None for a count that was not given."""

    nodes: tuple[int, int | None] | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None


def expand_tres_per_task(settings: Mapping[str, str]) -> Mapping[str, str]:
    """Replace --tres-per-task (Slurm 23.11) by the options of the same meaning, which it overrides.

    The setting stays if it has other resources than CPUs and one type of GPU.
    """
    matches = [_TASK_TRES.fullmatch(item) for item in settings.get("tres-per-task", "").split(",") if item]
    given = [("cpus-per-task", match[3]) if match[1] else
             ("gpus-per-task", f"{match[2].lower().removeprefix('gpu').lstrip(':')}:{match[3]}".lstrip(":"))
             for match in matches if match]
    if not given or len(given) < len(matches) or len(dict(given)) < len(given):
        return settings
    return {**{name: value for name, value in settings.items() if name != "tres-per-task"}, **dict(given)}


def parse_gpu_count(option: str, text: str) -> tuple[str, int]:
    """Parse `2`, `a100:2` or `a100` -> ("gpu" or "gpu:TYPE", count).

    Raises PlacementError for several types, InputError for other text.
    """
    if "," in text:
        raise PlacementError(f"--{option}={text}: several GPU types are not modelled")
    match = _GPU_COUNT.fullmatch(text)
    if not match or not text:
        raise InputError(f"--{option}={text} is not understood")
    return f"gpu:{match[1]}" if match[1] else "gpu", int(match[2] or 1)


def count_gpus(counts: TaskCounts, name: str, *, per_job: int, per_node: int, per_task: int, tasks_per_gpu: int,
               cpus_per_gpu: int, memory_per_gpu_mb: int) -> tuple[TaskCounts, GpuRequest]:
    """Derive the counts of a job from its GPU options, 0 for an option that was not given.

    Raises InputError if Slurm would reject the combination, PlacementError if it accepts it but its counts
    contradict each other or depend on the nodes that it chooses.
    """
    per_job, counts = _derive_counts(counts, per_job, per_node, per_task, tasks_per_gpu, cpus_per_gpu)
    nodes, tasks = counts.nodes and counts.nodes[0], counts.ntasks
    if per_job > 1 and not nodes and not per_task:
        raise PlacementError(f"the node count is not certain ({per_job} GPUs without -N or --gpus-per-node)")
    if tasks_per_gpu and tasks:
        if tasks % (nodes or 1):
            raise PlacementError(f"{pluralize(tasks, 'task')} of --ntasks-per-gpu={tasks_per_gpu} cannot be divided "
                                 f"by {nodes} nodes")
        counts = replace(counts, ntasks_per_node=tasks // (nodes or 1))
    if nodes and (tasks or 1) > nodes and not counts.ntasks_per_node and (
            memory_per_gpu_mb if per_task else per_job and cpus_per_gpu):
        options = "--gpus-per-task with --mem-per-gpu" if per_task else "--gpus with --cpus-per-gpu"
        raise PlacementError(f"{options}: the tasks per node are not certain without --ntasks-per-node")
    is_refusable = per_job and nodes != 1 and (per_node or (per_task and cpus_per_gpu))
    if nodes and not per_task:
        per_node = max(per_node, -(-per_job // nodes))
    return counts, GpuRequest(name, max(per_node, per_task), per_task, cpus_per_gpu, memory_per_gpu_mb,
                              "Slurm may refuse a node list with these GPU options" if is_refusable else "")


def _derive_counts(counts: TaskCounts, per_job: int, per_node: int, per_task: int, tasks_per_gpu: int,
                   cpus_per_gpu: int) -> tuple[int, TaskCounts]:
    """GPUs of the job, 0 if not limited, and the counts; the rules of gres_job_state_validate in its order."""
    low, high = counts.nodes or (0, 0)
    nodes = low if low == high else 0
    tasks, tasks_per_node = counts.ntasks or 0, counts.ntasks_per_node or 0
    given_tasks = tasks
    if tasks_per_gpu and (per_task or tasks_per_node):
        raise InputError("--ntasks-per-gpu excludes --gpus-per-task and --ntasks-per-node")
    if cpus_per_gpu and counts.cpus_per_task:
        raise InputError("--cpus-per-gpu excludes --cpus-per-task")
    if tasks_per_node and not tasks and (nodes or not low):
        tasks = given_tasks = (nodes or 1) * tasks_per_node
    if per_task and not tasks and counts.cpus_per_task is None:
        tasks = nodes
    if tasks_per_gpu:
        gpus = max(per_job, per_node * (low or 1)) or (tasks // tasks_per_gpu if tasks else nodes)
        if not gpus and not tasks:
            raise InputError("--ntasks-per-gpu needs a number of GPUs, tasks or nodes")
        if tasks and tasks != gpus * tasks_per_gpu:
            raise PlacementError(f"--ntasks={tasks} contradicts {pluralize(gpus, 'GPU')} with "
                                 f"--ntasks-per-gpu={tasks_per_gpu}")
        tasks = gpus * tasks_per_gpu
        per_job = per_job or (0 if per_node else gpus)
    if per_job and per_node:
        if per_job % per_node:
            raise InputError(f"--gpus={per_job} is not a multiple of --gpus-per-node={per_node}")
        if (low and per_job // per_node < low) or (high and per_job // per_node > high):
            raise InputError(f"--gpus={per_job} with --gpus-per-node={per_node} contradicts -N")
        nodes = per_job // per_node
    if per_task:
        if per_job and (per_job % per_task or tasks not in (0, per_job // per_task)):
            raise InputError(f"--gpus={per_job} with --gpus-per-task={per_task} contradicts the number of tasks")
        tasks = tasks or per_job // per_task
        if not tasks:
            raise InputError("--gpus-per-task needs the number of tasks, nodes or GPUs")
        per_job = tasks * per_task
        if per_node and (per_node % per_task or tasks_per_node not in (0, per_node // per_task)):
            raise InputError(f"--gpus-per-node={per_node} with --gpus-per-task={per_task} contradicts the tasks")
        tasks_per_node = tasks_per_node or per_node // per_task
        if max(per_node, tasks_per_node * per_task) > per_job:
            raise PlacementError(f"a node needs more GPUs than the {per_job} of {pluralize(tasks, 'task')}")
    if per_job and per_job < (nodes or low):
        raise InputError(f"{nodes or low} nodes for {pluralize(per_job, 'GPU')}")
    if tasks_per_node and not given_tasks:
        tasks = 0  # all nodes have this number
    cpus = cpus_per_gpu * per_task or counts.cpus_per_task
    return per_job, TaskCounts((nodes, nodes) if nodes else counts.nodes, tasks or None, tasks_per_node or None, cpus)
