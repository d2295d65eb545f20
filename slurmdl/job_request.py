"""What the user asked for: sbatch's options as far as placement depends on them, and the --dl-* options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmdl.dl_options import NODE_BINDING_CHOICES, PLACE_CHOICES, DlOptions
from slurmdl.errors import InputError

__all__ = ["NODE_BINDING_CHOICES", "PLACE_CHOICES", "DlOptions", "JobRequest", "build_request"]

#: options by which users choose nodes themselves, and options that take the job out of our sight
_USER_NODE_OPTIONS = {"nodelist": "-w", "nodefile": "-F", "prefer": "--prefer", "switches": "--switches",
               "contiguous": "--contiguous", "spread-job": "--spread-job", "segment": "--segment",
               "clusters": "-M", "cluster-constraint": "--cluster-constraint", "external": "--external"}
#: those of them that name the nodes, or lead to another cluster
_NODE_NAMING_OPTIONS = ("nodelist", "nodefile", "clusters", "cluster-constraint", "external")
#: options that say when the job may start
_DELAYED_START_OPTIONS = ("hold", "dependency", "begin", "licenses", "bb", "bbf")
#: options that ask for resources which placement does not model
_UNMODELLED_OPTIONS = ("sockets-per-node", "cores-per-socket", "threads-per-core", "extra-node-info",
                 "hint", "mincpus", "tmp", "core-spec", "thread-spec", "ntasks-per-core", "ntasks-per-socket",
                 "ntasks-per-gpu", "ntasks-per-tres", "cpus-per-gpu", "mem-per-gpu", "gpus-per-socket",
                 "tres-per-task", "resources", "overcommit", "oversubscribe", "batch", "network", "reboot")


@dataclass(frozen=True)
class JobRequest:
    """One submission, as far as placement depends on it. None means: not given.

    Attributes
    ----------
    nodes : (least, most) number of nodes; most is None for an open range.
    ntasks, ntasks_per_node, cpus_per_task : counts.
    memory_per_node, memory_per_cpu : MB; 0 = all of the node.
    partitions : partitions named with -p, () for the default one.
    constraint : the text of --constraint.
    exclude, nodelist : hostlists, already expanded.
    gres_per_node : name or name:type -> count.
    exclusive : the job wants whole nodes.
    reservation : the text of --reservation, "" for none.
    unpinnable : why no node choice can be made for it ("job array", "heterogeneous job", ...), "" else.
    unrestrictable : why it cannot be kept out of nodes (the user names its nodes, or they are those of another
        cluster, or what is asked for is not understood), "" where it can.
    uncertain : why it is not known whether the job starts at once on nodes that are free (it is held, or waits for
        another job), "" else.
    not_modelled : what it asks for that placement does not look at, so that only Slurm knows whether it starts on
        nodes that are free, "" for nothing.
    requeue : the job may be requeued (Slurm's default).
    seed : settles choices among equal nodes, so that many submitters who see the same cluster do not all choose
        the same ones; 0 for the order of the snapshot.
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
    """The request behind sbatch's options.

    Parameters
    ----------
    settings : long name of an option of sbatch -> its value, "" for a flag, after precedence.
    unpinnable : why no node choice can be made, where that is known already.

    A value that sbatch itself would refuse makes the request unpinnable; the refusal is left to sbatch.
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
            start_unknown_reason=next(
    (f"--{name} decides when the job starts" for name in _DELAYED_START_OPTIONS if name in settings), ""),
            unmodelled_reason=_unmodelled_reason(settings),
            requeue="no-requeue" not in settings)
    except InputError as error:
        return JobRequest(dl=dl, unplaceable_reason=unplaceable_reason or str(
            error), unrestrictable_reason=unplaceable_reason or str(error))


def _unplaceable_reason(settings: Mapping[str, str]) -> str:
    if "array" in settings:
        return "a job array chooses nodes per array task"
    return _user_choice_reason(settings, _USER_NODE_OPTIONS)


def _user_choice_reason(settings: Mapping[str, str], options: Iterable[str]) -> str:
    """Which of these options, or of the distributions, names nodes or bounds the choice of them; "" for none."""
    if "arbitrary" in settings.get("distribution", ""):
        return "--distribution=arbitrary brings its own node list"
    return next((f"{_USER_NODE_OPTIONS[name]} is given" for name in options if name in settings), "")


def _unmodelled_reason(settings: Mapping[str, str]) -> str:
    if "," in settings.get("reservation", ""):
        return "--reservation names several"
    for name in _UNMODELLED_OPTIONS:
        if name in settings:
            return f"--{name} is not modelled"
    if ("gpus" in settings or "gpus-per-task" in settings) and not _collect_gres(settings):
        return "GPUs per node are not known without --gpus-per-node"
    return ""


def _parse_node_range(settings: Mapping[str, str]) -> tuple[int, int | None] | None:
    """(least, most) of -N: `N`, `MIN-MAX` or `MIN-`, each with k (1024) or m (1024 x 1024) behind it.

    As sbatch does, no more nodes than tasks.
    """
    text = settings.get("nodes")
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,15}[kK]?[mM]?)?\s*(-)?\s*([0-9]{1,15}[kK]?[mM]?)?\s*", text)
    if not match or not (match[1] or match[3]):
        raise InputError(f"--nodes={text} is not understood")
    least = _parse_suffixed_count(match[1]) if match[1] else 1
    most = (_parse_suffixed_count(match[3]) if match[3] else None) if match[2] else least
    tasks = _parse_count(settings, "ntasks")
    return (min(least, tasks), min(most, tasks) if most else tasks) if tasks else (least, most)


def _parse_suffixed_count(text: str) -> int:
    factor = (1024 if "k" in text.lower() else 1) * (1024 * 1024 if "m" in text.lower() else 1)
    return int(text.rstrip("kKmM")) * factor


def _parse_count(settings: Mapping[str, str], name: str) -> int | None:
    text = settings.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\s*\+?[0-9]{1,9}\s*", text):
        raise InputError(f"--{name}={text} is not understood")
    return int(text) or None


def _parse_megabytes(settings: Mapping[str, str], name: str) -> int | None:
    text = settings.get(name)
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,15})(?:([kKmMgGtT])[bB]?)?", text)
    if not match:
        raise InputError(f"--{name}={text} is not understood")
    number, unit = int(match[1]), (match[2] or "m").lower()
    return -(-number // 1024) if unit == "k" else number * {"m": 1, "g": 1024, "t": 1024 * 1024}[unit]


def _expand_hosts(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    if "/" in text:
        raise InputError(f"the node list file {text} is not read")
    from slurmdl.slurm import hostlist

    return tuple(hostlist.expand_hostlist(text))


def _collect_gres(settings: Mapping[str, str]) -> dict[str, int]:
    """Generic resources per node: name or name:type -> count, from --gres, --gpus-per-node and --gpus-per-task."""
    wanted: dict[str, int] = {}
    for item in filter(None, settings.get("gres", "").split(",")):
        _add_gres(wanted, item.removeprefix("gres:").removeprefix("gres/"))
    for item in filter(None, settings.get("gpus-per-node", "").split(",")):
        _add_gres(wanted, f"gpu:{item}")
    tasks = _parse_count(settings, "ntasks-per-node")
    if tasks and "gpus-per-node" not in settings:
        for item in filter(None, settings.get("gpus-per-task", "").split(",")):
            _add_gres(wanted, f"gpu:{item}", tasks)
    return {name: count for name, count in wanted.items() if count}


def _add_gres(wanted: dict[str, int], item: str, multiplier: int = 1) -> None:
    match = re.fullmatch(r"([A-Za-z_][\w.+-]*)(?::([A-Za-z_][\w.+-]*))?(?:[:=]([0-9]{1,9}))?", item)
    if item.lower() == "none":
        return
    if not match:
        raise InputError(f"the generic resource {item} is not understood")
    name = f"{match[1]}:{match[2]}" if match[2] else match[1]
    wanted[name] = wanted.get(name, 0) + int(match[3] or 1) * multiplier
