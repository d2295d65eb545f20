"""Which nodes can serve a job, and how many of its tasks each can take now."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot, IntArray, Node, NodeProfile
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest

BoolArray = npt.NDArray[np.bool_]

#: states and flags in which a node can start a job now, or (POWERED_DOWN, POWERING_UP) boots for it
_START_STATES = frozenset(["IDLE", "MIXED", "ALLOCATED", "CLOUD", "POWERED_DOWN", "POWERING_UP", "DYNAMIC_NORM"])
#: flags that end by themselves: the node can serve the job, only not now
_TRANSIENT_STATES = frozenset(["COMPLETING", "PLANNED", "POWERING_DOWN", "POWER_DOWN", "POWER_UP"])
#: flags that a reservation sets, for jobs without it
_RESERVATION_STATES = frozenset(["RESERVED", "MAINTENANCE"])


@dataclass(frozen=True, eq=False)
class EligibleTasks:
    """What the nodes of one partition can take.

    Attributes
    ----------
    now : shape (nodes of the snapshot,), tasks that fit into what is free.
    once_idle : the same, if nothing else ran on the node.
    refused : why -> number of nodes that are refused for it.
    """

    tasks_now: IntArray
    tasks_when_idle: IntArray
    rejection_counts: Mapping[str, int]


def is_idle(node: Node) -> bool:
    """Whether a whole node could start a job now."""
    return node.responding and "IDLE" in node.state and _START_STATES.issuperset(node.state)


def is_in_service(node: Node) -> bool:
    """Whether jobs start on a node, now or when it is free."""
    return node.responding and (_START_STATES | _TRANSIENT_STATES).issuperset(node.state)


def candidate_partitions(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...]:
    """The partitions that the job may start in, as Slurm tries them; () where the snapshot knows none.

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
    return tuple(sorted(wanted, key=lambda name: -known[name].priority))


def eligible_tasks(request: JobRequest, cluster: ClusterSnapshot, partition: str | None) -> EligibleTasks:
    """How many tasks of the job each node can take.

    Of several alternatives of the constraint it is the one that leaves most room now.

    Raises
    ------
    PlacementError : the constraint is richer than placement reads; a reservation is unknown or holds no nodes now.
    """
    if not request.constraint:
        return _eligible_tasks(request, cluster, partition, "")
    found = [_eligible_tasks(request, cluster, partition, text)
                             for text in constraint_alternatives(request.constraint)]
    return max(found, key=lambda each: (int(each.tasks_now.sum()), int(each.tasks_when_idle.sum())))


def _eligible_tasks(request: JobRequest, cluster: ClusterSnapshot,
                    partition: str | None, constraint: str) -> EligibleTasks:
    """Each kind of node is looked at once; the numbers of the nodes are arrays."""
    exclusive = request.exclusive
    for known in cluster.partitions:
        if known.name == partition:
            exclusive = exclusive or known.oversubscribe == "EXCLUSIVE"
            if request.memory_per_cpu_mb is None and request.memory_per_node_mb is None:
                request = replace(request, memory_per_cpu_mb=known.memory_per_cpu,
                                  memory_per_node_mb=known.memory_per_node)
    reserved = _reserved_nodes(request, cluster)
    refusals = _Rejections(cluster)
    refusals.reject_profiles([_profile_rejection_reason(kind, partition, constraint,
                             reserved is not None) for kind in cluster.profiles])
    refusals.reject_nodes("excluded", request.exclude)
    if reserved is not None:
        refusals.reject_other_nodes("not in the reservation", reserved)
    refusals.reject_nodes("reserved", {name for other in cluster.reservations if other.active
                                   and other.name not in request.reservation.split(",") for name in other.nodes})
    whole = _tasks_that_fit(request, cluster, cluster.cpus, cluster.memory, subtract_used=False)
    once_idle = np.where(refusals.accepted(), whole, 0)
    refusals.reject_where("too small", once_idle == 0)
    starts = np.array([_START_STATES.issuperset(set(kind.state) - (_RESERVATION_STATES if reserved else set()))
                       for kind in cluster.profiles], bool)[cluster.profile_index]
    if exclusive:
        starts &= cluster.cpus_unallocated == cluster.cpus
    free = _tasks_that_fit(request, cluster, cluster.cpus_unallocated, cluster.memory_unallocated, subtract_used=True)
    now = np.where(refusals.accepted() & starts, np.minimum(free, once_idle), 0)
    refusals.reject_where("busy", now == 0)
    return EligibleTasks(now, once_idle, refusals.counts())


