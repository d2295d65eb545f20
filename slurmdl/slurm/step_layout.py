"""The nodes of a step and the tasks on each that a plain `srun` with the same options would start.

Follows Slurm's own steps: srun settles the counts (_opt_verify and job_step_create_allocation in src/srun), the
controller picks the nodes (_pick_step_nodes in src/slurmctld/step_mgr.c) and deals the tasks to them
(_task_layout_block in src/common/slurm_step_layout.c). Where the outcome hangs on what is not known here (other
steps, the release of Slurm), or where Slurm would refuse, there is no layout: PlacementError says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError, PlacementError
from slurmdl.slurm import hostlist, srun_options
from slurmdl.slurm.allocation import Allocation
from slurmdl.slurm.getopt import CommandLine


@dataclass(frozen=True)
class StepRequest:
    """What a step asks for, by options and by their twins in the environment. None means: not given.

    Attributes
    ----------
    nodelist, exclude : node names.
    exact : the step takes only the CPUs of its tasks; others may run beside it.
    overlap : the step ignores what other steps use.
    bounding : name of an option that may bound the tasks of a node by something other than its CPUs, "" else.
    """

    ntasks: int | None = None
    nodes: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    relative: int | None = None
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    exact: bool = False
    overlap: bool = False
    task_limiting_option: str = ""


@dataclass(frozen=True)
class StepLayout:
    """Tasks per node of a step.

    Attributes
    ----------
    slots : (node, number of tasks), every node once, in Slurm's order, no node without a task.
    if_alone : it holds only while no other step of the job runs.
    """

    node_tasks: tuple[tuple[str, int], ...]
    only_if_alone: bool = False

    @property
    def ntasks(self) -> int:
        return sum(count for _, count in self.node_tasks)


def parse_step_request(line: CommandLine, environ: Mapping[str, str], cpus_per_task: int | None) -> StepRequest:
    """What the step asks for.

    Parameters
    ----------
    cpus_per_task : what srun takes from the environment where -c is not given; it differs between releases.

    Raises
    ------
    PlacementError : names the first option, variable or value that cannot be mapped.
    """
    understood = srun_options.LAYOUT_OPTIONS | srun_options.LAYOUT_INPUTS | srun_options.TASK_LIMITING | srun_options.LAYOUT_NEUTRAL
    for option in line.options:
        if option.name.startswith("dl-") or option.name in srun_options.WRAPPER_OPTIONS:
            continue
        if not option.is_known or not option.is_complete or option.name not in understood:
            raise PlacementError(f"{option.args[0].partition('=')[0]}: steps with it are not mapped")
    for variable in srun_options.UNSUPPORTED_ENV:
        if variable in environ:
            raise PlacementError(f"{variable} is set: steps with it are not mapped")
    if environ.get("SLURM_HET_SIZE", "1") != "1" or ":" in line.operands:
        raise PlacementError("heterogeneous jobs and steps are not mapped")
    bounding = next((f"--{o.name}" for o in line.options if o.name in srun_options.TASK_LIMITING), "") or \
        next((variable for variable in srun_options.TASK_LIMITING_ENV if variable in environ), "")
    return StepRequest(
        ntasks=_parse_fixed_count(line, environ, "ntasks", "SLURM_NTASKS", "SLURM_NPROCS"),
        nodes=_parse_fixed_count(line, environ, "nodes", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        ntasks_per_node=_parse_fixed_count(line, environ, "ntasks-per-node", "SLURM_NTASKS_PER_NODE")
        if not line.has_option("tasks-per-node") else _parse_fixed_count(line, environ, "tasks-per-node"),
        cpus_per_task=_parse_fixed_count(
    line, environ, "cpus-per-task") if line.has_option("cpus-per-task") else cpus_per_task,
        relative=_parse_fixed_count(line, environ, "relative", minimum=0),
        nodelist=_parse_node_names(line, "nodelist"), exclude=_parse_node_names(line, "exclude"),
        exact=line.has_option("exact") or line.has_option(
            "exclusive") or "SLURM_EXACT" in environ or "SLURM_EXCLUSIVE" in environ,
        overlap=line.has_option("overlap") or "SLURM_OVERLAP" in environ, task_limiting_option=bounding)


def _parse_fixed_count(line: CommandLine, environ: Mapping[str, str],
                       name: str, *variables: str, minimum: int = 1) -> int | None:
    given = line.last_value(name) if line.has_option(name) else next(
        (environ[v] for v in variables if v in environ), None)
    if given is None:
        return None
    low, _, high = given.partition("-")
    if not low.isdigit() or (high and high != low) or int(low) < minimum:
        raise PlacementError(f"--{name}={given}: only a fixed count is mapped")
    return int(low)


def _parse_node_names(line: CommandLine, name: str) -> tuple[str, ...]:
    text = line.last_value(name) or ""
    if "/" in text:
        raise PlacementError(f"--{name}={text}: a file of nodes is not mapped")
    try:
        return tuple(hostlist.expand_hostlist(text))
    except InputError as error:
        raise PlacementError(f"--{name}: {error}") from error


def compute_step_layout(allocation: Allocation, request: StepRequest) -> StepLayout:
    """The layout of the step; PlacementError where it is not certain, or where srun would refuse it."""
    total = len(allocation.nodes)
    count = total if request.nodes is None else request.nodes
    ntasks = request.ntasks
    if ntasks is None:
        if request.ntasks_per_node:
            ntasks = count * request.ntasks_per_node
        elif request.cpus_per_task and count < total:
            raise PlacementError("-c without -n on a part of the nodes is not mapped")
        elif request.cpus_per_task:
            # srun fills the allocation where only the CPUs of a task are given (_set_ntasks)
            ntasks = max(total, sum(cpus // request.cpus_per_task for cpus in allocation.cpus_per_node))
        else:
            ntasks = count
    count = min(count, ntasks)
    chosen, if_alone = _select_step_nodes(allocation, request, count)
    index = {node: i for i, node in enumerate(allocation.nodes)}
    cpus = [allocation.cpus_per_node[index[node]] for node in chosen]
    tasks = _distribute_tasks(cpus, request, ntasks)
    if request.task_limiting_option:
        _check_task_limit(allocation, request, chosen, cpus, tasks)
    # a step that shares its nodes finds only the CPUs that others leave; one task on each node, or all
    # CPUs taken, comes out the same in any case
    used = ntasks * (request.cpus_per_task or 1)
    shares = (request.exact or request.cpus_per_task is not None) and not request.overlap
    if shares and ntasks > len(chosen) and used < sum(cpus):
        if_alone = True
    return StepLayout(tuple(zip(chosen, tasks, strict=True)), if_alone)


def _select_step_nodes(allocation: Allocation, request: StepRequest, count: int) -> tuple[Sequence[str], bool]:
    """The nodes of the step, in Slurm's order, and whether that holds only while no other step runs."""
    nodes, total = allocation.nodes, len(allocation.nodes)
    foreign = set(request.nodelist) - set(nodes)
    if foreign:
        raise PlacementError(f"--nodelist: {min(foreign)} is not a node of the job")
    if request.relative is not None:
        end = request.relative + count
        if request.nodelist or request.exclude or end > total:
            raise PlacementError(f"--relative={request.relative} with {count} nodes: the job has {total}")
        if end < total and len(set(allocation.cpus_per_node)) > 1:
            raise PlacementError("--relative on a part of unequal nodes: Slurm chooses among them")
        return nodes[request.relative:end], end < total
    left = [node for node in nodes if node not in set(request.exclude)]
    if request.nodelist and count < total:
        left = [node for node in left if node in set(request.nodelist)]
    if set(request.nodelist) & set(request.exclude):
        raise PlacementError("--nodelist and --exclude name the same node")
    if count != len(left):
        raise PlacementError(f"the step takes {count} of {len(left)} nodes: Slurm chooses among them")
    return left, False


