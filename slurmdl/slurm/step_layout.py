"""Options of srun (srun(1), Slurm 22.05 to 26.05), and the layout of a step: its nodes and the tasks on each.

The layout is that of a plain `srun` with the same options. Follows Slurm: srun determines the counts (_opt_verify and
job_step_create_allocation in src/srun), the controller selects the nodes (_pick_step_nodes in
src/slurmctld/step_mgr.c) and distributes the tasks (_task_layout_block in src/common/slurm_step_layout.c). If the
result depends on unknown facts (other steps, Slurm's release), or Slurm would reject the step, PlacementError says
why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError, PlacementError
from slurmdl.slurm import hostlist
from slurmdl.slurm.getopt import SBATCH_LONG_OPTIONS, SBATCH_SHORT_OPTIONS, CommandLine, HasArg
from slurmdl.slurm.jobs import Allocation
from slurmdl.text import pluralize

_SHORT_NOT_IN_SBATCH = {
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "X": "disable-status",
    "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}
#: letter -> long name
SHORT_OPTIONS = {letter: name for letter, name in SBATCH_SHORT_OPTIONS.items() if letter != "a"} \
    | _SHORT_NOT_IN_SBATCH

_ONLY_IN_SBATCH = """array batch export-file external get-user-env ignore-pbs kill-on-invalid-dep no-requeue requeue
    runtime wait-all-nodes wrap"""
_NO_ARG = """async debugger-test disable-status exact interactive label multi-prog no-allocate preserve-env
    quit-on-interrupt unbuffered wait-for-children whole"""
_OPTIONAL_ARG = "bcast compress external-launcher immediate kill-on-bad-exit overlap pty send-libs x11"
_REQUIRED_ARG = """accel-bind bcast-exclude container-type cpu-bind cpu_bind epilog het-group ignore-signals jobid mpi
    msg-timeout pack-group prolog relative slurmd-debug task-epilog task-prolog threads treewidth wait"""

#: long name -> whether it takes a value
LONG_OPTIONS: dict[str, HasArg] = {
    **{name: has_arg for name, has_arg in SBATCH_LONG_OPTIONS.items() if name not in _ONLY_IN_SBATCH.split()},
    **dict.fromkeys(_NO_ARG.split(), "no"), **dict.fromkeys(_OPTIONAL_ARG.split(), "optional"),
    **dict.fromkeys(_REQUIRED_ARG.split(), "required")}

#: with these options srun starts no step
PASSTHROUGH = frozenset({"help", "usage", "version", "test-only", "autocomplete"})

#: decide the layout; the host file replaces them
LAYOUT_OPTIONS = frozenset({"ntasks", "nodes", "ntasks-per-node", "tasks-per-node", "relative", "nodelist",
                            "exclude", "distribution"})

#: values of --distribution by which a step has the layout that it has without the option
DEFAULT_DISTRIBUTIONS = frozenset({"block", "block:*", "block:cyclic", "block,nopack", "block:cyclic,nopack"})

#: read for the layout and passed to srun
LAYOUT_INPUTS = frozenset({"cpus-per-task", "exact", "exclusive", "overlap", "multi-prog", "mpi", "job-name",
                           "chdir"})

#: may limit the tasks of a node by something other than CPUs; passed to srun
TASK_LIMITING = frozenset({"gpus", "gpus-per-task", "gpus-per-node", "gpus-per-socket", "cpus-per-gpu", "gres",
                           "hint", "mem-per-cpu", "mem-per-gpu", "ntasks-per-core", "ntasks-per-socket",
                           "threads-per-core"})

#: change neither the nodes of a step nor the tasks per node; srun ignores those of jobs
_LAYOUT_NEUTRAL = """accel-bind account acctg-freq bb begin comment compress contiguous cpu-bind cpu_bind cpu-freq
    deadline debugger-test delay-boot dependency disable-status epilog error export extra gpu-bind gpu-freq gres-flags
    hold ignore-signals immediate input kill-on-bad-exit label licenses mail-type mail-user mcs-label mem mem-bind
    mem-update mincpus msg-timeout network nice no-kill oom-kill-step open-mode output oversubscribe partition power
    prefer priority profile prolog propagate pty qos quiet quit-on-interrupt reboot reservation resv-ports send-libs
    signal slurmd-debug switches task-epilog task-prolog threads time time-min tmp tres-bind treewidth unbuffered
    verbose wait wait-for-children wckey whole"""
LAYOUT_NEUTRAL = frozenset(_LAYOUT_NEUTRAL.split())

#: change the layout in ways that are not modeled
LAYOUT_CHANGING = frozenset({"constraint", "overcommit", "extra-node-info", "sockets-per-node", "cores-per-socket",
                             "ntasks-per-gpu", "ntasks-per-tres", "tres-per-task", "core-spec", "thread-spec",
                             "spread-job", "use-min-nodes", "segment", "spread-segments", "consolidate-segments",
                             "resources"})

#: options of steps that can be mapped
MAPPED = LAYOUT_OPTIONS | LAYOUT_INPUTS | TASK_LIMITING | LAYOUT_NEUTRAL

#: options of unmapped steps whose tasks still can be the ranks, rank 0 on the first node
ORDERED_BY_SRUN = (MAPPED | LAYOUT_CHANGING) - {"pty", "multi-prog"}

#: environment variables of options that cannot be mapped
UNSUPPORTED_ENV = ("SLURM_HOSTFILE", "SLURM_OVERCOMMIT", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES",
                   "SLURM_SPREAD_JOB", "SLURM_USE_MIN_NODES", "SLURM_CONSTRAINT", "SLURM_BCAST")

#: environment variables of steps whose tasks are not (see ORDERED_BY_SRUN)
NOT_ORDERED_BY_SRUN_ENV = ("SLURM_HOSTFILE", "SLURM_BCAST", "SLURM_CONTAINER", "SRUN_CONTAINER", "SLURM_HET_SIZE")

#: environment variables of TASK_LIMITING
TASK_LIMITING_ENV = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET",
                     "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_STEP_GRES", "SLURM_HINT",
                     "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_THREADS_PER_CORE")


@dataclass(frozen=True)
class StepRequest:
    """The request of a step, from options and their environment variables. None means: not given.

    Attributes:
        nodelist, exclude: node names.
        exact: the step takes only the CPUs of its tasks; other steps may share its nodes.
        overlap: the step ignores the use by other steps.
        task_limiting_option: an option that may limit the tasks of a node by something other than CPUs, or "".
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

    Attributes:
        node_tasks: (node, number of tasks), in Slurm's order; every node has a task.
        only_if_alone: valid only while no other step of the job runs.
    """

    node_tasks: tuple[tuple[str, int], ...]
    only_if_alone: bool = False

    @property
    def ntasks(self) -> int:
        return sum(count for _, count in self.node_tasks)


def parse_step_request(line: CommandLine, environ: Mapping[str, str], cpus_per_task: int | None) -> StepRequest:
    """Parse the request of a step.

    Raises PlacementError, which names the first option, variable or value that cannot be mapped. `cpus_per_task` is
    the value that srun reads from the environment if -c is not given (SlurmConfig.srun_cpus_per_task).
    """
    for option in line.options:
        # the options of other plugins do not change the layout
        is_understood = option.name in MAPPED or option.name not in LONG_OPTIONS
        if not option.is_known or not option.is_complete or not is_understood:
            raise PlacementError(f"{option.args[0].partition('=')[0]}: prevents rank mapping")
    for variable in UNSUPPORTED_ENV:
        if variable in environ:
            raise PlacementError(f"{variable}: prevents rank mapping")
    distribution = line.last_value("distribution") or environ.get("SLURM_DISTRIBUTION", "block")
    if distribution.lower() not in DEFAULT_DISTRIBUTIONS:
        raise PlacementError(f"--distribution={distribution}: only block, Slurm's default, is mapped")
    if environ.get("SLURM_HET_SIZE", "1") != "1" or ":" in line.operands:
        raise PlacementError("heterogeneous jobs and steps have no rank map")
    limiting = [f"--{o.name}" for o in line.options if o.name in TASK_LIMITING]
    limiting += [variable for variable in TASK_LIMITING_ENV if variable in environ]
    per_node = ("tasks-per-node",) if line.has_option("tasks-per-node") else \
        ("ntasks-per-node", "SLURM_NTASKS_PER_NODE")
    if line.has_option("cpus-per-task"):
        cpus_per_task = _parse_fixed_count(line, environ, "cpus-per-task")
    return StepRequest(
        ntasks=_parse_fixed_count(line, environ, "ntasks", "SLURM_NTASKS", "SLURM_NPROCS"),
        nodes=_parse_fixed_count(line, environ, "nodes", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        ntasks_per_node=_parse_fixed_count(line, environ, *per_node),
        cpus_per_task=cpus_per_task,
        relative=_parse_fixed_count(line, environ, "relative", minimum=0),
        nodelist=_parse_node_names(line, "nodelist"), exclude=_parse_node_names(line, "exclude"),
        exact=any(map(line.has_option, ("exact", "exclusive"))) or not environ.keys().isdisjoint(
            ("SLURM_EXACT", "SLURM_EXCLUSIVE")),
        overlap=line.has_option("overlap") or "SLURM_OVERLAP" in environ,
        task_limiting_option=next(iter(limiting), ""))


def _parse_fixed_count(line: CommandLine, environ: Mapping[str, str], name: str, *variables: str,
                       minimum: int = 1) -> int | None:
    text = line.last_value(name) if line.has_option(name) else \
        next((environ[variable] for variable in variables if variable in environ), None)
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not low.isdigit() or (high and high != low) or int(low) < minimum:
        raise PlacementError(f"--{name}={text}: only a fixed count is mapped")
    return int(low)


def _parse_node_names(line: CommandLine, name: str) -> tuple[str, ...]:
    text = line.last_value(name) or ""
    if "/" in text:
        raise PlacementError(f"--{name}={text}: a file of nodes prevents rank mapping")
    try:
        return tuple(hostlist.expand_hostlist(text))
    except InputError as error:
        raise PlacementError(f"--{name}: {error}") from error


def compute_step_layout(allocation: Allocation, request: StepRequest) -> StepLayout:
    """Compute the layout of a step; PlacementError if it is uncertain or srun would reject the step."""
    total_nodes = len(allocation.nodes)
    node_count = total_nodes if request.nodes is None else request.nodes
    ntasks = request.ntasks
    if ntasks is None:
        if request.ntasks_per_node:
            ntasks = node_count * request.ntasks_per_node
        elif request.cpus_per_task and node_count < total_nodes:
            raise PlacementError("-c: on a part of the nodes it prevents rank mapping; expected also -n")
        elif request.cpus_per_task:
            # with only CPUs per task given, srun fills the allocation (_set_ntasks)
            ntasks = max(total_nodes, sum(cpus // request.cpus_per_task for cpus in allocation.cpus_per_node))
        else:
            ntasks = node_count
    nodes, only_if_alone = _select_step_nodes(allocation, request, min(node_count, ntasks))
    cpus_of = dict(zip(allocation.nodes, allocation.cpus_per_node, strict=True))
    cpus = [cpus_of[node] for node in nodes]
    tasks = _distribute_tasks(cpus, request, ntasks)
    if request.task_limiting_option:
        _check_task_limit(allocation, request, nodes, cpus, tasks)
    # A step that shares its nodes gets only the CPUs that other steps leave. With one task per node, or with all
    # CPUs in use, the layout is the same in any case.
    shares_nodes = (request.exact or request.cpus_per_task is not None) and not request.overlap
    if shares_nodes and ntasks > len(nodes) and ntasks * (request.cpus_per_task or 1) < sum(cpus):
        only_if_alone = True
    return StepLayout(tuple(zip(nodes, tasks, strict=True)), only_if_alone)


def _select_step_nodes(allocation: Allocation, request: StepRequest, count: int) -> tuple[Sequence[str], bool]:
    """The nodes of the step in Slurm's order, and whether they are certain only while no other step runs."""
    nodes, total = allocation.nodes, len(allocation.nodes)
    foreign = set(request.nodelist) - set(nodes)
    if foreign:
        raise PlacementError(f"--nodelist: {min(foreign)} is not a node of the job")
    if request.relative is not None:
        end = request.relative + count
        if request.nodelist or request.exclude or end > total:
            raise PlacementError(f"--relative={request.relative} with {pluralize(count, 'node')}: the job has "
                                 f"{total}")
        if end < total and len(set(allocation.cpus_per_node)) > 1:
            raise PlacementError("--relative on a part of unequal nodes: Slurm chooses among them")
        return nodes[request.relative:end], end < total
    candidates = [node for node in nodes if node not in set(request.exclude)]
    if request.nodelist and count < total:
        candidates = [node for node in candidates if node in set(request.nodelist)]
    if set(request.nodelist) & set(request.exclude):
        raise PlacementError("--nodelist and --exclude name the same node")
    if count != len(candidates):
        raise PlacementError(f"the step takes {count} of {len(candidates)} nodes: Slurm chooses among them")
    return candidates, False


