"""The choice of nodes: who is eligible, which zone, and what cannot be placed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, cluster, node, two_level

from slurmdl.cluster.snapshot import ClusterSnapshot, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.algorithms.apportion import fill_largest_first, water_fill
from slurmdl.placement.eligibility import eligible_tasks
from slurmdl.placement.job_size import JobSize, resolve_job_size
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

EIGHT = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
IDLE = cluster(*(node(f"n{i}") for i in range(1, 9)))


def busy(*names: str) -> ClusterSnapshot:
    """The eight nodes, these of them full."""
    return cluster(*(replace(n, state=("ALLOCATED",), cpus_unallocated=0, memory_unallocated=0) if n.name in names else n
                     for n in IDLE.nodes))


def test_the_zone_that_fits() -> None:
    found = place_job(JobRequest(nodes=(3, 3)), busy("n1", "n3"), EIGHT, SCORES)
    assert found.nodes_per_zone == {"z1": 3}
    assert found.free_now
    assert found.rank_map is not None
    assert found.rank_map.cost.inter_zone_bytes == 0


def test_the_tightest_zone_that_fits() -> None:
    found = place_job(JobRequest(nodes=(3, 3)), busy("n2"), EIGHT, SCORES)
    assert found.nodes == ("n4", "n6", "n8")
    assert [candidate.verdict for candidate in found.candidates] == [
        "chosen", "leaves a larger rest of the zone unused"]


def test_no_zone_fits_then_the_fewest_evenly() -> None:
    found = place_job(JobRequest(nodes=(6, 6)), IDLE, EIGHT, SCORES)
    assert found.nodes_per_zone == {"z0": 3, "z1": 3}
    assert [(candidate.label, candidate.verdict) for candidate in found.candidates[1:]] == [
        ("z0 x4 + z1 x2", "the same cost, less even"), ("z0", "too small, 4 of 6 nodes fit"),
        ("z1", "too small, 4 of 6 nodes fit")]


def test_fewest_zones_below_the_root() -> None:
    topology = two_level(["a1", "a2", "a3"], ["b1"], ["c1", "c2", "c3"])
    found = place_job(JobRequest(nodes=(4, 4)), cluster(*(node(name) for name in topology.nodes)), topology, SCORES)
    assert found.nodes_per_zone == {"z0": 2, "z2": 2}


@pytest.mark.parametrize(("where", "expected"), [("pack", 1), ("balance", 1), ("spread", 2)])
def test_place(where: str, expected: int) -> None:
    found = place_job(JobRequest(nodes=(2, 2), dl=DlOptions(place=where)), IDLE, EIGHT, SCORES)
    assert len(found.nodes_per_zone) == expected


def test_zone_option() -> None:
    found = place_job(JobRequest(nodes=(2, 2), dl=DlOptions(zone=("z1",))), IDLE, EIGHT, SCORES)
    assert found.nodes_per_zone == {"z1": 2}
    with pytest.raises(UsageError, match="valid: z0, z1, root"):
        place_job(JobRequest(nodes=(2, 2), dl=DlOptions(zone=("z9",))), IDLE, EIGHT, SCORES)


def test_a_slow_zone_and_a_slow_node_are_left_alone() -> None:
    scores = replace(SCORES, nodes={f"n{i}": LinkScore(1.0) for i in (1, 3, 5, 2)})
    found = place_job(JobRequest(nodes=(3, 3)), IDLE, EIGHT, scores)
    assert found.nodes == ("n4", "n6", "n8")


def test_slurms_weight_comes_before_the_link() -> None:
    heavy = cluster(*(replace(n, weight=100) if n.name in ("n1", "n2") else n for n in IDLE.nodes))
    scores = LinkScores(nodes={"n1": LinkScore(1e12), "n2": LinkScore(1e12)})
    assert not {"n1", "n2"} & set(place_job(JobRequest(nodes=(3, 3)), heavy, EIGHT, scores).nodes)


def test_not_free_now() -> None:
    found = place_job(JobRequest(nodes=(6, 6)), busy("n1", "n2", "n3"), EIGHT, SCORES)
    assert not found.free_now
    assert "not all of them are free now" in found.reason


def test_nodes_of_two_trees_are_not_joined() -> None:
    topology = build_topology([ZoneDecl("a", nodes=("n1",)), ZoneDecl("b", nodes=("n2",))], kind="tree", source="")
    with pytest.raises(PlacementError, match="no zone has 2 fitting nodes"):
        place_job(JobRequest(nodes=(2, 2)), IDLE, topology, SCORES)


def test_tasks_are_dealt_out_evenly() -> None:
    found = place_job(JobRequest(nodes=(2, 2), ntasks=5), IDLE, EIGHT, SCORES)
    assert found.rank_map is not None
    assert sorted(Counter(found.rank_map.nodes).values()) == [2, 3]


def test_the_partition_that_fits() -> None:
    snapshot = ClusterSnapshot.from_nodes(
        tuple(replace(n, partitions=("small",) if n.name == "n1" else ("big",)) for n in IDLE.nodes),
        (Partition("small", True), Partition("big"), Partition("closed", state="DOWN")))
    assert len(place_job(JobRequest(nodes=(3, 3), partitions=("small", "big")), snapshot, EIGHT, SCORES).nodes) == 3
    with pytest.raises(PlacementError, match="no zone has 3 fitting"):
        place_job(JobRequest(nodes=(3, 3)), snapshot, EIGHT, SCORES)
    with pytest.raises(PlacementError, match="is DOWN"):
        place_job(JobRequest(nodes=(1, 1), partitions=("closed",)), snapshot, EIGHT, SCORES)
    with pytest.raises(PlacementError, match="known: small, big, closed"):
        place_job(JobRequest(nodes=(1, 1), partitions=("none",)), snapshot, EIGHT, SCORES)


@pytest.mark.parametrize(("state", "now", "once"), [
    ("IDLE", 4, 4), ("MIXED", 4, 4), ("IDLE+CLOUD+POWERED_DOWN", 4, 4), ("IDLE+PLANNED", 0, 4),
    ("IDLE+COMPLETING", 0, 4), ("DOWN", 0, 0), ("IDLE+DRAIN", 0, 0), ("IDLE+MAINTENANCE", 0, 0),
    ("IDLE+RESERVED", 0, 0), ("UNKNOWN", 0, 0), ("FUTURE", 0, 0), ("IDLE+FAIL", 0, 0), ("IDLE+INVALID_REG", 0, 0),
])
def test_states(state: str, now: int, once: int) -> None:
    found = eligible_tasks(JobRequest(), cluster(node("n1", state)), "main")
    assert (found.tasks_now.tolist(), found.tasks_when_idle.tolist()) == ([now], [once])


@pytest.mark.parametrize(("request_", "expected"), [
    (JobRequest(), [4, 0, 4]), (JobRequest(memory_per_node_mb=400), [4, 2, 4]),
    (JobRequest(cpus_per_task=3), [1, 0, 1]), (JobRequest(memory_per_cpu_mb=200), [4, 2, 4]),
    (JobRequest(memory_per_cpu_mb=300, cpus_per_task=2), [1, 0, 1]), (JobRequest(memory_per_node_mb=2000), [0, 0, 0]),
    (JobRequest(exclusive=True, memory_per_node_mb=100), [4, 0, 4]), (JobRequest(constraint="fast"), [4, 0, 0]),
    (JobRequest(constraint="fast&big"), [0, 0, 0]), (JobRequest(constraint="big|fast"), [4, 0, 4]),
    (JobRequest(gres_per_node={"gpu": 1}, memory_per_node_mb=1), [0, 2, 4]),
    (JobRequest(gres_per_node={"gpu:a100": 2}, memory_per_node_mb=1), [0, 0, 4]),
    (JobRequest(gres_per_node={"gpu:h100": 1}), [0, 0, 0]), (JobRequest(exclude=("n1",)), [0, 0, 4]),
])
def test_what_fits(request_: JobRequest, expected: list[int]) -> None:
    snapshot = cluster(
        node("n1", features=("fast",)),
        node("n2", "MIXED", cpus_unallocated=2, memory_unallocated=500, gres={"gpu:a100": 2}, gres_used={"gpu:a100": 1}),
        node("n3", features=("big",), gres={"gpu:a100": 2}))
    assert eligible_tasks(request_, snapshot, "main").tasks_now.tolist() == expected


def test_default_memory_of_the_partition() -> None:
    nodes = (node("n1", "MIXED", cpus_unallocated=2, memory_unallocated=500),)
    for known, expected in ((Partition("main"), 0), (Partition("main", memory_per_cpu=250), 2),
                            (Partition("main", memory_per_cpu=300), 1), (Partition("main", memory_per_node=600), 0)):
        assert eligible_tasks(JobRequest(), ClusterSnapshot.from_nodes(
            nodes, (known,)), "main").tasks_now.tolist() == [expected]
    assert eligible_tasks(
    JobRequest(
        memory_per_node_mb=0), ClusterSnapshot.from_nodes(
            nodes, (known,)), "main").tasks_now.tolist() == [0]


@pytest.mark.parametrize(("request_", "expected"), [
    (JobRequest(), JobSize(1, 1)), (JobRequest(nodes=(3, 3)), JobSize(3, 3)),
    (JobRequest(nodes=(2, 2), ntasks_per_node=4), JobSize(2, 8)),
    (JobRequest(ntasks=8, ntasks_per_node=4), JobSize(2, 8)),
    (JobRequest(ntasks=1), JobSize(1, 1)), (JobRequest(nodes=(2, 2), ntasks=5), JobSize(2, 5)),
])
def test_shape(request_: JobRequest, expected: JobSize) -> None:
    assert resolve_job_size(request_) == expected


@pytest.mark.parametrize(("request_", "says"), [
    (JobRequest(ntasks=4), "not certain"), (JobRequest(nodes=(2, 4)), "not certain"),
    (JobRequest(nodes=(2, None)), "not certain"), (JobRequest(nodes=(4, 4), ntasks=2), "do not fill"),
    (JobRequest(nodes=(2, 2), ntasks=9, ntasks_per_node=4), "do not fit"),
])
def test_no_shape(request_: JobRequest, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        resolve_job_size(request_)


@pytest.mark.parametrize(("request_", "topology", "says"), [
    (JobRequest(nodes=(8, 8), exclude=("n1",)), EIGHT, "the most: 7 in root"),
    (JobRequest(unplaceable_reason="job array"), EIGHT, "job array"),
    (JobRequest(nodelist=("n1",)), EIGHT, "chosen already"), (JobRequest(), Topology.flat(["n1"]), "no zones"),
    (JobRequest(nodes=(2, 2), dl=DlOptions(strategy="ps", ps=2)), EIGHT, "--dl-ps=2"),
])
def test_no_choice(request_: JobRequest, topology: Topology, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        place_job(request_, IDLE, topology, SCORES)


@pytest.mark.parametrize(("room", "wanted", "level", "packed"), [
    ([4, 4, 2], 6, [2, 2, 2], [4, 0, 2]), ([5, 1, 3], 9, [5, 1, 3], [5, 1, 3]), ([4, 4], 1, [1, 0], [1, 0]),
    ([4, 3, 1], 4, [2, 1, 1], [4, 0, 0]),
])
def test_quotas(room: list[int], wanted: int, level: list[int], packed: list[int]) -> None:
    assert fill_largest_first(np.array(room), wanted).tolist() == packed
    assert water_fill(np.array(room), wanted).tolist() == level
