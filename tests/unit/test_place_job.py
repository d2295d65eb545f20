"""Placement of a job: eligible nodes, choice of zones, ties, several trees, and jobs that cannot be placed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, cluster, node, two_level

from slurmdl.cluster.snapshot import ClusterSnapshot, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, JobSize, resolve_job_size
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.candidate_nodes import build_candidate_nodes
from slurmdl.placement.eligibility import eligible_tasks
from slurmdl.placement.place import place_job
from slurmdl.placement.quotas import fill_largest_first, uneven_choices, water_fill
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

EIGHT = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
IDLE = cluster(*(node(f"n{i}") for i in range(1, 9)))
FOUR = two_level(*([f"n{4 * z + i:02d}" for i in range(4)] for z in range(4)))
FOUR_IDLE = cluster(*(node(name) for name in FOUR.nodes))


def busy(*names: str) -> ClusterSnapshot:
    """The eight nodes, with these allocated."""
    return cluster(*(replace(idle, state=("ALLOCATED",), cpus_unallocated=0, memory_unallocated=0)
                     if idle.name in names else idle for idle in IDLE.nodes))


def test_job_that_fits_one_zone_stays_in_it() -> None:
    placement = place_job(JobRequest(nodes=(3, 3)), busy("n1", "n3"), EIGHT, SCORES)
    assert placement.nodes_per_zone == {"z1": 3}
    assert placement.free_now
    assert placement.rank_map is not None
    assert placement.rank_map.cost.inter_zone_bytes == 0


def test_tightest_zone_wins() -> None:
    placement = place_job(JobRequest(nodes=(3, 3)), busy("n2"), EIGHT, SCORES)
    assert placement.nodes == ("n4", "n6", "n8")
    assert [candidate.verdict for candidate in placement.candidates] == [
        "chosen", "leaves more nodes of the zone unused"]


def test_job_larger_than_any_leaf_fills_the_fewest() -> None:
    """Of equal cost: for other jobs a whole leaf stays free, or a larger part of one."""
    placement = place_job(JobRequest(nodes=(6, 6)), IDLE, EIGHT, SCORES)
    assert placement.nodes_per_zone == {"z0": 4, "z1": 2}
    assert [(candidate.label, candidate.verdict) for candidate in placement.candidates[1:]] == [
        ("z0 x3 + z1 x3", "same cost, leaves more zones partly used"), ("z0", "too small, 4 of 6 nodes fit"),
        ("z1", "too small, 4 of 6 nodes fit")]


def test_fewest_leaves_below_the_root() -> None:
    topology = two_level(["a1", "a2", "a3"], ["b1"], ["c1", "c2", "c3"])
    placement = place_job(JobRequest(nodes=(4, 4)), cluster(*map(node, topology.nodes)), topology, SCORES)
    assert placement.nodes_per_zone == {"z0": 3, "z1": 1}


@pytest.mark.parametrize(("kind", "quotas"), [("tree", (3, 3, 3)), ("block", (4, 4, 1))])
def test_blocks_are_kept_whole(kind: str, quotas: tuple[int, ...]) -> None:
    """The even choice is faster for all-to-all traffic, by a tenth: too little to leave no block whole."""
    topology = replace(two_level(*([f"{zone}{i}" for i in range(4)] for zone in "abc")), kind=kind)
    request = JobRequest(nodes=(9, 9), dl=DlOptions(strategy="gossip"))
    placement = place_job(request, cluster(*map(node, topology.nodes)), topology, LinkScores(
        default_node_bandwidth=1e9, default_zone_bandwidth=(1e8,)))
    assert tuple(placement.nodes_per_zone.values()) == quotas
    even = "faster, but leaves more blocks partly used"
    assert [candidate.verdict for candidate in placement.candidates[1:2]] == (
        [even] if kind == "block" else ["1.11 times the time per iteration"])


def test_zone_option_restricts_the_nodes() -> None:
    placement = place_job(JobRequest(nodes=(2, 2), dl=DlOptions(zone=("z1",))), IDLE, EIGHT, SCORES)
    assert placement.nodes_per_zone == {"z1": 2}
    with pytest.raises(UsageError, match=r"--dl-zone=z9: .*z0, z1, root"):
        place_job(JobRequest(nodes=(2, 2), dl=DlOptions(zone=("z9",))), IDLE, EIGHT, SCORES)


def test_slow_zone_and_slow_node_are_avoided() -> None:
    scores = replace(SCORES, nodes={f"n{i}": LinkScore(1.0) for i in (1, 3, 5, 2)})
    placement = place_job(JobRequest(nodes=(3, 3)), IDLE, EIGHT, scores)
    assert placement.nodes == ("n4", "n6", "n8")


def test_slow_nodes_are_avoided_if_zones_are_declared_in_another_order() -> None:
    zones = [ZoneDecl("a", nodes=("a1", "a2", "a3")), ZoneDecl("b", nodes=("b1", "b2", "b3")),
             ZoneDecl("s1", children=("b",)), ZoneDecl("s2", children=("a",)), ZoneDecl("r", children=("s1", "s2"))]
    topology = build_topology(zones, kind="tree", source="")
    slow = LinkScores(nodes={f"a{i}": LinkScore(1e8) for i in (1, 2, 3)}, default_node_bandwidth=1.25e9)
    placement = place_job(JobRequest(nodes=(2, 2), ntasks=2), cluster(*map(node, topology.nodes)), topology, slow)
    assert placement.nodes_per_zone == {"b": 2}


def test_ranks_per_node_decide_the_traffic_and_tasks_the_nodes() -> None:
    request = JobRequest(DlOptions(launcher="auto:8"), nodes=(3, 3), ntasks_per_node=1)
    placement = place_job(request, busy("n1", "n3"), EIGHT, SCORES)  # nodes of 4 CPUs
    assert placement.nodes_per_zone == {"z1": 3} and placement.rank_map
    assert Counter(placement.rank_map.nodes) == dict.fromkeys(placement.nodes, 8)


def test_slurm_weight_precedes_the_link() -> None:
    heavy = cluster(*(replace(n, weight=100) if n.name in ("n1", "n2") else n for n in IDLE.nodes))
    scores = LinkScores(nodes={"n1": LinkScore(1e12), "n2": LinkScore(1e12)})
    assert not {"n1", "n2"} & set(place_job(JobRequest(nodes=(3, 3)), heavy, EIGHT, scores).nodes)


def test_busy_nodes_give_a_placement_that_is_not_free_now() -> None:
    placement = place_job(JobRequest(nodes=(6, 6)), busy("n1", "n2", "n3"), EIGHT, SCORES)
    assert not placement.free_now
    assert "not all of them are free now" in placement.reason


def test_switch_trees_are_not_joined() -> None:
    topology = build_topology([ZoneDecl("a", nodes=("n1",)), ZoneDecl("b", nodes=("n2",))], kind="tree", source="")
    with pytest.raises(PlacementError, match="no zone has 2 fitting nodes"):
        place_job(JobRequest(nodes=(2, 2)), IDLE, topology, SCORES)


@pytest.mark.parametrize("request_, partition, split", [
    (JobRequest(nodes=(2, 2), ntasks=5), "NO", [1, 4]),
    (JobRequest(nodes=(2, 2), ntasks=5, exclusive=True), "NO", [2, 3]),
    (JobRequest(nodes=(2, 2), ntasks=5), "EXCLUSIVE", [2, 3]),
    (JobRequest(nodes=(2, 2), ntasks=5, ntasks_per_node=3), "NO", [2, 3]),
])
def test_tasks_are_split_as_slurm_splits_them(request_: JobRequest, partition: str, split: list[int]) -> None:
    idle = ClusterSnapshot.from_nodes(IDLE.nodes, (Partition("main", True, oversubscribe=partition),))
    placement = place_job(request_, idle, EIGHT, SCORES)
    assert placement.rank_map is not None
    assert sorted(Counter(placement.rank_map.nodes).values()) == split


def test_partition_with_enough_nodes_is_used() -> None:
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


@pytest.mark.parametrize(("state", "tasks"), [
    ("IDLE", (4, 4, 4)), ("MIXED", (4, 4, 4)), ("IDLE+CLOUD", (4, 4, 4)), ("IDLE+CLOUD+POWERED_DOWN", (0, 4, 4)),
    ("MIXED+POWERING_UP", (0, 4, 4)), ("IDLE+PLANNED", (0, 0, 4)), ("IDLE+COMPLETING", (0, 0, 4)),
    ("DOWN", (0, 0, 0)), ("IDLE+DRAIN", (0, 0, 0)), ("IDLE+MAINTENANCE", (0, 0, 0)), ("IDLE+RESERVED", (0, 0, 0)),
    ("UNKNOWN", (0, 0, 0)), ("FUTURE", (0, 0, 0)), ("IDLE+FAIL", (0, 0, 0)), ("IDLE+INVALID_REG", (0, 0, 0)),
])
def test_node_state_limits_the_tasks(state: str, tasks: tuple[int, int, int]) -> None:
    eligible = eligible_tasks(JobRequest(), cluster(node("n1", state)), "main")
    assert (*eligible.tasks_up, *eligible.tasks_now, *eligible.tasks_when_idle) == tasks


@pytest.mark.parametrize(("count", "zones", "boots"), [(2, {"z1": 2}, False), (3, {"z0": 3}, True)])
def test_powered_down_nodes_are_used_only_if_too_few_are_up(count: int, zones: dict[str, int], boots: bool) -> None:
    """Zone z0 is powered down; of zone z1 two nodes are up."""
    states = ["IDLE+POWERED_DOWN"] * 3 + ["IDLE", "IDLE", "DOWN"]
    nodes = cluster(*(node(f"n{i}", state) for i, state in enumerate(states)))
    topology = two_level(["n0", "n1", "n2"], ["n3", "n4", "n5"])
    placement = place_job(JobRequest(nodes=(count, count)), nodes, topology, SCORES)
    assert (placement.nodes_per_zone, placement.free_now) == (zones, True)
    assert ("powered-down" in placement.reason) == boots


def test_alternative_constraint_whose_nodes_are_up_counts() -> None:
    nodes = cluster(*(node(f"a{i}", "IDLE+POWERED_DOWN", features=("a",)) for i in range(3)),
                    node("b1", features=("b",)))
    eligible = eligible_tasks(JobRequest(constraint="[a|b]"), nodes, "main")
    assert (eligible.tasks_up.tolist(), eligible.tasks_now.tolist()) == ([0, 0, 0, 4], [4, 4, 4, 0])


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
def test_request_limits_the_tasks_per_node(request_: JobRequest, expected: list[int]) -> None:
    snapshot = cluster(
        node("n1", features=("fast",)),
        node("n2", "MIXED", cpus_unallocated=2, memory_unallocated=500, gres={"gpu:a100": 2},
             gres_used={"gpu:a100": 1}),
        node("n3", features=("big",), gres={"gpu:a100": 2}))
    assert eligible_tasks(request_, snapshot, "main").tasks_now.tolist() == expected


def test_memory_default_of_the_partition_applies() -> None:
    nodes = (node("n1", "MIXED", cpus_unallocated=2, memory_unallocated=500),)
    for partition, expected in ((Partition("main"), 0), (Partition("main", memory_per_cpu=250), 2),
                            (Partition("main", memory_per_cpu=300), 1), (Partition("main", memory_per_node=600), 0)):
        snapshot = ClusterSnapshot.from_nodes(nodes, (partition,))
        assert eligible_tasks(JobRequest(), snapshot, "main").tasks_now.tolist() == [expected]
    assert eligible_tasks(JobRequest(memory_per_node_mb=0), snapshot, "main").tasks_now.tolist() == [0]


@pytest.mark.parametrize(("request_", "expected"), [
    (JobRequest(), JobSize(1, 1)), (JobRequest(nodes=(3, 3)), JobSize(3, 3)),
    (JobRequest(nodes=(2, 2), ntasks_per_node=4), JobSize(2, 8)),
    (JobRequest(ntasks=8, ntasks_per_node=4), JobSize(2, 8)),
    (JobRequest(ntasks=1), JobSize(1, 1)), (JobRequest(nodes=(2, 2), ntasks=5), JobSize(2, 5)),
])
def test_job_size_of_request(request_: JobRequest, expected: JobSize) -> None:
    assert resolve_job_size(request_) == expected


def test_first_nodes_take_the_remainder() -> None:
    assert [JobSize(3, 10).tasks_on_node(i) for i in range(3)] == [4, 3, 3]


@pytest.mark.parametrize(("request_", "message"), [
    (JobRequest(ntasks=4), "not certain"), (JobRequest(nodes=(2, 4)), "not certain"),
    (JobRequest(nodes=(2, None)), "not certain"), (JobRequest(nodes=(4, 4), ntasks=2), "do not fill"),
    (JobRequest(nodes=(2, 2), ntasks=9, ntasks_per_node=4), "do not fit"),
])
def test_uncertain_job_size_is_an_error(request_: JobRequest, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        resolve_job_size(request_)


@pytest.mark.parametrize(("request_", "topology", "message"), [
    (JobRequest(nodes=(8, 8), exclude=("n1",)), EIGHT, "the most: 7 in root"),
    (JobRequest(unplaceable_reason="job array"), EIGHT, "job array"),
    (JobRequest(nodelist=("n1",)), EIGHT, "chosen already"), (JobRequest(), Topology.flat(["n1"]), "no zones"),
    (JobRequest(nodes=(2, 2), dl=DlOptions(strategy="ps", ps=2)), EIGHT, "--dl-ps=2"),
])
def test_unplaceable_job_is_an_error(request_: JobRequest, topology: Topology, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        place_job(request_, IDLE, topology, SCORES)


@pytest.mark.parametrize(("available", "wanted", "even", "packed"), [
    ([4, 4, 2], 6, [2, 2, 2], [4, 0, 2]), ([5, 1, 3], 9, [5, 1, 3], [5, 1, 3]), ([4, 4], 1, [1, 0], [1, 0]),
    ([4, 3, 1], 4, [2, 1, 1], [4, 0, 0]),
])
def test_quotas(available: list[int], wanted: int, even: list[int], packed: list[int]) -> None:
    assert fill_largest_first(np.array(available), wanted).tolist() == packed
    assert water_fill(np.array(available), wanted).tolist() == even


def test_seed_changes_only_choices_among_equals() -> None:
    default = place_job(JobRequest(nodes=(2, 2)), FOUR_IDLE, FOUR, SCORES)
    seeded = [place_job(JobRequest(nodes=(2, 2), seed=seed), FOUR_IDLE, FOUR, SCORES) for seed in range(1, 21)]
    assert default.nodes == ("n00", "n01")
    assert len({placement.nodes for placement in seeded}) > 5
    assert len({next(iter(placement.nodes_per_zone)) for placement in seeded}) > 2
    assert {placement.rank_map.cost.sort_key for placement in seeded if placement.rank_map} == {
        default.rank_map.cost.sort_key if default.rank_map else None}
    assert place_job(JobRequest(nodes=(2, 2), seed=7), FOUR_IDLE, FOUR, SCORES) == seeded[6]


def test_uneven_choice_combines_small_and_large_nodes() -> None:
    small = cluster(*(node(name, cpus=cpus, cpus_unallocated=cpus, memory=10, memory_unallocated=10)
                      for name, cpus in zip(FOUR.nodes, [3, 1] + [1] * 14, strict=True)))
    placement = place_job(JobRequest(nodes=(2, 2), ntasks=4, memory_per_node_mb=1), small, FOUR, SCORES)
    assert placement.rank_map is not None
    assert Counter(placement.rank_map.nodes) == {"n00": 3, "n01": 1}
    assert placement.lower_bound is None
    with pytest.raises(PlacementError, match="no zone has 2 fitting nodes"):
        place_job(JobRequest(nodes=(2, 2), ntasks=5, memory_per_node_mb=1), small, FOUR, SCORES)


def test_blocks_are_joined_and_switch_trees_are_not() -> None:
    trees = build_topology([ZoneDecl("a", nodes=("n1", "n2")), ZoneDecl("b", nodes=("n3", "n4"))], kind="tree",
                           source="")
    idle = cluster(*(node(name) for name in trees.nodes))
    with pytest.raises(PlacementError, match="no zone has 3"):
        place_job(JobRequest(nodes=(3, 3)), idle, trees, SCORES)
    blocks = replace(trees, kind="block")
    assert place_job(JobRequest(nodes=(3, 3)), idle, blocks, SCORES).nodes_per_zone == {"a": 2, "b": 1}


def test_uneven_choice_in_several_leaves_names_their_zone() -> None:
    nodes = cluster(node("a", cpus=3, cpus_unallocated=3), node("b", cpus=1, cpus_unallocated=1))
    request = JobRequest(nodes=(2, 2), ntasks=4, memory_per_node_mb=1)
    placement = place_job(request, nodes, two_level(["a"], ["b"]), SCORES)
    assert placement.nodes_per_zone == {"z0": 1, "z1": 1}
    assert "root" in placement.reason
    pool = build_candidate_nodes(JobRequest(), FOUR_IDLE, FOUR, SCORES, np.full(16, 4))
    assert [choice.unused_nodes for choice in uneven_choices(pool, JobSize(3, 12))] == [1, 1, 1, 1]


@pytest.mark.parametrize("degraded", [LinkScore(500.0), LinkScore(1000.0, rtt=0.2), LinkScore(1000.0, loss=0.01)])
def test_clean_node_is_preferred_to_degraded_node_of_its_zone(degraded: LinkScore) -> None:
    scores = LinkScores(nodes={"n00": degraded}, default_node_bandwidth=1000.0,
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    for strategy, ps in (("allreduce", 0), ("gossip", 0), ("ps", 1)):
        request = JobRequest(nodes=(3, 3), dl=DlOptions(strategy=strategy, ps=ps, zone=("z0",)))
        assert place_job(request, FOUR_IDLE, FOUR, scores).nodes == ("n01", "n02", "n03")


def test_large_hierarchical_job_uses_more_zones_if_rounds_cost_more_than_bytes() -> None:
    topology = two_level([f"a{i:03d}" for i in range(256)], *([f"b{z}{i:02d}" for i in range(64)] for z in range(4)))
    idle = cluster(*(node(name, cpus=16, cpus_unallocated=16) for name in topology.nodes))
    scores = LinkScores(default_node_bandwidth=1e10, default_zone_bandwidth=(1e10,), default_latency=1e-3)
    requests = [JobRequest(nodes=(256, 256), ntasks_per_node=16, dl=DlOptions(comm_pattern="hierarchical", zone=zone))
                for zone in ((), ("z0",))]
    placement, one_zone = (place_job(request, idle, topology, scores) for request in requests)
    assert placement.rank_map is not None and one_zone.rank_map is not None
    assert len(placement.nodes_per_zone) > 1
    assert placement.rank_map.cost.seconds < one_zone.rank_map.cost.seconds
