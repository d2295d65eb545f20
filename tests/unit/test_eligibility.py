"""Eligible nodes: constraints evaluated like slurmctld, reservations, several partitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import cluster, node

from slurmdl.cluster.snapshot import ClusterSnapshot, Partition, Reservation
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.placement.eligibility import (
    candidate_partitions,
    constraint_alternatives,
    eligible_tasks,
    satisfies_features,
)

#: features of each node, one letter each, in addition to z
FEATURES = ("", "a", "b", "ab", "c", "ac", "bc", "abc")


# nodes that slurmctld 22.05.8 accepts: `sbatch --test-only -N1 -w NODE -C TEXT` for each of the eight nodes
@pytest.mark.parametrize(("text", "accepted"), [
    ("a", "1357"), ("a&b", "37"), ("a|b", "123567"), ("a&b|c", "34567"), ("a|b&c", "567"), ("(a&b)|c", "34567"),
    ("a|(b&c)", "13567"), ("c|(a|b)", "1234567"), ("(a|b)&c", "567"), ("c&(a|b)", "567"), ("a,b", "37"),
    ("(a)", "1357"), ("a&(b&c)", "7"), ("a|b|(b&c)", "123567"), ("(a&b)|(b&c)", "367"), ("(a|b)&(b|c)", "23567"),
    ("z&a", "1357"),
])
def test_constraint_is_evaluated_like_slurmctld(text: str, accepted: str) -> None:
    (expression,) = constraint_alternatives(text)
    assert "".join(str(i) for i, letters in enumerate(FEATURES)
                   if satisfies_features({"z", *letters}, expression)) == accepted


@pytest.mark.parametrize("text", ["a*1", "[a*1&b*1]", "[(a|b)*1&(c)*2]", "[a&b]", "z&[a|b]", "!a", "((a))", "a&&b",
                                  "a&", "|a", "(a&b", "a)", "()", "a b", "", "[]"])
def test_unsupported_constraint_is_an_error(text: str) -> None:
    with pytest.raises(PlacementError, match="constraint too rich"):
        constraint_alternatives(text)


def test_one_alternative_applies_to_all_nodes() -> None:
    nodes = cluster(*(node(f"n{i}", features=tuple(letters)) for i, letters in enumerate(FEATURES)))
    eligible = eligible_tasks(JobRequest(constraint="[d|(a&b)|c]"), nodes, "main")
    assert eligible.tasks_now.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert eligible.rejection_counts == {"without the features": 4}


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
])
def test_reservation_holds_its_nodes(reservation: str, expected: list[int], rejected: dict[str, int]) -> None:
    """Powered-down nodes have no reservation flag, so the node list of the reservation counts as well."""
    eligible = eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")
    assert eligible.tasks_now.tolist() == eligible.tasks_when_idle.tolist() == expected
    assert eligible.rejection_counts == rejected


@pytest.mark.parametrize(("reservation", "message"), [
    ("other", "reservation other is unknown; known: mine, later, service"), ("later", "holds no nodes now"),
])
def test_unusable_reservation_is_an_error(reservation: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")


def test_partitions_are_sorted_by_priority_like_in_slurm() -> None:
    snapshot = replace(SNAPSHOT, partitions=(Partition("a"), Partition("b", priority=5), Partition("c")))
    assert candidate_partitions(JobRequest(partitions=("a", "c", "b")), snapshot) == ("b", "a", "c")


def test_partitions_that_are_not_up_are_skipped() -> None:
    partitions = (Partition("a", state="DOWN"), Partition("b"), Partition("c", state="DRAIN"))
    snapshot = replace(SNAPSHOT, partitions=partitions)
    assert candidate_partitions(JobRequest(partitions=("a", "b", "c")), snapshot) == ("b",)
    with pytest.raises(PlacementError, match="partition a is DOWN"):
        candidate_partitions(JobRequest(partitions=("a", "c")), snapshot)


def test_each_node_is_rejected_for_one_reason() -> None:
    request = JobRequest(constraint="fast", exclude=("n1", "gone"), cpus_per_task=3)
    eligible = eligible_tasks(request, cluster(
        node("n1", "DOWN"), node("n2", features=("fast",), cpus=2, cpus_unallocated=2),
        node("n3", features=("fast",)), node("n4", "MIXED", features=("fast",), cpus_unallocated=2)), "main")
    assert eligible.tasks_now.tolist() == [0, 0, 1, 0]
    assert eligible.rejection_counts == {"without the features": 1, "too small": 1, "busy": 1}