def _distribute_tasks(cpus: Sequence[int], request: StepRequest, ntasks: int) -> list[int]:
    per_task = request.cpus_per_task or 1
    max_tasks = [count // per_task for count in cpus]
    if min(max_tasks) == 0 or sum(max_tasks) < ntasks:
        raise PlacementError(f"{pluralize(ntasks, 'task')} of {pluralize(per_task, 'CPU')} do not fit the nodes' "
                             f"{pluralize(sum(cpus), 'CPU')}")
    tasks = block_distribution(max_tasks, ntasks)
    if request.ntasks_per_node:
        # releases differ in whether a contradictory --ntasks-per-node still limits the nodes
        limit = request.ntasks_per_node * per_task
        if tasks != block_distribution([min(count, limit) for count in max_tasks], ntasks):
            raise PlacementError(f"--ntasks-per-node={request.ntasks_per_node} contradicts "
                                 f"{pluralize(ntasks, 'task')} on {pluralize(len(cpus), 'node')}")
    return tasks


def _check_task_limit(allocation: Allocation, request: StepRequest, step_nodes: Sequence[str], cpus: Sequence[int],
                      tasks: Sequence[int]) -> None:
    """Reject an unknown limit, unless the layout is that of the job, or even on equal nodes."""
    job_tasks = dict(zip(allocation.nodes, allocation.tasks_per_node, strict=False))
    if [job_tasks.get(node) for node in step_nodes] == list(tasks):
        return
    is_even = len(set(tasks)) == 1 and len(set(cpus)) == 1
    if not is_even or ("GPU" in request.task_limiting_option.upper() and len(set(allocation.tasks_per_node)) > 1):
        raise PlacementError(f"{request.task_limiting_option}: its limit on the tasks of a node is not known")


def block_distribution(max_tasks: Sequence[int], ntasks: int) -> list[int]:
    """Tasks per node in Slurm's default (block) distribution, which then numbers the tasks node by node.

    Each round adds one task to every node below its maximum; when all nodes are full, to every node.
    """
    tasks, remaining = [0] * len(max_tasks), ntasks
    while remaining > 0:
        below_maximum = [i for i, limit in enumerate(max_tasks) if tasks[i] < limit]
        for i in (below_maximum or range(len(tasks)))[:remaining]:
            tasks[i] += 1
            remaining -= 1
    return tasks
