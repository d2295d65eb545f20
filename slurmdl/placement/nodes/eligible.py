"""Which nodes can serve a job, and how many of its tasks each can take now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.model import ClusterSnapshot, IntArray, Kind, Node
from slurmdl.errors import PlacementError
from slurmdl.placement.nodes.constraint import alternatives, fulfils
from slurmdl.request import JobRequest

BoolArray = npt.NDArray[np.bool_]

#: states and flags in which a node can start a job now, or (POWERED_DOWN, POWERING_UP) boots for it
_STARTS = frozenset(["IDLE", "MIXED", "ALLOCATED", "CLOUD", "POWERED_DOWN", "POWERING_UP", "DYNAMIC_NORM"])
#: flags that end by themselves: the node can serve the job, only not now
_PASSES = frozenset(["COMPLETING", "PLANNED", "POWERING_DOWN", "POWER_DOWN", "POWER_UP"])
#: flags that a reservation sets, for jobs without it
_RESERVED = frozenset(["RESERVED", "MAINTENANCE"])


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


def serves(node: Node) -> bool:
    """Whether jobs start on a node, now or when it is free."""
    return node.responding and (_STARTS | _PASSES).issuperset(node.state)


def partitions(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...]:
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


def eligible(request: JobRequest, cluster: ClusterSnapshot, partition: str | None) -> Eligible:
    """How many tasks of the job each node can take.

    Of several alternatives of the constraint it is the one that leaves most room now.

    Raises
    ------
    PlacementError : the constraint is richer than placement reads; a reservation is unknown or holds no nodes now.
    """
    if not request.constraint:
        return _eligible(request, cluster, partition, "")
    found = [_eligible(request, cluster, partition, text) for text in alternatives(request.constraint)]
    return max(found, key=lambda each: (int(each.now.sum()), int(each.once_idle.sum())))


def _eligible(request: JobRequest, cluster: ClusterSnapshot, partition: str | None, constraint: str) -> Eligible:
    """Each kind of node is looked at once; the numbers of the nodes are arrays."""
    exclusive = request.exclusive
    for known in cluster.partitions:
        if known.name == partition:
            exclusive = exclusive or known.oversubscribe == "EXCLUSIVE"
            if request.memory_per_cpu is None and request.memory_per_node is None:
                request = replace(request, memory_per_cpu=known.memory_per_cpu,
                                  memory_per_node=known.memory_per_node)
    reserved = _reserved(request, cluster)
    refusals = _Refusals(cluster)
    refusals.of_kinds([_refusal(kind, partition, constraint, reserved is not None) for kind in cluster.kinds])
    refusals.of_nodes("excluded", request.exclude)
    if reserved is not None:
        refusals.of_others("not in the reservation", reserved)
    refusals.of_nodes("reserved", {name for other in cluster.reservations if other.active
                                   and other.name not in request.reservation.split(",") for name in other.nodes})
    whole = _tasks(request, cluster, cluster.cpus, cluster.memory, used=False)
    once_idle = np.where(refusals.none(), whole, 0)
    refusals.where("too small", once_idle == 0)
    starts = np.array([_STARTS.issuperset(set(kind.state) - (_RESERVED if reserved else set()))
                       for kind in cluster.kinds], bool)[cluster.kind]
    if exclusive:
        starts &= cluster.cpus_free == cluster.cpus
    free = _tasks(request, cluster, cluster.cpus_free, cluster.memory_free, used=True)
    now = np.where(refusals.none() & starts, np.minimum(free, once_idle), 0)
    refusals.where("busy", now == 0)
    return Eligible(now, once_idle, refusals.counts())


class _Refusals:
    """Why each node is refused: of several reasons the first that was told."""

    def __init__(self, cluster: ClusterSnapshot) -> None:
        self.cluster = cluster
        self.reasons = [""]
        self.code = np.zeros(len(cluster.names), np.int64)

    def none(self) -> BoolArray:
        return np.asarray(self.code == 0)

    def where(self, reason: str, refused: BoolArray) -> None:
        self.code[refused & self.none()] = self._code(reason)

    def of_kinds(self, reasons: Sequence[str]) -> None:
        """One reason for each kind of node, "" for none."""
        if reasons:
            self.code = np.array([self._code(reason) for reason in reasons], np.int64)[self.cluster.kind]

    def of_nodes(self, reason: str, names: Iterable[str]) -> None:
        self.where(reason, self._named(names))

    def of_others(self, reason: str, names: Iterable[str]) -> None:
        self.where(reason, ~self._named(names))

    def counts(self) -> dict[str, int]:
        count = np.bincount(self.code, minlength=len(self.reasons)).tolist()
        return {reason: nodes for reason, nodes in zip(self.reasons, count, strict=True) if reason and nodes}

    def _code(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)

    def _named(self, names: Iterable[str]) -> BoolArray:
        named: BoolArray = np.zeros(len(self.cluster.names), bool)
        wanted = frozenset(names)
        if wanted:
            named[[i for i, name in enumerate(self.cluster.names) if name in wanted]] = True
        return named


def _reserved(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...] | None:
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


def _refusal(kind: Kind, partition: str | None, constraint: str, reserved: bool) -> str:
    if partition is not None and partition not in kind.partitions:
        return "not in the partition"
    if constraint and not fulfils(kind.features, constraint):
        return "without the features"
    if not kind.responding:
        return "not responding"
    good = _STARTS | _PASSES | (_RESERVED if reserved else frozenset())
    bad = next((flag for flag in kind.state if flag not in good), None)
    return bad.lower() if bad else ""


def _tasks(request: JobRequest, cluster: ClusterSnapshot, cpus: IntArray, memory: IntArray, used: bool) -> IntArray:
    """Tasks that fit into so many CPUs and MB of each node, and into its generic resources, or those not in use."""
    cpus_per_task = request.cpus_per_task or 1
    tasks = cpus // cpus_per_task
    if request.memory_per_cpu:
        tasks = np.minimum(tasks, memory // (request.memory_per_cpu * cpus_per_task))
    elif request.memory_per_node:
        tasks = np.where(memory >= request.memory_per_node, tasks, 0)
    else:
        # --mem=0, or no --mem and no default that is known: the job takes, or may take, all of the node's memory
        tasks = np.where(memory == cluster.memory, tasks, 0)
    if request.gres_per_node:
        enough = [all(_gres(kind.gres, name) - (_gres(kind.gres_used, name) if used else 0) >= count
                      for name, count in request.gres_per_node.items()) for kind in cluster.kinds]
        tasks = np.where(np.array(enough, bool)[cluster.kind], tasks, 0)
    return np.asarray(tasks, np.int64)


def _gres(counts: Iterable[tuple[str, int]], name: str) -> int:
    """Count of a generic resource; a name without a type stands for all types."""
    return sum(count for key, count in counts if key == name or key.startswith(f"{name}:"))