class _Rejections:
    """Why each node is refused: of several reasons the first that was told."""

    def __init__(self, cluster: ClusterSnapshot) -> None:
        self.cluster = cluster
        self.reasons = [""]
        self.reason_codes = np.zeros(len(cluster.names), np.int64)

    def accepted(self) -> BoolArray:
        return np.asarray(self.reason_codes == 0)

    def reject_where(self, reason: str, rejected: BoolArray) -> None:
        self.reason_codes[rejected & self.accepted()] = self._reason_code(reason)

    def reject_profiles(self, reasons: Sequence[str]) -> None:
        """One reason for each kind of node, "" for none."""
        if reasons:
            self.reason_codes = np.array([self._reason_code(reason)
                                         for reason in reasons], np.int64)[self.cluster.profile_index]

    def reject_nodes(self, reason: str, names: Iterable[str]) -> None:
        self.reject_where(reason, self._node_mask(names))

    def reject_other_nodes(self, reason: str, names: Iterable[str]) -> None:
        self.reject_where(reason, ~self._node_mask(names))

    def counts(self) -> dict[str, int]:
        count = np.bincount(self.reason_codes, minlength=len(self.reasons)).tolist()
        return {reason: nodes for reason, nodes in zip(self.reasons, count, strict=True) if reason and nodes}

    def _reason_code(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)

    def _node_mask(self, names: Iterable[str]) -> BoolArray:
        named: BoolArray = np.zeros(len(self.cluster.names), bool)
        wanted = frozenset(names)
        if wanted:
            named[[i for i, name in enumerate(self.cluster.names) if name in wanted]] = True
        return named


def _reserved_nodes(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...] | None:
    """Nodes of the reservations that the job names and that hold them now; None where it names none."""
    if not request.reservation:
        return None
    known = {reservation.name: reservation for reservation in cluster.reservations}
    nodes: list[str] = []
    for name in request.reservation.split(","):
        if name not in known:
            raise PlacementError(f"reservation {name} is unknown; known: {', '.join(known) or 'none'}")
        nodes += known[name].nodes if known[name].active else ()
    if not nodes:
        raise PlacementError(f"reservation {request.reservation} holds no nodes now")
    return tuple(nodes)


def _profile_rejection_reason(profile: NodeProfile, partition: str | None, constraint: str, reserved: bool) -> str:
    if partition is not None and partition not in profile.partitions:
        return "not in the partition"
    if constraint and not satisfies_features(profile.features, constraint):
        return "without the features"
    if not profile.responding:
        return "not responding"
    good = _START_STATES | _TRANSIENT_STATES | (_RESERVATION_STATES if reserved else frozenset())
    bad = next((flag for flag in profile.state if flag not in good), None)
    return bad.lower() if bad else ""


def _tasks_that_fit(request: JobRequest, cluster: ClusterSnapshot, cpus: IntArray,
                    memory: IntArray, subtract_used: bool) -> IntArray:
    """Tasks that fit into so many CPUs and MB of each node, and into its generic resources, or those not in use."""
    cpus_per_task = request.cpus_per_task or 1
    tasks = cpus // cpus_per_task
    if request.memory_per_cpu_mb:
        tasks = np.minimum(tasks, memory // (request.memory_per_cpu_mb * cpus_per_task))
    elif request.memory_per_node_mb:
        tasks = np.where(memory >= request.memory_per_node_mb, tasks, 0)
    else:
        # --mem=0, or no --mem and no default that is known: the job takes, or may take, all of the node's memory
        tasks = np.where(memory == cluster.memory, tasks, 0)
    if request.gres_per_node:
        enough = [all(_gres_count(kind.gres, name) - (_gres_count(kind.gres_used, name) if subtract_used else 0) >= count
                      for name, count in request.gres_per_node.items()) for kind in cluster.profiles]
        tasks = np.where(np.array(enough, bool)[cluster.profile_index], tasks, 0)
    return np.asarray(tasks, np.int64)


def _gres_count(counts: Iterable[tuple[str, int]], name: str) -> int:
    """Count of a generic resource; a name without a type stands for all types."""
    return sum(count for key, count in counts if key == name or key.startswith(f"{name}:"))


# MERGED: The value of --constraint: which features a node needs (sbatch(1), -C).

_FEATURE = r"[\w.:/+=-]+"
#: a feature, or a group: groups do not nest
_TERM = rf"(?:{_FEATURE}|\({_FEATURE}(?:[&|]{_FEATURE})*\))"
_EXPRESSION = re.compile(rf"{_TERM}(?:[&|]{_TERM})*")
#: one of these for all nodes of the job
_MATCHING_OR = re.compile(rf"\[{_TERM}(?:\|{_TERM})*\]")
_OPERATOR_AND_TERM = re.compile(rf"([&|]?)({_TERM})")


def constraint_alternatives(text: str) -> tuple[str, ...]:
    """Expressions of features of which all nodes of the job must fulfil the same one.

    `[a|b]` has two, an expression without brackets one: itself. A comma is the same as `&`.

    Raises
    ------
    PlacementError : counts, other brackets, or what is no expression. Slurm 22.05 does not hold a node list against
        them either: with -w it starts `[a*1&b*1]` on two nodes that have only a.
    """
    text = text.strip().replace(",", "&")
    if _EXPRESSION.fullmatch(text):
        return (text,)
    if _MATCHING_OR.fullmatch(text):
        return tuple(re.findall(_TERM, text))
    raise PlacementError(f"constraint too rich: {text} (features, &, |, parentheses and [a|b] can be placed)")


def satisfies_features(features: Collection[str], expression: str) -> bool:
    """Whether a node with these features fulfils one of the `alternatives`.

    From the left to the right, `&` before `|` or not, as slurmctld reads it.
    """
    value = True
    for join, term in _OPERATOR_AND_TERM.findall(expression):
        here = satisfies_features(features, term[1:-1]) if term.startswith("(") else term in features
        value = value or here if join == "|" else value and here
    return value
