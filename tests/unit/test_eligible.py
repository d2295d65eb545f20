"""Who is eligible: constraints as slurmctld reads them, reservations, several partitions."""

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

#: nodes with these features, one letter each, besides z, in the order of the answers below
FEATURES = ("", "a", "b", "ab", "c", "ac", "bc", "abc")


# what slurmctld 22.05.8 accepts: `sbatch --test-only -N1 -w NODE -C TEXT` for each of the eight nodes
@pytest.mark.parametrize(("text", "accepted"), [
    ("a", "1357"), ("a&b", "37"), ("a|b", "123567"), ("a&b|c", "34567"), ("a|b&c", "567"), ("(a&b)|c", "34567"),
    ("a|(b&c)", "13567"), ("c|(a|b)", "1234567"), ("(a|b)&c", "567"), ("c&(a|b)", "567"), ("a,b", "37"),
    ("(a)", "1357"), ("a&(b&c)", "7"), ("a|b|(b&c)", "123567"), ("(a&b)|(b&c)", "367"), ("(a|b)&(b|c)", "23567"),
    ("z&a", "1357"),
])
def test_a_constraint_is_read_as_slurmctld_does(text: str, accepted: str) -> None:
    (only,) = constraint_alternatives(text)
    assert "".join(str(i) for i, letters in enumerate(FEATURES)
                   if satisfies_features({"z", *letters}, only)) == accepted


@pytest.mark.parametrize("text", ["a*1", "[a*1&b*1]", "[(a|b)*1&(c)*2]", "[a&b]", "z&[a|b]", "!a", "((a))", "a&&b",
                                  "a&", "|a", "(a&b", "a)", "()", "a b", "", "[]"])
def test_constraint_too_rich(text: str) -> None:
    with pytest.raises(PlacementError, match="constraint too rich"):
        constraint_alternatives(text)


def test_one_alternative_holds_for_all_nodes() -> None:
    nodes = cluster(*(node(f"n{i}", features=tuple(letters)) for i, letters in enumerate(FEATURES)))
    found = eligible_tasks(JobRequest(constraint="[d|(a&b)|c]"), nodes, "main")
    assert found.tasks_now.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert found.rejection_counts == {"without the features": 4}


SNAPSHOT = ClusterSnapshot.from_nodes(
    [node("n1"), node("n2", "IDLE+RESERVED"), node("n3"), node("n4", "IDLE+MAINTENANCE"), node("n5")],
    (Partition("main", True),),
    (Reservation("mine", ("n2", "n3", "elsewhere")), Reservation("later", ("n5",), active=False),
     Reservation("service", ("n4",))))


@pytest.mark.parametrize(("reservation", "expected", "refused"), [
    ("", [4, 0, 0, 0, 4], {"reserved": 2, "maintenance": 1}),
    ("mine", [0, 4, 4, 0, 0], {"not in the reservation": 3}),
    ("mine,service", [0, 4, 4, 4, 0], {"not in the reservation": 2}),
    ("service,later", [0, 0, 0, 4, 0], {"not in the reservation": 4}),
])
def test_a_reservation_holds_its_nodes(reservation: str, expected: list[int], refused: dict[str, int]) -> None:
    """A powered-down node carries no flag of it: the nodes of the reservation count, too."""
    found = eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")
    assert found.tasks_now.tolist() == found.tasks_when_idle.tolist() == expected
    assert found.rejection_counts == refused


@pytest.mark.parametrize(("reservation", "says"), [
    ("other", "reservation other is unknown; known: mine, later, service"), ("later", "holds no nodes now"),
])
def test_no_such_reservation(reservation: str, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        eligible_tasks(JobRequest(reservation=reservation), SNAPSHOT, "main")


def test_partitions_come_in_the_order_in_which_slurm_tries_them() -> None:
    snapshot = replace(SNAPSHOT, partitions=(Partition("a"), Partition("b", priority=5), Partition("c")))
    assert candidate_partitions(JobRequest(partitions=("a", "c", "b")), snapshot) == ("b", "a", "c")


def test_each_node_is_refused_once() -> None:
    found = eligible_tasks(JobRequest(constraint="fast", exclude=("n1", "gone"), cpus_per_task=3), cluster(
        node("n1", "DOWN"), node("n2", features=("fast",), cpus=2, cpus_unallocated=2), node("n3", features=("fast",)),
        node("n4", "MIXED", features=("fast",), cpus_unallocated=2)), "main")
    assert found.tasks_now.tolist() == [0, 0, 1, 0]
    assert found.rejection_counts == {"without the features": 1, "too small": 1, "busy": 1}
