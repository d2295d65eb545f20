"""Choices among equals, over several trees, and on nodes with unequal room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from placing import SCORES, cluster, node, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology

FOUR = two_level(*([f"n{4 * z + i:02d}" for i in range(4)] for z in range(4)))
IDLE = cluster(*(node(name) for name in FOUR.nodes))


def test_a_seed_settles_choices_among_equals_and_nothing_else() -> None:
    plain = place_job(JobRequest(nodes=(2, 2)), IDLE, FOUR, SCORES)
    seeded = [place_job(JobRequest(nodes=(2, 2), seed=seed), IDLE, FOUR, SCORES) for seed in range(1, 21)]
    assert plain.nodes == ("n00", "n01")
    assert len({found.nodes for found in seeded}) > 5
    assert len({next(iter(found.nodes_per_zone)) for found in seeded}) > 2
    assert {found.rank_map.cost.sort_key for found in seeded if found.rank_map} == {
        plain.rank_map.cost.sort_key if plain.rank_map else None}
    again = place_job(JobRequest(nodes=(2, 2), seed=7), IDLE, FOUR, SCORES)
    assert again == seeded[6]


def test_nodes_with_less_room_than_an_even_share_serve_beside_roomier_ones() -> None:
    small = cluster(*(node(name, cpus=room, cpus_unallocated=room, memory=10, memory_unallocated=10)
                      for name, room in zip(FOUR.nodes, [3, 1] + [1] * 14, strict=True)))
    found = place_job(JobRequest(nodes=(2, 2), ntasks=4, memory_per_node_mb=1), small, FOUR, SCORES)
    assert found.rank_map is not None
    assert Counter(found.rank_map.nodes) == {"n00": 3, "n01": 1}
    assert found.lower_bound is None
    with pytest.raises(PlacementError, match="no zone has 2 fitting nodes"):
        place_job(JobRequest(nodes=(2, 2), ntasks=5, memory_per_node_mb=1), small, FOUR, SCORES)


def test_spread_goes_over_several_trees_and_pack_does_not() -> None:
    trees = build_topology([ZoneDecl("a", nodes=("n1", "n2")), ZoneDecl(
        "b", nodes=("n3", "n4"))], kind="tree", source="")
    idle = cluster(*(node(name) for name in trees.nodes))
    with pytest.raises(PlacementError, match="no zone has 3"):
        place_job(JobRequest(nodes=(3, 3)), idle, trees, SCORES)
    found = place_job(JobRequest(nodes=(3, 3), dl=DlOptions(place="spread")), idle, trees, SCORES)
    assert found.nodes_per_zone == {"a": 2, "b": 1}
    assert place_job(
    JobRequest(
        nodes=(
            3, 3)), idle, replace(
                trees, kind="block"), SCORES).nodes_per_zone == {
                    "a": 2, "b": 1}


def test_balance_is_even_over_the_fewest_zones() -> None:
    topology = two_level(*([f"n{z}{i:02d}" for i in range(17)] for z in range(3)))
    idle = cluster(*(node(name) for name in topology.nodes))
    for strategy in ("allreduce", "gossip"):
        request = JobRequest(nodes=(36, 36), dl=DlOptions(place="balance", strategy=strategy))
        assert place_job(request, idle, topology, SCORES).nodes_per_zone == {"z0": 12, "z1": 12, "z2": 12}


@pytest.mark.parametrize("worse", [LinkScore(500.0), LinkScore(1000.0, rtt=0.2), LinkScore(1000.0, loss=0.01)])
def test_a_degraded_node_loses_to_a_clean_one_of_its_zone(worse: LinkScore) -> None:
    scores = LinkScores(nodes={"n00": worse}, default_node_bandwidth=1000.0,
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    for strategy, ps in (("allreduce", 0), ("gossip", 0), ("ps", 1)):
        request = JobRequest(nodes=(3, 3), dl=DlOptions(strategy=strategy, ps=ps, zone=("z0",)))
        assert place_job(request, IDLE, FOUR, scores).nodes == ("n01", "n02", "n03")


def test_a_large_hierarchical_job_takes_more_zones_where_rounds_cost_more_than_bytes() -> None:
    topology = two_level([f"a{i:03d}" for i in range(256)], *([f"b{z}{i:02d}" for i in range(64)] for z in range(4)))
    idle = cluster(*(node(name, cpus=16, cpus_unallocated=16) for name in topology.nodes))
    scores = LinkScores(default_node_bandwidth=1e10, default_zone_bandwidth=(1e10,), default_latency=1e-3)
    requests = [JobRequest(nodes=(256, 256), ntasks_per_node=16, dl=DlOptions(comm_pattern="hierarchical", zone=zone))
                for zone in ((), ("z0",))]
    found, alone = (place_job(request, idle, topology, scores) for request in requests)
    assert found.rank_map is not None and alone.rank_map is not None
    assert len(found.nodes_per_zone) > 1
    assert found.rank_map.cost.seconds < alone.rank_map.cost.seconds
