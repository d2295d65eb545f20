"""Size of a job, the nodes that can serve it, and how many of its tasks each can take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, NodeProfile
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest, JobSize
from slurmdl.placement.arrays import BoolArray, IntArray
from slurmdl.slurm.step_layout import block_distribution

# states and flags in which a node can start a job now, and those in which it boots for the job
_UP_STATES = frozenset(["IDLE", "MIXED", "ALLOCATED", "CLOUD", "DYNAMIC_NORM"])
_START_STATES = _UP_STATES | {"POWERED_DOWN", "POWERING_UP"}
# flags that end by themselves: the node can serve the job later
_TRANSIENT_STATES = frozenset(["COMPLETING", "PLANNED", "POWERING_DOWN", "POWER_DOWN", "POWER_UP"])
_RESERVATION_STATES = frozenset(["RESERVED", "MAINTENANCE"])  # flags of a reservation, for jobs outside it

# grammar of --constraint; groups do not nest
_FEATURE = r"[\w.:/+=-]+"
_TERM = rf"(?:{_FEATURE}|\({_FEATURE}(?:[&|]{_FEATURE})*\))"
_EXPRESSION = re.compile(rf"{_TERM}(?:[&|]{_TERM})*")
_MATCHING_OR = re.compile(rf"\[{_TERM}(?:\|{_TERM})*\]")  # all nodes of the job need the same term
_OPERATOR_AND_TERM = re.compile(rf"([&|]?)({_TERM})")


def split_tasks(request: JobRequest, size: JobSize, max_tasks: Sequence[int]) -> list[int]:
    """Tasks per node as Slurm 22.05 allocates their CPUs (select/cons_tres, CPUs or cores of one thread).

    Without a number of tasks per node, each node in Slurm's order takes all it can, and leaves one CPU for each of
    the next nodes: `-N 3 -n 10` gives 8, 1, 1 (_cpus_to_use in src/plugins/select/cons_tres/job_test.c).

    Args:
        max_tasks: tasks that each node of the job can take, in Slurm's order.
    """
    if request.options.ranks_per_node:
        return [request.options.ranks_per_node] * size.nodes
    if request.ntasks_per_node or request.exclusive:
        limits = [request.ntasks_per_node or limit for limit in max_tasks]
        return block_distribution(limits, size.tasks)
    cpus_per_task, gpus = request.cpus_per_task or 1, request.gpus
    min_cpus = max(cpus_per_task, gpus.cpus_per_gpu * max(gpus.per_node, 1) if gpus else 0)
    remaining = max(size.tasks * cpus_per_task, size.nodes * min_cpus)
    limits = []
    for further_nodes, limit in zip(reversed(range(size.nodes)), max_tasks, strict=True):
        cpus = min(limit * cpus_per_task, max(remaining - further_nodes, min_cpus))
        limits.append(cpus // cpus_per_task)
        remaining -= cpus
    return block_distribution(limits, size.tasks)


@dataclass(frozen=True, eq=False)
class EligibleTasks:
    """Tasks that the nodes of one partition can take, and numbers of rejected nodes by reason.

    `tasks_now` counts the free resources, `tasks_up` those of nodes that need not boot first, `tasks_when_idle` the
    whole node; shape (nodes of the snapshot,). `exclusive`: the job or its partition takes whole nodes.
    """

    tasks_up: IntArray
    tasks_now: IntArray
    tasks_when_idle: IntArray
    exclusive: bool
    rejection_counts: Mapping[str, int]


def is_idle(node: Node) -> bool:
    """Whether the whole node could start a job now, or once it has booted."""
    return node.responding and "IDLE" in node.state and _START_STATES.issuperset(node.state)


def is_in_service(node: Node) -> bool:
    """Whether the node starts jobs, now or when it is free."""
    return node.responding and (_START_STATES | _TRANSIENT_STATES).issuperset(node.state)


def candidate_partitions(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...]:
    """Partitions that the job may start in, in the order in which Slurm tries them; as requested if none is known.

    Raises PlacementError if a partition is unknown, if none of them is up, or if there is no default.
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
    up = [name for name in wanted if known[name].state == "UP"]
    if not up:
        raise PlacementError(f"partition {wanted[0]} is {known[wanted[0]].state}")
    return tuple(sorted(up, key=lambda name: -known[name].priority))


