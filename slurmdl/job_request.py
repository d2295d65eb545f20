"""The options of a submission that placement depends on: sbatch options and --dl-* options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError

#: options by which users choose nodes, or that send the job elsewhere -> spelling in messages
_USER_NODE_OPTIONS = {"nodelist": "-w", "nodefile": "-F", "prefer": "--prefer", "switches": "--switches",
                      "contiguous": "--contiguous", "spread-job": "--spread-job", "segment": "--segment",
                      "clusters": "-M", "cluster-constraint": "--cluster-constraint", "external": "--external"}
#: options among them that name nodes or another cluster
_NODE_NAMING_OPTIONS = ("nodelist", "nodefile", "clusters", "cluster-constraint", "external")
#: options that may delay the start of the job
_DELAYED_START_OPTIONS = ("hold", "dependency", "begin", "licenses", "bb", "bbf")
#: options that request resources that placement does not model
_UNMODELLED_OPTIONS = ("sockets-per-node", "cores-per-socket", "threads-per-core", "extra-node-info",
                       "hint", "mincpus", "tmp", "core-spec", "thread-spec", "ntasks-per-core", "ntasks-per-socket",
                       "ntasks-per-gpu", "ntasks-per-tres", "cpus-per-gpu", "mem-per-gpu", "gpus-per-socket",
                       "tres-per-task", "resources", "overcommit", "oversubscribe", "batch", "network", "reboot")


@dataclass(frozen=True)
class JobRequest:
    """Options of one submission that placement depends on; None for an option that was not given.

    The *_reason fields are "" if they do not apply.

    Attributes:
        nodes: (min, max) number of nodes; max is None for an open range.
        memory_per_node_mb, memory_per_cpu_mb: 0 for all of the node's memory.
        partitions: partitions of -p, () for the default one.
        exclude, nodelist: expanded hostlists.
        gres_per_node: name or name:type -> count.
        exclusive: whether the job needs whole nodes.
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

    dl: DlOptions = field(default_factory=DlOptions)
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
    exclusive: bool = False
    reservation: str = ""
    unplaceable_reason: str = ""
    unrestrictable_reason: str = ""
    start_unknown_reason: str = ""
    unmodelled_reason: str = ""
    requeue: bool = True
    seed: int = 0


def build_request(settings: Mapping[str, str], dl: DlOptions, unplaceable_reason: str = "") -> JobRequest:
    """Build the request from options of sbatch.

    A value that sbatch would reject makes the request unplaceable; sbatch reports the error.

    Args:
        settings: long name of an sbatch option -> value, "" for a flag, after precedence.
        unplaceable_reason: a reason that is already known, or "".
    """
    try:
        return JobRequest(
            dl=dl,
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
            unplaceable_reason=unplaceable_reason or _unplaceable_reason(settings),
            unrestrictable_reason=unplaceable_reason or _user_choice_reason(settings, _NODE_NAMING_OPTIONS),
            start_unknown_reason=next((f"--{name} decides when the job starts" for name in _DELAYED_START_OPTIONS
                                       if name in settings), ""),
            unmodelled_reason=_unmodelled_reason(settings),
            requeue="no-requeue" not in settings)
    except InputError as error:
        reason = unplaceable_reason or str(error)
        return JobRequest(dl=dl, unplaceable_reason=reason, unrestrictable_reason=reason)


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
            return f"--{name} is not modelled"
    if ("gpus" in settings or "gpus-per-task" in settings) and not _collect_gres(settings):
        return "the number of GPUs per node is unknown without --gpus-per-node"
    return ""


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
    """Generic resources per node (name or name:type -> count) of --gres, --gpus-per-node and --gpus-per-task."""
    def items(option: str) -> Iterable[str]:
        return filter(None, settings.get(option, "").split(","))

    requests = [(item.removeprefix("gres:").removeprefix("gres/"), 1) for item in items("gres")]
    requests += [(f"gpu:{item}", 1) for item in items("gpus-per-node")]
    tasks = _parse_count(settings, "ntasks-per-node")
    if tasks and "gpus-per-node" not in settings:
        requests += [(f"gpu:{item}", tasks) for item in items("gpus-per-task")]
    counts: dict[str, int] = {}
    for text, multiplier in requests:
        match = re.fullmatch(r"([A-Za-z_][\w.+-]*(?::[A-Za-z_][\w.+-]*)?)(?:[:=]([0-9]{1,9}))?", text)
        if text.lower() == "none":
            continue
        if not match:
            raise InputError(f"the generic resource {text} is not understood")
        counts[match[1]] = counts.get(match[1], 0) + int(match[2] or 1) * multiplier
    return {name: count for name, count in counts.items() if count}