def _distribute_tasks(cpus: Sequence[int], request: StepRequest, ntasks: int) -> list[int]:
    per_task = request.cpus_per_task or 1
    room = [c // per_task for c in cpus]
    if min(room) == 0 or sum(room) < ntasks:
        raise PlacementError(f"{ntasks} tasks of {per_task} CPUs do not fit the nodes' {sum(cpus)} CPUs")
    tasks = block_distribution(room, ntasks)
    if request.ntasks_per_node:
        # whether a contradicted --ntasks-per-node still caps the nodes differs between releases
        capped = block_distribution([min(r, request.ntasks_per_node * per_task) for r in room], ntasks)
        if tasks != capped:
            raise PlacementError(f"--ntasks-per-node={request.ntasks_per_node} contradicts {ntasks} tasks "
                                 f"on {len(cpus)} nodes")
    return tasks


def _check_task_limit(allocation: Allocation, request: StepRequest, step_nodes: Sequence[str], cpus: Sequence[int],
                 tasks: Sequence[int]) -> None:
    """A bound that is the same on all nodes moves no task of an even layout; the job's own layout has it in it."""
    own = dict(zip(allocation.nodes, allocation.tasks_per_node, strict=False))
    if [own.get(node) for node in step_nodes] == list(tasks):
        return
    even = len(set(tasks)) == 1 and len(set(cpus)) == 1
    if not even or ("GPUS" in request.task_limiting_option.upper() and len(set(allocation.tasks_per_node)) > 1):
        raise PlacementError(
            f"{request.task_limiting_option} may bound the tasks of a node in a way that is not known here")


def block_distribution(max_tasks: Sequence[int], ntasks: int) -> list[int]:
    """Tasks per node: one to each node in turn while it has room, regardless of room when all are full.

    Slurm's default (block) distribution counts so, then numbers the tasks node by node.
    """
    tasks = [0] * len(max_tasks)
    dealt = turn = 0
    full = False
    while dealt < ntasks:
        more = False
        for i, r in enumerate(max_tasks):
            if dealt < ntasks and (turn < r or full):
                tasks[i] += 1
                dealt += 1
                more = more or turn + 1 < r
        full = full or not more
        turn += 1
    return tasks
