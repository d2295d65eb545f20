"""Eligible nodes: their states, what a job needs of each, constraints as slurmctld evaluates them, and partitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import cluster, node

from slurmdl.cluster.snapshot import ClusterSnapshot, Partition, Reservation
from slurmdl.errors import PlacementError
from slurmdl.gpu_request import GpuRequest
from slurmdl.job_request import JobRequest
from slurmdl.placement.eligibility import (
    candidate_partitions,
    constraint_alternatives,
    eligible_tasks,
    satisfies_features,
)

#: features of each node, one letter each, in addition to z
FEATURES = ("", "a", "b", "ab", "c", "ac", "bc", "abc")


@pytest.mark.parametrize(("state", "tasks"), [
    ("IDLE", (4, 4, 4)), ("MIXED", (4, 4, 4)), ("IDLE+CLOUD", (4, 4, 4)), ("IDLE+CLOUD+POWERED_DOWN", (0, 4, 4)),
    ("MIXED+POWERING_UP", (0, 4, 4)), ("IDLE+PLANNED", (0, 0, 4)), ("IDLE+COMPLETING", (0, 0, 4)),
    *((state, (0, 0, 0)) for state in ("DOWN", "IDLE+DRAIN", "IDLE+MAINTENANCE", "IDLE+RESERVED", "UNKNOWN", "FUTURE",
                                       "IDLE+FAIL", "IDLE+INVALID_REG")),
])
def test_node_state_limits_the_tasks(state: str, tasks: tuple[int, int, int]) -> None:
    eligible = eligible_tasks(JobRequest(), cluster(node("n1", state)), "main")
    assert (*eligible.tasks_up, *eligible.tasks_now, *eligible.tasks_when_idle) == tasks


@pytest.mark.parametrize(("request_", "expected"), [
    (JobRequest(), [4, 0, 4]), (JobRequest(memory_per_node_mb=400), [4, 2, 4]),
    (JobRequest(cpus_per_task=3), [1, 0, 1]), (JobRequest(memory_per_cpu_mb=200), [4, 2, 4]),
    (JobRequest(memory_per_cpu_mb=300, cpus_per_task=2), [1, 0, 1]), (JobRequest(memory_per_node_mb=2000), [0, 0, 0]),
    (JobRequest(exclusive=True, memory_per_node_mb=100), [4, 0, 4]), (JobRequest(constraint="fast"), [4, 0, 0]),
    (JobRequest(constraint="fast&big"), [0, 0, 0]), (JobRequest(constraint="big|fast"), [4, 0, 4]),
    (JobRequest(gres_per_node={"gpu": 1}, memory_per_node_mb=1), [0, 2, 4]),
    (JobRequest(gres_per_node={"gpu:a100": 2}, memory_per_node_mb=1), [0, 0, 4]),
    (JobRequest(gres_per_node={"gpu:h100": 1}), [0, 0, 0]), (JobRequest(exclude=("n1",)), [0, 0, 4]),
    (JobRequest(ntasks_per_node=4, memory_per_node_mb=1), [4, 0, 4]),
    *((JobRequest(gpus=gpus, memory_per_node_mb=1), expected) for gpus, expected in (
        (GpuRequest(cpus_per_gpu=1), [0, 2, 4]), (GpuRequest(cpus_per_gpu=3), [0, 0, 4]),
        (GpuRequest(per_node=2), [0, 0, 4]), (GpuRequest(per_task=1), [0, 1, 2]), (GpuRequest("gpu:h100"), [0, 0, 0]),
        (GpuRequest(memory_per_gpu_mb=400), [0, 2, 4]), (GpuRequest(memory_per_gpu_mb=600), [0, 0, 4]),
        (GpuRequest(per_node=2, memory_per_gpu_mb=600), [0, 0, 0]))),
    (JobRequest(gpus=GpuRequest(cpus_per_gpu=3), exclusive=True, memory_per_node_mb=1), [0, 0, 0]),
])
def test_request_limits_the_tasks_per_node(request_: JobRequest, expected: list[int]) -> None:
    nodes = cluster(node("n1", features=("fast",)),
                    node("n2", "MIXED", cpus_unallocated=2, memory_unallocated=500, gres={"gpu:a100": 2},
                         gres_used={"gpu:a100": 1}),
                    node("n3", features=("big",), gres={"gpu:a100": 2}))
    assert eligible_tasks(request_, nodes, "main").tasks_now.tolist() == expected


@pytest.mark.parametrize(("partition", "request_", "expected"), [
    (Partition("main"), JobRequest(), 0), (Partition("main", memory_per_cpu=250), JobRequest(), 2),
    (Partition("main", memory_per_cpu=300), JobRequest(), 1),
    (Partition("main", memory_per_node=600), JobRequest(), 0),
    (Partition("main", memory_per_node=600), JobRequest(memory_per_node_mb=0), 0),
    (Partition("main", memory_per_node=600), JobRequest(memory_per_node_mb=500), 2),
    (Partition("main", memory_per_node=600), JobRequest(memory_per_cpu_mb=250), 2)])
def test_memory_default_of_the_partition_applies(partition: Partition, request_: JobRequest, expected: int) -> None:
    nodes = (node("n1", "MIXED", cpus_unallocated=2, memory_unallocated=500),)
    snapshot = ClusterSnapshot.from_nodes(nodes, (partition,))
    assert eligible_tasks(request_, snapshot, "main").tasks_now.tolist() == [expected]


# nodes that slurmctld 22.05.8 accepts: `sbatch --test-only -N1 -w NODE -C TEXT` for each of the eight nodes
@pytest.mark.parametrize(("text", "accepted"), [
    ("a", "1357"), ("a&b", "37"), ("a|b", "123567"), ("a&b|c", "34567"), ("a|b&c", "567"), ("(a&b)|c", "34567"),
    ("a|(b&c)", "13567"), ("c|(a|b)", "1234567"), ("(a|b)&c", "567"), ("c&(a|b)", "567"), ("a,b", "37"),
    ("(a)", "1357"), ("a&(b&c)", "7"), ("a|b|(b&c)", "123567"), ("(a&b)|(b&c)", "367"), ("(a|b)&(b|c)", "23567"),
    ("z&a", "1357"),
    *((text, "constraint too rich") for text in (
        "a*1", "[a*1&b*1]", "[(a|b)*1&(c)*2]", "[a&b]", "z&[a|b]", "!a", "((a))", "a&&b", "a&", "|a", "(a&b", "a)",
        "()", "a b", "", "[]")),
])
def test_constraint_is_evaluated_like_slurmctld(text: str, accepted: str) -> None:
    if not accepted.isdigit():
        with pytest.raises(PlacementError, match=accepted):
            constraint_alternatives(text)
        return
    (expression,) = constraint_alternatives(text)
    assert "".join(str(i) for i, letters in enumerate(FEATURES)
                   if satisfies_features({"z", *letters}, expression)) == accepted


def test_one_alternative_applies_to_all_nodes() -> None:
    nodes = cluster(*(node(f"n{i}", features=tuple(letters)) for i, letters in enumerate(FEATURES)))
    eligible = eligible_tasks(JobRequest(constraint="[d|(a&b)|c]"), nodes, "main")
    assert eligible.tasks_now.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert eligible.rejection_counts == {"without the features": 4}


def test_alternative_constraint_whose_nodes_are_up_counts() -> None:
    nodes = cluster(*(node(f"a{i}", "IDLE+POWERED_DOWN", features=("a",)) for i in range(3)),
                    node("b1", features=("b",)))
    eligible = eligible_tasks(JobRequest(constraint="[a|b]"), nodes, "main")
    assert (eligible.tasks_up.tolist(), eligible.tasks_now.tolist()) == ([0, 0, 0, 4], [4, 4, 4, 0])


SNAPSHOT = ClusterSnapshot.from_nodes(
    [node("n1"), node("n2", "IDLE+RESERVED"), node("n3"), node("n4", "IDLE+MAINTENANCE"), node("n5")],
    (Partition("main", True),),
    (Reservation("mine", ("n2", "n3", "elsewhere")), Reservation("later", ("n5",), active=False),
     Reservation("service", ("n4",))))


@pytest.mark.parametrize(("reservation", "expected", "rejected"), [
    ("", [4, 0, 0, 0, 4], {"reserved": 2, "maintenance": 1}),
    ("mine", [0, 4, 4, 0, 0], {"not in the reservation": 3}),
    ("mine,service", [0, 4, 4, 4, 0], {"not in the reservation": 2}),
    ("service,later", [0, 0, 0, 4, 0], {"not in the reservation": 4}),
    ("other", [], "reservation other is unknown; known: mine, later, service"),
    ("later", [], "reservation later holds no nodes now"),
])
def test_reservation_holds_its_nodes(reservation: str, expected: list[int], rejected: dict[str, int] | str) -> None:
    """Powered-down nodes have no reservation flag, so the node list of the reservation counts as well."""
    if isinstance(rejected, str):
        with pytest.raises(PlacementError, match=rejected):
            eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")
        return
    eligible = eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")
    assert eligible.tasks_now.tolist() == eligible.tasks_when_idle.tolist() == expected
    assert eligible.rejection_counts == rejected


@pytest.mark.parametrize(("partitions", "requested", "expected"), [
    ((Partition("a"), Partition("b", priority=5), Partition("c")), ("a", "c", "b"), ("b", "a", "c")),
    ((Partition("a", state="DOWN"), Partition("b"), Partition("c", state="DRAIN")), ("a", "b", "c"), ("b",)),
    ((Partition("a", state="DOWN"), Partition("c", state="DRAIN")), ("a", "c"), "partition a is DOWN"),
    ((Partition("a"), Partition("b", True)), (), ("b",)), ((), ("x",), ("x",)),
    ((Partition("a"), Partition("b")), (), "no partition is given and none is the default"),
    ((Partition("a"), Partition("b")), ("a", "none"), "partition none is unknown; known: a, b"),
])
def test_partitions_are_tried_as_in_slurm(partitions: tuple[Partition, ...], requested: tuple[str, ...],
                                          expected: tuple[str, ...] | str) -> None:
    """By priority, and only those that are up."""
    nodes, request = replace(SNAPSHOT, partitions=partitions), JobRequest(partitions=requested)
    if isinstance(expected, str):
        with pytest.raises(PlacementError, match=expected):
            candidate_partitions(request, nodes)
    else:
        assert candidate_partitions(request, nodes) == expected


def test_each_node_is_rejected_for_one_reason() -> None:
    request = JobRequest(constraint="fast", exclude=("n1", "gone"), cpus_per_task=3)
    eligible = eligible_tasks(request, cluster(
        node("n1", "DOWN"), node("n2", features=("fast",), cpus=2, cpus_unallocated=2),
        node("n3", features=("fast",)), node("n4", "MIXED", features=("fast",), cpus_unallocated=2)), "main")
    assert eligible.tasks_now.tolist() == [0, 0, 1, 0]
    assert eligible.rejection_counts == {"without the features": 1, "too small": 1, "busy": 1}
