"""Which nodes can serve a job, and how many of its tasks each can take now."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.model import ClusterSnapshot, Node
from slurmdl.errors import PlacementError
from slurmdl.request import JobRequest

IntArray = npt.NDArray[np.int64]

#: states and flags in which a node can start a job now, or (POWERED_DOWN, POWERING_UP) boots for it
_STARTS = frozenset(["IDLE", "MIXED", "ALLOCATED", "CLOUD", "POWERED_DOWN", "POWERING_UP", "DYNAMIC_NORM"])
#: flags that end by themselves: the node can serve the job, only not now
_PASSES = frozenset(["COMPLETING", "PLANNED", "POWERING_DOWN", "POWER_DOWN", "POWER_UP"])


@dataclass(frozen=True, eq=False)
class Eligible:
    """What the nodes of one partition can take.

    Attributes
    ----------
    now : shape (nodes of the snapshot,), tasks that fit into what is free.
    once_idle : the same, if nothing else ran on the node.
    refused : why -> number of nodes that are refused for it.
    """

    now: IntArray
    once_idle: IntArray
    refused: Mapping[str, int]


def idle(node: Node) -> bool:
    """Whether a whole node could start a job now."""
    return node.responding and "IDLE" in node.state and _STARTS.issuperset(node.state)


def partitions(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...]:
    """The partitions that the job may start in; () where the snapshot knows none.

    Raises
    ------
    PlacementError : an unknown partition, one that is not up, or no default.
    """
    if not cluster.partitions:
        return request.partitions
    known = {partition.name: partition for partition in cluster.partitions}
    wanted = request.partitions or ((cluster.default_partition,) if cluster.default_partition else ())
    if not wanted:
        raise PlacementError("no partition is given and none is the default")
    for name in wanted:
        if name not in known:
            raise PlacementError(f"partition {name} is unknown; known: {', '.join(known)}")
        if known[name].state != "UP":
            raise PlacementError(f"partition {name} is {known[name].state}")
    return wanted


def eligible(request: JobRequest, cluster: ClusterSnapshot, partition: str | None) -> Eligible:
    """How many tasks of the job each node can take.

    Raises
    ------
    PlacementError : the constraint is richer than features joined by all `&` or all `|`.
    """
    fits = constraint(request.constraint)
    exclusive = request.exclusive
    for known in cluster.partitions:
        if known.name == partition:
            exclusive = exclusive or known.oversubscribe == "EXCLUSIVE"
            if request.memory_per_cpu is None and request.memory_per_node is None:
                request = replace(request, memory_per_cpu=known.memory_per_cpu,
                                  memory_per_node=known.memory_per_node)
    excluded = frozenset(request.exclude)
    refused: dict[str, int] = {}
    now, once_idle = np.zeros((2, len(cluster.nodes)), np.int64)
    for i, node in enumerate(cluster.nodes):
        reason = _refusal(node, partition, fits, excluded)
        if not reason:
            once_idle[i] = _tasks(request, node, node.cpus, node.memory, {})
            reason = "" if once_idle[i] else "too small"
        if not reason:
            busy = (exclusive and node.cpus_free < node.cpus) or not _STARTS.issuperset(node.state)
            now[i] = 0 if busy else _tasks(request, node, node.cpus_free, node.memory_free, node.gres_used)
            reason = "" if now[i] else "busy"
        if reason:
            refused[reason] = refused.get(reason, 0) + 1
    return Eligible(now, once_idle, refused)


def constraint(text: str | None) -> Callable[[Node], bool]:
    """Whether a node has the features of --constraint.

    Raises
    ------
    PlacementError : counts, brackets, parentheses, negation, or `&` and `|` mixed.
    """
    if not text:
        return lambda node: True
    text = text.strip()
    for separator, join in (("&", all), ("|", any)):
        words = text.split(separator)
        if all(re.fullmatch(r"[\w.:/+-]+", word) for word in words):
            return partial(_has, words, join)
    raise PlacementError(f"constraint too rich: {text} (features joined by all & or all | can be placed)")


def _has(words: Sequence[str], join: Callable[[Iterable[bool]], bool], node: Node) -> bool:
    return join(word in node.features for word in words)


def _refusal(node: Node, partition: str | None, fits: Callable[[Node], bool], excluded: frozenset[str]) -> str:
    if partition is not None and partition not in node.partitions:
        return "not in the partition"
    if node.name in excluded:
        return "excluded"
    if not fits(node):
        return "without the features"
    if not node.responding:
        return "not responding"
    bad = next((flag for flag in node.state if flag not in _STARTS and flag not in _PASSES), None)
    return bad.lower() if bad else ""


def _tasks(request: JobRequest, node: Node, cpus: int, memory: int, gres_used: Mapping[str, int]) -> int:
    """Tasks that fit into so many CPUs and MB of a node."""
    cpus_per_task = request.cpus_per_task or 1
    tasks = cpus // cpus_per_task
    if request.memory_per_cpu:
        tasks = min(tasks, memory // (request.memory_per_cpu * cpus_per_task))
    elif request.memory_per_node:
        tasks = tasks if memory >= request.memory_per_node else 0
    elif memory < node.memory:
        # --mem=0, or no --mem and no default that is known: the job takes, or may take, all of the node's memory
        tasks = 0
    for name, count in request.gres_per_node.items():
        if _gres(node.gres, name) - _gres(gres_used, name) < count:
            tasks = 0
    return tasks


def _gres(counts: Mapping[str, int], name: str) -> int:
    """Count of a generic resource; a name without a type stands for all types."""
    return sum(count for key, count in counts.items() if key == name or key.startswith(f"{name}:"))
