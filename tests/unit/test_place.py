"""Placement of a job: choice of zones and nodes, ties, Slurm's limits, and jobs that cannot be placed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, cluster, idle, job, node, two_level

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, JobSize, resolve_job_size
from slurmdl.launch.step_plan import explain_step
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.candidate_nodes import build_candidate_nodes
from slurmdl.placement.explain import explain_placement
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.zones import fill_largest_first, uneven_choices, water_fill
from slurmdl.plan import Plan
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

EIGHT = replace(two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"]), source="/etc/slurm/topology.conf")
FOUR = two_level(*([f"n{4 * z + i:02d}" for i in range(4)] for z in range(4)))
SIZES = two_level(["a1", "a2"], ["b1", "b2"], ["c1", "c2", "c3", "c4"])
ONE_SMALL = two_level(["a1", "a2", "a3"], ["b1"], ["c1", "c2", "c3"])
THREES = two_level(*([f"{zone}{i}" for i in (1, 2, 3)] for zone in "abc"))
TREES = build_topology([ZoneDecl("a", nodes=("n1", "n2")), ZoneDecl("b", nodes=("n3", "n4"))], kind="tree", source="")
LONE = build_topology([ZoneDecl("a", nodes=("n1", "n2", "n3")), ZoneDecl("b", nodes=("n4",))], kind="tree", source="")
#: zone a is declared first, but the zones above them in another order
CROSSED = build_topology([
    ZoneDecl("a", nodes=("a1", "a2", "a3")), ZoneDecl("b", nodes=("b1", "b2", "b3")), ZoneDecl("s1", children=("b",)),
    ZoneDecl("s2", children=("a",)), ZoneDecl("r", children=("s1", "s2"))], kind="tree", source="")
PARTIAL = two_level(["x1", "x2", "n1"], ["n3", "n4"])
PS, GOSSIP = DlOptions("ps", ps=1), DlOptions("gossip")
GRAPH = DlOptions("gossip", comm_pattern="one-peer-exponential")
BASE_2 = DlOptions("gossip", comm_pattern="base-2")


def blocks(*counts: int) -> Topology:
    return build_topology([ZoneDecl(f"b{i}", nodes=tuple(f"b{i}n{j}" for j in range(count)))
                           for i, count in enumerate(counts)], kind="block", source="test")


def slow(*names: str, bandwidth: float = 1.0) -> LinkScores:
    return replace(SCORES, nodes={name: LinkScore(bandwidth) for name in names})


FOURS = replace(two_level(*([f"{zone}{i}" for i in range(4)] for zone in "abc")), source="test")
THIN = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e8,))
FIVES = two_level(*([f"{zone}{i}" for i in range(count)] for zone, count in (("a", 5), ("b", 5), ("c", 4))))
HEAVY = cluster(*(node(f"n{i}", weight=100 if i < 3 else 1) for i in range(1, 9)))
LIGHT = cluster(*(node(f"n{i}", weight=1 if i == 3 else 10) for i in range(1, 9)))
SIX_UP = cluster(*(node(name, "DOWN" if name in ("c3", "c4") else "IDLE") for name in SIZES.nodes))
STATES = two_level(["n0", "n1", "n2"], ["n3", "n4", "n5"])
POWERED_DOWN = cluster(*(node(f"n{i}", state) for i, state in enumerate(
    ["IDLE+POWERED_DOWN"] * 3 + ["IDLE", "IDLE", "DOWN"])))

#: topology, nodes, request, link scores -> nodes per zone, or the nodes
CHOICES: dict[str, tuple[Topology, ClusterSnapshot, JobRequest, LinkScores, dict[str, int] | str]] = {
    "zone that holds the job": (EIGHT, idle(EIGHT, "n1", "n3"), job(3), SCORES, {"z1": 3}),
    "tightest zone": (EIGHT, idle(EIGHT, "n2"), job(3), SCORES, "n4 n6 n8"),
    "whole leaf stays free": (EIGHT, idle(EIGHT), job(6), SCORES, {"z0": 4, "z1": 2}),
    "fewest leaves": (ONE_SMALL, idle(ONE_SMALL), job(4), SCORES, {"z0": 3, "z1": 1}),
    "even over a tree": (FOURS, idle(FOURS), job(9, GOSSIP), THIN, {"z0": 3, "z1": 3, "z2": 3}),
    "whole blocks": (replace(FOURS, kind="block"), idle(FOURS), job(9, GOSSIP), THIN, {"z0": 4, "z1": 4, "z2": 1}),
    "zone option": (EIGHT, idle(EIGHT), job(2, DlOptions(zone=("z1",))), SCORES, {"z1": 2}),
    "slow nodes": (EIGHT, idle(EIGHT), job(3), slow("n1", "n3", "n5", "n2"), "n4 n6 n8"),
    "slightly slower zone": (EIGHT, idle(EIGHT), job(3), slow("n2", "n4", "n6", "n8", bandwidth=997.0), {"z0": 3}),
    "slow zone, declared first": (CROSSED, idle(CROSSED), job(2), slow("a1", "a2", "a3"), {"b": 2}),
    "nodes for the tasks, not the ranks": (EIGHT, idle(EIGHT, "n1", "n3"), job(
        3, DlOptions(launcher="auto:8"), ntasks_per_node=1), SCORES, {"z1": 3}),  # nodes of 4 CPUs
    "nodes with just enough CPUs for the tasks": (EIGHT, idle(EIGHT), job(
        3, DlOptions(launcher="auto:8"), ntasks_per_node=4), SCORES, {"z0": 3}),
    "Slurm's weight before the link": (EIGHT, HEAVY, job(3), LinkScores(nodes={
        "n1": LinkScore(1e12), "n2": LinkScore(1e12)}), "n3 n5 n7"),
    "better weight": (EIGHT, LIGHT, job(4), LinkScores(), "n1 n3 n5 n7"),
    "degraded despite its better weight": (EIGHT, LIGHT, job(4), slow("n3"), "n2 n4 n6 n8"),
    "partition with enough nodes": (EIGHT, ClusterSnapshot.from_nodes(
        tuple(replace(n, partitions=("small" if n.name == "n1" else "big",)) for n in idle(EIGHT).nodes),
        (Partition("small", True), Partition("big"))), job(3, partitions=("small", "big")), SCORES, "n3 n5 n7"),
    "nodes that are up": (STATES, POWERED_DOWN, job(2), SCORES, {"z1": 2}),
    "powered-down nodes": (STATES, POWERED_DOWN, job(3), SCORES, {"z0": 3}),
    "nodes in the topology": (PARTIAL, idle(TREES),
                              job(2), SCORES, "n3 n4"),
    "blocks are joined": (replace(TREES, kind="block"), idle(TREES), job(3), SCORES, {"a": 2, "b": 1}),
    **{f"segments, {options.strategy}": (blocks(5, 3, 7), idle(blocks(5, 3, 7)), job(8, options, segment=4), SCORES,
                                    {"b0": 4, "b2": 4}) for options in (DlOptions(), GOSSIP, DlOptions("ps", ps=2))},
    "larger segment has no effect": (blocks(4, 4), idle(blocks(4, 4)), job(2, segment=4), SCORES, {"b0": 2}),
    "switches": (SIZES, idle(SIZES), job(6, switches=2), SCORES, {"z2": 4, "z0": 2}),
    "one switch": (SIZES, idle(SIZES), job(3, switches=1), SCORES, {"z2": 3}),
    "as many zones as needed": (SIZES, SIX_UP, job(6), SCORES, {"z0": 2, "z1": 2, "z2": 2}),
    "block without other jobs": (blocks(4, 4), idle(blocks(4, 4), "b0n0"), job(
        2, exclusive=True, exclusive_blocks=True), SCORES, {"b1": 2}),
    "whole groups of a mesh": (FIVES, idle(FIVES), job(
        12, DlOptions(mesh="dp=3,tp=4", bytes="tp=1000,dp=1")), SCORES, {"z0": 4, "z1": 4, "z2": 4}),
    "zones of their own for groups": (FIVES, idle(FIVES), job(
        8, DlOptions(groups="x=4,y=4", bytes="x=1G,y=1G")), THIN, {"z0": 4, "z2": 4}),
    # two trees that no switch joins: the better node of the other tree is out of reach
    "swaps in one tree": (LONE, idle(LONE), job(3, GRAPH), slow("n1", "n2", "n3"), "n1 n2 n3"),
    **{f"slow path, {options.mesh or options.groups or options.comm_pattern}": (
        THREES, idle(THREES), job(4, options), replace(SCORES, inter_leaf={"z0|z1": LinkScore(5.0)}),
        {"z1": 3, "z2": 1})
       for options in (DlOptions(mesh="dp=4"), DlOptions(groups="a=3,b=1"), BASE_2)},
    **{f"{kind} node, {options.strategy}": (FOUR, idle(FOUR), job(3, replace(options, zone=("z0",))),
                                       replace(SCORES, nodes={"n00": score}), "n01 n02 n03")
       for kind, score in (("slow", LinkScore(500.0)), ("distant", LinkScore(1000.0, 0.2)),
                           ("lossy", LinkScore(1000.0, loss=0.01))) for options in (DlOptions(), GOSSIP, PS)},
}


@pytest.mark.parametrize("case", CHOICES)
def test_chosen_nodes(case: str) -> None:
    topology, nodes, request, scores, expected = CHOICES[case]
    placement = place_job(request, nodes, topology, scores)
    assert placement.free_now
    assert placement.boots == (case == "powered-down nodes") == ("boot for" in placement.reason)
    if isinstance(expected, str):
        assert placement.nodes == tuple(expected.split())
    else:
        assert placement.nodes_per_zone == expected
    assert sum(placement.nodes_per_zone.values()) == len(placement.nodes)
    ranks = placement.rank_map
    assert ranks and Counter(ranks.nodes) == dict.fromkeys(placement.nodes, len(ranks.nodes) // len(placement.nodes))


@pytest.mark.parametrize(("case", "reason", "considered"), [
    ("tightest zone", "zone z1 holds all nodes", ["z0 x3: leaves more nodes of the zone unused"]),
    ("whole leaf stays free", "no smaller zone than root holds all nodes; below it z0 x4 + z1 x2", [
        "z0 x3 + z1 x3: same cost, leaves more zones partly used", "z0: too small, 4 of 6 nodes fit",
        "z1: too small, 4 of 6 nodes fit"]),
    ("slightly slower zone", "zone z0 holds all nodes", ["z1 x3: slower"]),
    ("even over a tree", "", ["z0 x4 + z1 x4 + z2 x1: 1.11 times the time per iteration"]),
    # the even choice is faster for all-to-all traffic, by a tenth: too little to leave no block whole
    ("whole blocks", "", ["z0 x3 + z1 x3 + z2 x3: faster, but leaves more blocks partly used"]),
])
def test_reasons_of_a_choice(case: str, reason: str, considered: list[str]) -> None:
    topology, nodes, request, scores, _ = CHOICES[case]
    placement = place_job(request, nodes, topology, scores)
    assert reason in placement.reason
    chosen, *others = placement.considered
    assert chosen.outcome == "chosen"
    assert [f"{other.label}: {other.outcome}" for other in others][:len(considered)] == considered


def test_busy_nodes_give_a_placement_that_is_not_free_now() -> None:
    placement = place_job(job(6), idle(EIGHT, "n1", "n2", "n3"), EIGHT, SCORES)
    assert not placement.free_now and "not all of them are free now" in placement.reason


@pytest.mark.parametrize(("request_", "nodes", "topology", "message"), [
    (job(8, exclude=("n1",)), idle(EIGHT), EIGHT, r"no zone has 8 fitting nodes \(the most: 7 in root\)"),
    (JobRequest(unplaceable_reason="job array"), idle(EIGHT), EIGHT, "job array"),
    (JobRequest(nodelist=("n1",)), idle(EIGHT), EIGHT, "-w is given: the nodes are chosen already"),
    (job(2, DlOptions("ps", ps=2)), idle(EIGHT), EIGHT, "--dl-ps=2"),
    (job(2, DlOptions(zone=("z9",))), idle(EIGHT), EIGHT, "--dl-zone=z9: no such zone; expected one of z0, z1, root"),
    (job(2), idle(EIGHT), replace(two_level(["x1", "x2"], ["x3", "x4"]), source="/etc/slurm/topology.conf"),
     "/etc/slurm/topology.conf .*n1, n2, n3, ..., .*x1, x2, x3, ..."),
    (job(2), idle(EIGHT), Topology.flat(["n1"]), "the topology has no zones"),
    (job(9), idle(EIGHT), EIGHT, "9 nodes requested; the cluster has 8"),
    (job(2, ntasks=33), idle(EIGHT), EIGHT, "33 tasks requested; the cluster has 32 CPUs"),
    (job(2, PS, ntasks=999_999_999), idle(EIGHT), EIGHT, "999,999,999 tasks requested"),
    (job(4), idle(TREES), TREES, "no zone has 4 fitting nodes"),
    (job(4), idle(TREES), PARTIAL, "no zone has 4 fitting nodes"),
    (job(3), CHOICES["partition with enough nodes"][1], EIGHT, "no zone has 3 fitting"),
    (job(12, segment=4), idle(blocks(5, 3, 7)), blocks(5, 3, 7), "--segment=4: no choice of 12 nodes satisfies it"),
    (job(6, segment=6), idle(blocks(4, 4)), blocks(4, 4), "--segment=6: the largest block has 4 nodes"),
    (job(4, segment=3), idle(blocks(4, 4)), blocks(4, 4), "--segment=3 does not divide 4 nodes; expected 1, 2, 4"),
    (job(6, switches=2), SIX_UP, SIZES, "--switches=2: no choice of 6 nodes"),
    (job(6, switches=1), idle(SIZES), SIZES, "--switches=1: no choice of 6 nodes"),
    (job(4, DlOptions(mesh="dp=2,pp=2,tp=8"), ntasks=8), idle(EIGHT), EIGHT,
     ".*a mesh of 32 ranks; the job has 8; expected 16 ranks, or"),
])
def test_unplaceable_job_is_an_error(request_: JobRequest, nodes: ClusterSnapshot, topology: Topology,
                                     message: str) -> None:
    with pytest.raises((PlacementError, UsageError), match=f"^{message}"):
        place_job(request_, nodes, topology, SCORES)


@pytest.mark.parametrize("request_, partition, split", [
    (job(2, ntasks=5), "NO", [1, 4]), (job(2, ntasks=5, exclusive=True), "NO", [2, 3]),
    (job(2, ntasks=5), "EXCLUSIVE", [2, 3]), (job(2, ntasks=5, ntasks_per_node=3), "NO", [2, 3]),
    (job(2, DlOptions(launcher="auto:8"), ntasks_per_node=1), "NO", [8, 8]),
    (job(2, DlOptions("ps", ps=3), ntasks=5), "NO", [1, 4]), (job(2, GOSSIP, ntasks=5, exclusive=True), "NO", [2, 3]),
    (job(2, script_ranks_per_node=8), "NO", [8, 8]), (job(4, PS, script_ranks_per_node=8), "NO", [1, 1, 1, 1]),
    (job(2, DlOptions(launcher="auto:4"), ntasks_per_node=1, script_ranks_per_node=8), "NO", [4, 4]),
    (job(2, ntasks=4, script_ranks_per_node=8), "NO", [1, 3]), (job(2, script_ranks_per_node=1), "NO", [1, 1]),
])
def test_tasks_are_split_as_slurm_splits_them(request_: JobRequest, partition: str, split: list[int]) -> None:
    nodes = ClusterSnapshot.from_nodes(idle(EIGHT).nodes, (Partition("main", True, oversubscribe=partition),))
    placement = place_job(request_, nodes, EIGHT, SCORES)
    assert placement.rank_map is not None
    assert sorted(Counter(placement.rank_map.nodes).values()) == split


@pytest.mark.parametrize(("request_", "expected"), [
    (JobRequest(), JobSize(1, 1)), (job(3), JobSize(3, 3)), (job(2, ntasks_per_node=4), JobSize(2, 8)),
    (JobRequest(ntasks=8, ntasks_per_node=4), JobSize(2, 8)), (JobRequest(ntasks=1), JobSize(1, 1)),
    (job(2, ntasks=5), JobSize(2, 5)), (JobRequest(ntasks=4), "not certain"),
    (JobRequest(nodes=(2, 4)), r"not certain \(-N 2-4"), (JobRequest(nodes=(2, None)), r"not certain \(-N 2-\)"),
    (job(4, ntasks=2), "2 tasks do not fill 4 nodes"), (job(2, ntasks=9, ntasks_per_node=4), "do not fit on 2 nodes"),
])
def test_job_size_of_request(request_: JobRequest, expected: JobSize | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(PlacementError, match=expected):
            resolve_job_size(request_)
    else:
        assert resolve_job_size(request_) == expected


def test_first_nodes_take_the_remainder() -> None:
    assert [JobSize(3, 10).tasks_on_node(i) for i in range(3)] == [4, 3, 3]


@pytest.mark.parametrize(("available", "wanted", "even", "packed"), [
    ([4, 4, 2], 6, [2, 2, 2], [4, 0, 2]), ([5, 1, 3], 9, [5, 1, 3], [5, 1, 3]), ([4, 4], 1, [1, 0], [1, 0]),
    ([4, 3, 1], 4, [2, 1, 1], [4, 0, 0]), ([5, 4, 2], 7, [3, 2, 2], [5, 0, 2]),
])
def test_quotas(available: list[int], wanted: int, even: list[int], packed: list[int]) -> None:
    assert fill_largest_first(np.array(available), wanted).tolist() == packed
    assert water_fill(np.array(available), wanted).tolist() == even


def test_seed_changes_only_choices_among_equals() -> None:
    default = place_job(job(2), idle(FOUR), FOUR, SCORES)
    seeded = [place_job(job(2, seed=seed), idle(FOUR), FOUR, SCORES) for seed in range(1, 21)]
    assert default.nodes == ("n00", "n01")
    assert len({placement.nodes for placement in seeded}) > 5
    assert len({next(iter(placement.nodes_per_zone)) for placement in seeded}) > 2
    assert {placement.rank_map.cost.sort_key for placement in (default, *seeded) if placement.rank_map} == {
        default.rank_map.cost.sort_key if default.rank_map else None}
    assert place_job(job(2, seed=7), idle(FOUR), FOUR, SCORES) == seeded[6]


def test_uneven_choice_combines_small_and_large_nodes() -> None:
    small = cluster(*(node(name, cpus=cpus, cpus_unallocated=cpus, memory=10, memory_unallocated=10)
                      for name, cpus in zip(FOUR.nodes, [3, 1] + [1] * 14, strict=True)))
    placement = place_job(job(2, ntasks=4, memory_per_node_mb=1), small, FOUR, SCORES)
    assert placement.rank_map is not None
    assert Counter(placement.rank_map.nodes) == {"n00": 3, "n01": 1}
    assert placement.lower_bound is None
    with pytest.raises(PlacementError, match="no zone has 2 fitting nodes"):
        place_job(job(2, ntasks=5, memory_per_node_mb=1), small, FOUR, SCORES)
    unequal_nodes = cluster(node("a", cpus=3, cpus_unallocated=3), node("b", cpus=1, cpus_unallocated=1))
    apart = place_job(job(2, ntasks=4, memory_per_node_mb=1), unequal_nodes, two_level(["a"], ["b"]), SCORES)
    assert apart.nodes_per_zone == {"z0": 1, "z1": 1} and "root" in apart.reason
    pool = build_candidate_nodes(JobRequest(), idle(FOUR), FOUR, SCORES, np.full(16, 4))
    assert [choice.unused_nodes for choice in uneven_choices(pool, JobSize(3, 12))] == [1, 1, 1, 1]


def test_large_hierarchical_job_uses_more_zones_if_rounds_cost_more_than_bytes() -> None:
    topology = two_level([f"a{i:03d}" for i in range(256)], *([f"b{z}{i:02d}" for i in range(64)] for z in range(4)))
    nodes = cluster(*(node(name, cpus=16, cpus_unallocated=16) for name in topology.nodes))
    scores = LinkScores(default_node_bandwidth=1e10, default_zone_bandwidth=(1e10,), default_latency=1e-3)
    placement, one_zone = (place_job(job(256, DlOptions(comm_pattern="hierarchical", zone=zone), ntasks_per_node=16),
                                     nodes, topology, scores) for zone in ((), ("z0",)))
    assert placement.rank_map is not None and one_zone.rank_map is not None
    assert len(placement.nodes_per_zone) > 1
    assert placement.rank_map.cost.seconds < one_zone.rank_map.cost.seconds


# --- scored links

BAD = {"slow": LinkScore(1.25e8, 4e-5), "lossy": LinkScore(1.25e9, 4e-5, 0.02), "distant": LinkScore(1.25e9, 0.02),
       "all": LinkScore(1.25e8, 0.02, 0.05)}
PAIRS = two_level(("a1", "a2"), ("b1", "b2"), ("c1", "c2"))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("options", [DlOptions(), PS, GOSSIP], ids=["allreduce", "ps", "gossip"])
@pytest.mark.parametrize("tolerance", [0.0, 0.25])
def test_degraded_node_is_chosen_last(bad: str, options: DlOptions, tolerance: float) -> None:
    scores = LinkScores(nodes={"n3": BAD[bad], "n2": LinkScore(1.2e9, 4.1e-5)}, tolerance=tolerance)
    for count in (2, 4, 7, 8):
        nodes = place_job(job(count, options), idle(EIGHT), EIGHT, scores).nodes
        assert ("n3" in nodes) == (count == 8), f"{count} of 8"


def test_parameter_servers_are_placed_on_good_links() -> None:
    scores = LinkScores(nodes={"n1": BAD["slow"], "n3": BAD["lossy"]})
    ranks = place_job(job(4, replace(PS, zone=("z0",), rank0="any")), idle(EIGHT), EIGHT, scores).rank_map
    assert ranks is not None and ranks.roles[0] == "ps" and ranks.nodes[0] in ("n5", "n7")


@pytest.mark.parametrize("slow_path", ["z0|z1", "z0|z2", "z1|z2"])
@pytest.mark.parametrize("options", [DlOptions(), PS, GOSSIP], ids=["allreduce", "ps", "gossip"])
def test_slow_uplink_and_slow_path_are_avoided(slow_path: str, options: DlOptions) -> None:
    clean = place_job(job(4, options), idle(PAIRS), PAIRS, LinkScores()).rank_map
    for bad in (LinkScore(1e8, 2e-4), LinkScore(1.25e9, 8e-5, 0.02), LinkScore(1.2e9, 0.01)):
        scores = LinkScores(inter_leaf={slow_path: bad, "z1|z3": LinkScore(1.0)})
        placement = place_job(job(4, options), idle(PAIRS), PAIRS, scores)
        assert set(placement.nodes_per_zone) != set(slow_path.split("|"))
        assert placement.rank_map is not None and clean is not None
        assert placement.rank_map.cost.seconds == pytest.approx(clean.cost.seconds)
    zone = slow_path[:2]
    assert zone not in place_job(job(4, options), idle(PAIRS), PAIRS, LinkScores(zones={zone: LinkScore(1e8, 1e-4)})
                                 ).nodes_per_zone


def test_path_limited_by_nodes_or_uplinks_is_not_slow() -> None:
    two = two_level(("a1", "a2"), ("b1", "b2"))
    for speed, uplinks in ((1.1e9, {}), (1.9e8, {"z0": LinkScore(2e8)})):
        without = LinkScores(zones=uplinks)
        placement = place_job(job(4), idle(two), two, replace(without, inter_leaf={"z0|z1": LinkScore(speed, 8e-5)}))
        assert placement.rank_map == place_job(job(4), idle(two), two, without).rank_map


@pytest.mark.parametrize("options", [DlOptions(), DlOptions("ps", ps=2)], ids=["allreduce", "ps"])
def test_scores_of_unknown_nodes_change_nothing(options: DlOptions) -> None:
    placed = [place_job(job(5, options), idle(EIGHT), EIGHT, scores).to_json() for scores in (
        LinkScores(), LinkScores(tolerance=0.25, half_life=300.0), LinkScores(nodes={"unknown": LinkScore(1.0)}))]
    assert placed[0] == placed[1] == placed[2]


def test_noise_below_the_tolerance_does_not_scatter_a_job() -> None:
    topology = two_level(*([f"n{zone}-{i}" for i in range(8)] for zone in range(8)))
    rng = np.random.default_rng(0)
    noisy = LinkScores(nodes={name: LinkScore(1.25e9 * rng.uniform(0.85, 1.15), 4e-5 * rng.uniform(0.85, 1.15))
                              for name in topology.nodes}, tolerance=0.25)
    assert len(place_job(job(16), idle(topology), topology, noisy).nodes_per_zone) == 2
    assert len(place_job(job(16), idle(topology), topology, replace(noisy, tolerance=0.0)).nodes_per_zone) > 2


def test_cost_of_rank_0_on_the_first_node_is_reported() -> None:
    scores = LinkScores(nodes={"n5": LinkScore(5e9), "n7": LinkScore(4e9)}, default_node_bandwidth=1e9)
    request = job(4, DlOptions("ps", ps=2, zone=("z0",)), ntasks_per_node=2)
    placement = place_job(request, idle(EIGHT), EIGHT, scores)
    free = place_job(replace(request, options=replace(request.options, rank0="any")), idle(EIGHT), EIGHT, scores)
    ranks, free_ranks = placement.rank_map, free.rank_map
    assert ranks and free_ranks and ranks.nodes[0] == "n1" and ranks.any_rank0_cost == free_ranks.cost
    seconds, free_seconds = ranks.cost.seconds, free_ranks.cost.seconds
    line = (f"  rank 0 stays on n1, the first node, which takes {seconds / free_seconds - 1:.1%} more time; "
            f"--dl-rank0=any: {units.format_duration(free_seconds)}, ")
    assert seconds > free_seconds
    assert line in explain_placement(placement, EIGHT, idle(EIGHT), scores, request.options)
    assert "rank 0 stays" not in explain_placement(free, EIGHT, idle(EIGHT), scores, request.options)
    plan = Plan("ps", ranks.nodes, ranks.roles, {})
    lines = explain_step(plan, ranks, request.options, EIGHT, scores, plan.nodes)
    prefix = "rank 0 stays on n1, the first node: with --dl-rank0=any an iteration takes"
    assert f"{prefix} {units.format_duration(free_seconds)}" in lines


# --- compared with all choices


def unequal(seed: int) -> tuple[Topology, LinkScores]:
    """Two to four leaves of up to four nodes with unequal bandwidths and latencies."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 4) for _ in range(draw.randint(2, 4))]
    topology = two_level(*([f"n{z}{i}" for i in range(size)] for z, size in enumerate(sizes)))

    def score() -> LinkScore:
        return LinkScore(draw.uniform(2e9, 12.5e9), rtt=draw.choice([0.0, 1e-4, 1e-3]))

    return topology, LinkScores(nodes={name: score() for name in topology.nodes if draw.random() < 0.5},
                                zones={zone: score() for zone in topology.zones if draw.random() < 0.6},
                                default_node_bandwidth=12.5e9, default_latency=1e-4)


@pytest.mark.parametrize(("options", "cases"), [
    (DlOptions(comm_pattern="hierarchical"), 12),
    pytest.param(DlOptions(mesh="dp=2,tp=2"), 12, marks=pytest.mark.nightly),
    pytest.param(BASE_2, 6, marks=pytest.mark.nightly), pytest.param(GRAPH, 12, marks=pytest.mark.nightly)],
    ids=["hierarchical", "mesh", "base-2", "one-peer"])
def test_small_jobs_are_close_to_the_best_choice(options: DlOptions, cases: int) -> None:
    ratios = []
    for seed in range(cases):
        topology, scores = unequal(seed)
        placement = place_job(job(4, options, ntasks_per_node=1), idle(topology), topology, scores)
        assert placement.rank_map is not None
        assert len(set(placement.nodes)) == 4
        traffic = options.traffic
        best = min(best_rank_map([(name, 1) for name in names], topology, scores, traffic).cost.seconds
                   for names in itertools.combinations(topology.nodes, 4))
        ratios.append(placement.rank_map.cost.seconds / best)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= cases * 5 // 6
    assert max(ratios) <= 1.3
