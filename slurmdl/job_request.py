"""The options of a submission that placement depends on (sbatch options and --dl-* options), and the job's size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError, PlacementError
from slurmdl.text import pluralize

if TYPE_CHECKING:
    from slurmdl.gpu_request import GpuRequest

#: options by which users choose nodes, or that send the job elsewhere -> spelling in messages
_USER_NODE_OPTIONS = {"nodelist": "-w", "nodefile": "-F", "prefer": "--prefer",
                      "contiguous": "--contiguous", "spread-job": "--spread-job",
                      "spread-segments": "--spread-segments", "clusters": "-M",
                      "cluster-constraint": "--cluster-constraint", "external": "--external"}
#: options among them that name nodes or another cluster
_NODE_NAMING_OPTIONS = ("nodelist", "nodefile", "clusters", "cluster-constraint", "external")
#: options that may delay the start of the job
_DELAYED_START_OPTIONS = ("hold", "dependency", "begin", "licenses", "bb", "bbf")
#: options that request resources that placement does not model
_UNMODELLED_OPTIONS = ("sockets-per-node", "cores-per-socket", "threads-per-core", "extra-node-info",
                       "hint", "mincpus", "tmp", "core-spec", "thread-spec", "ntasks-per-core", "ntasks-per-socket",
                       "gpus-per-socket", "tres-per-task", "resources", "overcommit", "oversubscribe", "batch",
                       "network", "reboot")
#: options among them -> what is missing to model them
_MISSING_FACTS = {"gpus-per-socket": "the sockets of the nodes are unknown",
                  "tres-per-task": "only CPUs and one type of GPU are"}
#: options that count GPUs, tasks per GPU, or resources per GPU; those per node are generic resources of a node
_GPU_OPTIONS = ("gpus", "gpus-per-task", "ntasks-per-gpu", "ntasks-per-tres", "cpus-per-gpu", "mem-per-gpu")


@dataclass(frozen=True)
class JobRequest:
    """Options of one submission that placement depends on; None for an option that was not given.

    The *_reason fields are "" if they do not apply.

    Attributes:
        nodes: (min, max) number of nodes; max is None for an open range. This and the numbers of tasks and CPUs
            include what follows from the GPU options.
        memory_per_node_mb, memory_per_cpu_mb: 0 for all of the node's memory.
        partitions: partitions of -p, () for the default one.
        exclude, nodelist: expanded hostlists.
        gres_per_node: name or name:type -> count.
        gpus: what follows from GPU options other than the GPUs per node.
        exclusive: whether the job needs whole nodes.
        exclusive_blocks: whether no other job may use its blocks (--exclusive=topo).
        segment: nodes of each part of the job that must share a block (topology/block only); 0 if not given.
        switches: maximum number of leaf switches; 0 if not given.
        script_ranks_per_node: ranks that the script's launcher starts on each node; 0 without one, or if unknown.
        unplaceable_reason: why no nodes can be chosen for it ("job array", "heterogeneous job", ...).
        unrestrictable_reason: why it cannot be restricted to zones: the user names nodes or another cluster, or an
            option is not understood.
        start_unknown_reason: why it may not start at once on idle nodes: it is held, or depends on another job.
        unmodelled_reason: request that placement does not model, so that only Slurm knows whether idle nodes satisfy
            it.
        requeue: whether the job may be requeued (Slurm's default).
        seed: breaks ties among equivalent nodes differently for concurrent submitters; 0 for the order of the
            snapshot.
    """

    options: DlOptions = field(default_factory=DlOptions)
    nodes: tuple[int, int | None] | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    memory_per_node_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    partitions: tuple[str, ...] = ()
    constraint: str | None = None
    exclude: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()
    gres_per_node: dict[str, int] = field(default_factory=dict)
    gpus: GpuRequest | None = None
    exclusive: bool = False
    exclusive_blocks: bool = False
    segment: int = 0
    switches: int = 0
    reservation: str = ""
    script_ranks_per_node: int = 0
    unplaceable_reason: str = ""
    unrestrictable_reason: str = ""
    start_unknown_reason: str = ""
    unmodelled_reason: str = ""
    requeue: bool = True
    seed: int = 0

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node; 0 if the options do not say."""
        counted = sum(count for name, count in self.gres_per_node.items() if name.partition(":")[0] == "gpu")
        return counted or (self.gpus.per_node if self.gpus else 0)


@dataclass(frozen=True)
class JobSize:
    nodes: int
    tasks: int

    @property
    def max_tasks_per_node(self) -> int:
        return -(-self.tasks // self.nodes)

    def tasks_on_node(self, index: int) -> int:
        """Tasks of the i-th node in an even split: the first nodes take the remainder.

        For jobs without --ntasks-per-node and whole nodes see `eligibility.split_tasks`.
        """
        return self.tasks // self.nodes + (index < self.tasks % self.nodes)


def resolve_job_size(request: JobRequest) -> JobSize:
    """Size of the job; PlacementError if Slurm would choose the node count, or if the counts are contradictory."""
    per_node, tasks = request.ntasks_per_node, request.ntasks
    if request.gpus and request.options.node_binding == "late":
        raise PlacementError("--dl-node-binding=late: the GPU options count GPUs for a fixed number of nodes")
    if request.nodes is not None:
        min_nodes, max_nodes = request.nodes
        if min_nodes != max_nodes:
            raise PlacementError(f"the node count is not certain (-N {min_nodes}-{max_nodes or ''})")
        nodes = min_nodes
    elif tasks is not None and per_node:
        nodes = -(-tasks // per_node)
    elif (tasks or 1) == 1:
        nodes = 1
    else:
        raise PlacementError(f"the node count is not certain (-n {tasks} without -N or --ntasks-per-node)")
    if tasks is None:
        tasks = nodes * (per_node or 1)
    if not 0 < nodes <= tasks:
        raise PlacementError(f"{pluralize(tasks, 'task')} do not fill {pluralize(nodes, 'node')}")
    if per_node and tasks > nodes * per_node:
        raise PlacementError(f"{tasks} tasks do not fit on {pluralize(nodes, 'node')} with "
                             f"{pluralize(per_node, 'task')} each")
    return JobSize(nodes, tasks)


def build_request(settings: Mapping[str, str], options: DlOptions, unplaceable_reason: str = "") -> JobRequest:
    """Build the request from options of sbatch.

    A value that sbatch would reject makes the request unplaceable; sbatch reports the error.

    Args:
        settings: long name of an sbatch option -> value, "" for a flag, after precedence.
        unplaceable_reason: a reason that is already known, or "".
    """
    if "tres-per-task" in settings:
        from slurmdl.gpu_request import expand_tres_per_task

        settings = expand_tres_per_task(settings)
    try:
        request = JobRequest(
            options=options,
            nodes=_parse_node_range(settings),
            ntasks=_parse_count(settings, "ntasks"),
            ntasks_per_node=_parse_count(settings, "ntasks-per-node"),
            cpus_per_task=_parse_count(settings, "cpus-per-task"),
            memory_per_node_mb=_parse_megabytes(settings, "mem"),
            memory_per_cpu_mb=_parse_megabytes(settings, "mem-per-cpu"),
            partitions=tuple(filter(None, settings.get("partition", "").split(","))),
            constraint=settings.get("constraint") or None,
            exclude=_expand_hosts(settings.get("exclude", "")),
            nodelist=_expand_hosts(settings.get("nodelist", "")),
            gres_per_node=_collect_gres(settings),
            reservation=settings.get("reservation", ""),
            exclusive=settings.get("exclusive", "oversubscribe") != "oversubscribe",
            exclusive_blocks=settings.get("exclusive") == "topo",
            segment=_parse_count(settings, "segment") or 0,
            switches=_parse_switches(settings),
            unplaceable_reason=unplaceable_reason or _unplaceable_reason(settings),
            unrestrictable_reason=unplaceable_reason or _user_choice_reason(settings, _NODE_NAMING_OPTIONS),
            start_unknown_reason=next((f"--{name} decides when the job starts" for name in _DELAYED_START_OPTIONS
                                       if name in settings), ""),
            unmodelled_reason=_unmodelled_reason(settings),
            requeue="no-requeue" not in settings)
        return request if settings.keys().isdisjoint(_GPU_OPTIONS) else _count_gpus(settings, request)
    except InputError as error:
        reason = unplaceable_reason or str(error)
        return JobRequest(options=options, unplaceable_reason=reason, unrestrictable_reason=reason)


def _unplaceable_reason(settings: Mapping[str, str]) -> str:
    if "array" in settings:
        return "a job array chooses nodes per array task"
    return _user_choice_reason(settings, _USER_NODE_OPTIONS)


def _user_choice_reason(settings: Mapping[str, str], options: Iterable[str]) -> str:
    """The first of `options`, or the distribution, by which the user restricts the choice of nodes; "" for none."""
    if "arbitrary" in settings.get("distribution", ""):
        return "--distribution=arbitrary has its own node list"
    return next((f"{_USER_NODE_OPTIONS[name]} is given" for name in options if name in settings), "")


def _unmodelled_reason(settings: Mapping[str, str]) -> str:
    if "," in settings.get("reservation", ""):
        return "--reservation names several reservations"
    for name in _UNMODELLED_OPTIONS:
        if name in settings:
            return f"--{name} is not modelled" + (f": {_MISSING_FACTS[name]}" if name in _MISSING_FACTS else "")
    return ""


def _count_gpus(settings: Mapping[str, str], request: JobRequest) -> JobRequest:
    """Add the counts that follow from the GPU options. InputError if Slurm would reject them."""
    from slurmdl.gpu_request import TaskCounts, count_gpus, parse_gpu_count

    if "ntasks-per-tres" in settings:  # the same option, but for its name
        settings = {"ntasks-per-gpu": settings["ntasks-per-tres"], **settings}
    per_node = {name: count for name, count in request.gres_per_node.items() if name.partition(":")[0] == "gpu"}
    try:
        if "mem-per-gpu" in settings and not settings.keys().isdisjoint(("mem", "mem-per-cpu")):
            raise PlacementError("--mem-per-gpu next to another limit of memory is not modelled")
        typed = {option: parse_gpu_count(option, settings[option]) for option in ("gpus", "gpus-per-task")
                 if option in settings}
        names = {*per_node, *(name for name, _ in typed.values())}
        if len(names) > 1:
            raise PlacementError(f"several GPU types are not modelled ({', '.join(sorted(names))})")
        if not names and "ntasks-per-gpu" not in settings:
            raise PlacementError("resources per GPU without a number of GPUs are not modelled")
        for others in (("cpus-per-gpu",), ("gpus-per-node", "gres")):
            if settings.keys() >= {"ntasks-per-gpu", *others}:
                raise PlacementError(f"--ntasks-per-gpu with --{' and --'.join(others)} is not modelled")
        counts, gpus = count_gpus(
            TaskCounts(request.nodes, request.ntasks, request.ntasks_per_node, request.cpus_per_task),
            next(iter(names), "gpu"), per_node=sum(per_node.values()), per_job=typed.get("gpus", ("", 0))[1],
            per_task=typed.get("gpus-per-task", ("", 0))[1],
            tasks_per_gpu=_parse_count(settings, "ntasks-per-gpu") or 0,
            cpus_per_gpu=_parse_count(settings, "cpus-per-gpu") or 0,
            memory_per_gpu_mb=_parse_megabytes(settings, "mem-per-gpu") or 0)
    except PlacementError as error:
        return replace(request, unplaceable_reason=request.unplaceable_reason or str(error))
    return replace(request, nodes=counts.nodes, ntasks=counts.ntasks, ntasks_per_node=counts.ntasks_per_node,
                   cpus_per_task=counts.cpus_per_task, gpus=gpus,
                   unmodelled_reason=request.unmodelled_reason or gpus.unmodelled_reason)


def _parse_node_range(settings: Mapping[str, str]) -> tuple[int, int | None] | None:
    """(min, max) of -N: `N`, `MIN-MAX` or `MIN-`, with suffixes k (1024) and m (1024^2); at most a node per task."""
    match = _match_setting(settings, "nodes", r"(?=[^0-9]*[0-9])\s*([0-9]{1,15}[kK]?[mM]?)?\s*(-)?"
                                              r"\s*([0-9]{1,15}[kK]?[mM]?)?\s*")
    if match is None:
        return None
    min_nodes = _parse_suffixed_count(match[1]) if match[1] else 1
    max_nodes = (_parse_suffixed_count(match[3]) if match[3] else None) if match[2] else min_nodes
    tasks = _parse_count(settings, "ntasks")
    if not tasks:
        return min_nodes, max_nodes
    return min(min_nodes, tasks), min(max_nodes, tasks) if max_nodes else tasks


def _match_setting(settings: Mapping[str, str], name: str, pattern: str) -> re.Match[str] | None:
    """The match of an option's value, None if it is not given. Raises InputError if it does not match."""
    text = settings.get(name)
    match = re.fullmatch(pattern, text) if text is not None else None
    if text is not None and match is None:
        raise InputError(f"--{name}={text} is not understood")
    return match


def _parse_suffixed_count(text: str) -> int:
    factor = (1024 if "k" in text.lower() else 1) * (1024 * 1024 if "m" in text.lower() else 1)
    return int(text.rstrip("kKmM")) * factor


def _parse_count(settings: Mapping[str, str], name: str) -> int | None:
    match = _match_setting(settings, name, r"\s*\+?[0-9]{1,9}\s*")
    return int(match[0]) or None if match else None


def _parse_switches(settings: Mapping[str, str]) -> int:
    """COUNT of --switches=COUNT[@TIME]; Slurm waits at most TIME for fewer switches."""
    match = _match_setting(settings, "switches", r"\s*([0-9]{1,9})(@.*)?")
    return int(match[1]) if match else 0


def _parse_megabytes(settings: Mapping[str, str], name: str) -> int | None:
    match = _match_setting(settings, name, r"\s*([0-9]{1,15})(?:([kKmMgGtT])[bB]?)?")
    if match is None:
        return None
    number, unit = int(match[1]), (match[2] or "m").lower()
    return -(-number // 1024) if unit == "k" else number * {"m": 1, "g": 1024, "t": 1024 * 1024}[unit]


def _expand_hosts(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    if "/" in text:
        raise InputError(f"the node list file {text} is not supported")
    from slurmdl.slurm import hostlist

    return tuple(hostlist.expand_hostlist(text))


def _collect_gres(settings: Mapping[str, str]) -> dict[str, int]:
    """Generic resources per node (name or name:type -> count); --gres overrides --gpus-per-node."""
    counts: dict[str, int] = {}
    for option, prefix in (("gpus-per-node", "gpu:"), ("gres", "")):
        own: dict[str, int] = {}
        for item in filter(None, settings.get(option, "").split(",")):
            text = prefix + item.removeprefix("gres:").removeprefix("gres/")
            match = re.fullmatch(r"([A-Za-z_][\w.+-]*(?::[A-Za-z_][\w.+-]*)?)(?:[:=]([0-9]{1,9}))?", text)
            if text.lower() == "none":
                continue
            if not match:
                raise InputError(f"the generic resource {text} is not understood")
            own[match[1]] = own.get(match[1], 0) + int(match[2] or 1)
        counts.update(own)
    return {name: count for name, count in counts.items() if count}