def eligible_tasks(request: JobRequest, cluster: ClusterSnapshot, partition: str | None) -> EligibleTasks:
    """Tasks of the job that each node can take; of alternative constraints those with most tasks count.

    Raises PlacementError for an unsupported constraint, or a reservation that is unknown or has no nodes now.
    """
    if not request.constraint:
        return _eligible_tasks(request, cluster, partition, "")
    alternatives = [_eligible_tasks(request, cluster, partition, expression)
                    for expression in constraint_alternatives(request.constraint)]
    most = max(alternatives, key=lambda tasks: (int(tasks.tasks_now.sum()), int(tasks.tasks_when_idle.sum())))
    return replace(most, tasks_up=max((tasks.tasks_up for tasks in alternatives), key=np.sum),
                   tasks_when_idle=max((tasks.tasks_when_idle for tasks in alternatives), key=np.sum))


def _eligible_tasks(request: JobRequest, cluster: ClusterSnapshot, partition: str | None,
                    constraint: str) -> EligibleTasks:
    """Eligible tasks for one constraint expression; each node profile is evaluated once."""
    exclusive = request.exclusive
    for known in cluster.partitions:
        if known.name == partition:
            exclusive = exclusive or known.oversubscribe == "EXCLUSIVE"
            if request.memory_per_cpu_mb is None and request.memory_per_node_mb is None \
                    and not (request.gpus and request.gpus.memory_per_gpu_mb):
                request = replace(request, memory_per_cpu_mb=known.memory_per_cpu,
                                  memory_per_node_mb=known.memory_per_node)
    reserved = _reserved_nodes(request, cluster)
    reasons = [_profile_rejection_reason(profile, partition, constraint, reserved is not None)
               for profile in cluster.profiles]
    rejection_counts: Counter[str] = Counter()
    node_counts = np.bincount(cluster.profile_index, minlength=len(reasons)).tolist()
    for reason, count in zip(reasons, node_counts, strict=True):
        rejection_counts[reason] += count if reason else 0
    accepted = np.array([not reason for reason in reasons], bool)[cluster.profile_index]

    def reject(reason: str, rejected: BoolArray) -> None:
        """Count the nodes that are not rejected yet: the first of several reasons counts."""
        rejection_counts[reason] += int((rejected & accepted).sum())
        accepted[rejected] = False

    reject("excluded", _node_mask(cluster, request.exclude))
    if reserved is not None:
        reject("not in the reservation", ~_node_mask(cluster, reserved))
    own_reservations = request.reservation.split(",")
    reject("reserved", _node_mask(cluster, (
        name for reservation in cluster.reservations
        if reservation.active and reservation.name not in own_reservations for name in reservation.nodes)))
    request = replace(request, exclusive=exclusive)
    on_whole_node = _tasks_that_fit(request, cluster, cluster.cpus, cluster.memory, subtract_used=False)
    when_idle = np.where(accepted, on_whole_node, 0)
    reject("too small", when_idle == 0)
    ignored = _RESERVATION_STATES if reserved else frozenset()

    def in_states(states: frozenset[str]) -> BoolArray:
        return np.array([states.issuperset(set(profile.state) - ignored) for profile in cluster.profiles],
                        bool)[cluster.profile_index]

    can_start = in_states(_START_STATES)
    if exclusive:
        can_start &= cluster.cpus_unallocated == cluster.cpus
    free = _tasks_that_fit(request, cluster, cluster.cpus_unallocated, cluster.memory_unallocated, subtract_used=True)
    now = np.where(accepted & can_start, np.minimum(free, when_idle), 0)
    reject("busy", now == 0)
    return EligibleTasks(np.where(in_states(_UP_STATES), now, 0), now, when_idle, exclusive, +rejection_counts)


def _node_mask(cluster: ClusterSnapshot, names: Iterable[str]) -> BoolArray:
    named = frozenset(names)
    mask: BoolArray = np.zeros(len(cluster.names), bool)
    if named:
        mask[[i for i, name in enumerate(cluster.names) if name in named]] = True
    return mask


def _reserved_nodes(request: JobRequest, cluster: ClusterSnapshot) -> tuple[str, ...] | None:
    """Nodes of the active reservations that the job names; None if it names none."""
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
    usable = _START_STATES | _TRANSIENT_STATES | (_RESERVATION_STATES if reserved else frozenset())
    return next((flag.lower() for flag in profile.state if flag not in usable), "")


def _tasks_that_fit(request: JobRequest, cluster: ClusterSnapshot, cpus: IntArray, memory: IntArray,
                    subtract_used: bool) -> IntArray:
    """Tasks that fit into these CPUs and MB of each node, and into its generic resources or the unused ones."""
    cpus_per_task, gpus = request.cpus_per_task or 1, request.gpus
    if request.memory_per_cpu_mb:
        with_memory = np.minimum(cpus, memory // request.memory_per_cpu_mb)
        # a whole node comes with all its CPUs
        cpus = np.where(with_memory < cpus, 0, cpus) if request.exclusive else with_memory
    tasks = cpus // cpus_per_task
    if request.memory_per_node_mb and not request.memory_per_cpu_mb:
        tasks = np.where(memory >= request.memory_per_node_mb, tasks, 0)
    elif not (request.memory_per_cpu_mb or (gpus and gpus.memory_per_gpu_mb)):
        # --mem=0, or no --mem and an unknown default: the job may take all of the node's memory
        tasks = np.where(memory == cluster.memory, tasks, 0)

    def free_count(name: str) -> IntArray:
        return np.array([_gres_count(profile.gres, name) - subtract_used * _gres_count(profile.gres_used, name)
                         for profile in cluster.profiles], np.int64)[cluster.profile_index]

    for name, count in request.gres_per_node.items():
        tasks = np.where(free_count(name) >= count, tasks, 0)
    if gpus:
        usable = configured = free_count(gpus.name)
        if gpus.cpus_per_gpu:
            usable = np.minimum(usable, cpus // gpus.cpus_per_gpu)
        if gpus.memory_per_gpu_mb:
            usable = np.minimum(usable, memory // gpus.memory_per_gpu_mb)
        # a whole node comes with all its GPUs, and their CPUs and memory
        needed = np.maximum(gpus.per_node or 1, configured if request.exclusive else 0)
        tasks = np.where(usable >= needed, tasks, 0)
        if gpus.per_task:
            tasks = np.minimum(tasks, usable // gpus.per_task)
    if request.ntasks_per_node:
        tasks = np.where(tasks >= request.ntasks_per_node, tasks, 0)
    return np.asarray(tasks, np.int64)


def _gres_count(counts: Iterable[tuple[str, int]], name: str) -> int:
    """Count of a generic resource; a name without a type includes all types."""
    return sum(count for key, count in counts if key == name or key.startswith(f"{name}:"))


def constraint_alternatives(text: str) -> tuple[str, ...]:
    """Feature expressions of --constraint (sbatch(1), -C); all nodes of the job must satisfy the same one.

    `[a|b]` has two, an expression without brackets only itself. A comma equals `&`. Raises PlacementError for counts,
    other brackets and syntax errors. Slurm 22.05 ignores such constraints for a node list: with -w it starts
    `[a*1&b*1]` on two nodes that have only a.
    """
    text = text.strip().replace(",", "&")
    if _EXPRESSION.fullmatch(text):
        return (text,)
    if _MATCHING_OR.fullmatch(text):
        return tuple(re.findall(_TERM, text))
    raise PlacementError(f"constraint too rich: {text} (features, &, |, parentheses and [a|b] can be placed)")


def satisfies_features(features: Collection[str], expression: str) -> bool:
    """Whether these features satisfy an expression, evaluated left to right without precedence, like slurmctld."""
    value = True
    for operator, term in _OPERATOR_AND_TERM.findall(expression):
        operand = satisfies_features(features, term[1:-1]) if term.startswith("(") else term in features
        value = value or operand if operator == "|" else value and operand
    return value
