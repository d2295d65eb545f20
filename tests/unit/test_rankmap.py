"""Rank maps: tasks per node stay, ranks by zone, servers where the model puts them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from placing import SCORES, three_level, two_level

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.ranks.rank_orders import best_rank_map
from slurmdl.placement.traffic import Traffic
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

ALTERNATING = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
ALL = [(f"n{i}", 1) for i in range(1, 9)]


def test_ring_goes_zone_by_zone() -> None:
    found = best_rank_map(ALL, ALTERNATING, SCORES, Traffic("allreduce"))
    assert found.nodes == ("n1", "n3", "n5", "n7", "n2", "n4", "n6", "n8")
    assert found.order_costs["alphabetical"].inter_zone_bytes == 4 * found.cost.inter_zone_bytes


def test_tasks_of_a_node_stand_together() -> None:
    found = best_rank_map([("n1", 2), ("n2", 3), ("n3", 1)], ALTERNATING, SCORES, Traffic("allreduce"))
    assert found.nodes == ("n1", "n1", "n3", "n2", "n2", "n2")


def test_depth_first_beats_leaf_order_where_the_file_scatters_leaves() -> None:
    """Leaf switches listed in another order than the tree above them groups them."""
    topology = build_topology([ZoneDecl("l1", nodes=("a",)), ZoneDecl("l2", nodes=("b",)), ZoneDecl("l3", nodes=("c",)),
                      ZoneDecl("l4", nodes=("d",)), ZoneDecl("m1", children=("l1", "l3")),
                      ZoneDecl("m2", children=("l2", "l4")), ZoneDecl("r", children=("m1", "m2"))],
                     kind="tree", source="")
    scores = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e9, 1e7), default_latency=0.0)
    found = best_rank_map([(name, 1) for name in "abcd"], topology, scores, Traffic("allreduce"))
    assert found.nodes == ("a", "c", "b", "d")
    assert found.order_costs["leaf"].seconds == pytest.approx(2 * found.cost.seconds)


def test_servers_split_over_two_zones_of_the_same_size() -> None:
    found = best_rank_map(ALL[2:], ALTERNATING, SCORES, Traffic("ps", ps=2))
    assert found.roles == ("ps",) * 2 + ("worker",) * 4
    assert {ALTERNATING.leaf_of(name) for name in found.nodes[:2]} == {"z0", "z1"}
    assert found.cost.seconds < found.order_costs["leaf"].seconds


def test_servers_go_to_the_zone_with_most_workers() -> None:
    slots = [("n1", 1), ("n3", 1), ("n5", 1), ("n7", 1), ("n2", 1)]
    found = best_rank_map(slots, ALTERNATING, SCORES, Traffic("ps", ps=1))
    assert ALTERNATING.leaf_of(found.nodes[0]) == "z0"


def test_servers_take_the_best_links_and_keep_apart() -> None:
    scores = LinkScores(nodes={"n5": LinkScore(5000.0), "n7": LinkScore(4000.0)}, default_node_bandwidth=1000.0,
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    slots = [(name, 2) for name in ("n1", "n3", "n5", "n7")]
    assert set(best_rank_map(slots, ALTERNATING, scores, Traffic("ps", ps=2), "any").nodes[:2]) == {"n5", "n7"}
    # one of them on the first node
    found = best_rank_map(slots, ALTERNATING, scores, Traffic("ps", ps=2))
    assert found.nodes[:2] == ("n1", "n5")
    assert found.any_rank0_cost is not None and found.rank0_slowdown == found.cost.seconds / found.any_rank0_cost.seconds - 1 > 0


def test_without_zones_the_order_is_slurms() -> None:
    found = best_rank_map(ALL, Topology.flat([name for name, _ in ALL]), SCORES, Traffic("allreduce"))
    assert found.nodes == tuple(name for name, _ in ALL)


def test_a_node_that_the_topology_does_not_know_comes_last() -> None:
    found = best_rank_map([ALL[0], ("alien", 1), *ALL[1:]], ALTERNATING, SCORES, Traffic("allreduce"))
    assert found.nodes[-1] == "alien"
    assert Counter(found.nodes) == Counter([name for name, _ in ALL] + ["alien"])
    assert best_rank_map([("alien", 1), *ALL], ALTERNATING, SCORES, Traffic("allreduce")).nodes[0] == "alien"


def test_gossip_keeps_zones_together_all_the_same() -> None:
    found = best_rank_map(ALL, ALTERNATING, SCORES, Traffic("gossip"))
    assert len({cost.sort_key for cost in found.order_costs.values()}) == 1
    assert found.order == "depth-first"


@pytest.mark.parametrize(("strategy", "pattern"), [("allreduce", "ring"), ("allreduce", "hierarchical"),
                                                   ("gossip", "random"), ("gossip", "zones")])
def test_rank_0_on_the_first_node_costs_nothing_on_interleaved_nodes(strategy: str, pattern: str) -> None:
    """All choices of 6 of 8 nodes of two zones: of 6 of them the first node is in the zone that comes second."""
    traffic, elsewhere = Traffic(strategy, pattern=pattern), 0
    for nodes in itertools.combinations(ALL, 6):
        found = best_rank_map(nodes, ALTERNATING, SCORES, traffic)
        assert found.nodes[0] == nodes[0][0]
        zones = [ALTERNATING.leaf_of(node) for node in found.nodes]
        assert sum(one != other for one, other in itertools.pairwise(zones)) == len(set(zones)) - 1
        anywhere = best_rank_map(nodes, ALTERNATING, SCORES, traffic, "any")
        assert found.cost.sort_key == anywhere.cost.sort_key and found.rank0_slowdown == 0
        elsewhere += anywhere.nodes[0] != nodes[0][0]
    assert elsewhere == 6


@pytest.mark.parametrize("pattern", ["base", "exponential"])
def test_rank_0_on_the_first_node_costs_nothing_where_the_graph_is_symmetric(pattern: str) -> None:
    """Random choices of 16 of 64 nodes in three levels: ranks are renumbered along the graph."""
    topology = three_level(4, 4, 4)
    scores = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(5e8, 2.5e8, 1e8), default_latency=0.0)
    random = np.random.default_rng(1)
    elsewhere = 0
    for _ in range(20):
        slots = [(topology.nodes[i], 1) for i in sorted(random.choice(64, 16, replace=False).tolist())]
        traffic = Traffic("adaptive-gossip", pattern=pattern)
        found, anywhere = (best_rank_map(slots, topology, scores, traffic, rank0) for rank0 in ("first", "any"))
        assert found.nodes[0] == slots[0][0] and sorted(found.nodes) == sorted(name for name, _ in slots)
        assert found.cost.sort_key <= anywhere.cost.sort_key
        elsewhere += anywhere.nodes[0] != slots[0][0]
    assert elsewhere > 0


def test_rank_0_goes_round_a_slow_way_at_no_cost() -> None:
    """Three zones with a slow way between two of them: the same ring, begun at the first node."""
    topology = two_level(["n1", "n4"], ["n2", "n5"], ["n0", "n3"])
    scores = LinkScores(inter_leaf={"z0|z1": LinkScore(1.0)}, default_node_bandwidth=1000.0, default_zone_bandwidth=(500.0,),
                        default_latency=0.0)
    for nodes in itertools.combinations(sorted(topology.nodes), 5):
        slots = [(name, 1) for name in nodes]
        found = best_rank_map(slots, topology, scores, Traffic("allreduce"))
        assert found.nodes[0] == nodes[0]
        assert found.cost.sort_key == best_rank_map(
    slots, topology, scores, Traffic("allreduce"), "any").cost.sort_key


@pytest.mark.parametrize(("slots", "ps"), [([], 0), ([("n1", 0)], 0), ([("n1", 2)], 2), ([("n1", 2)], 0)])
def test_refused(slots: list[tuple[str, int]], ps: int) -> None:
    with pytest.raises(PlacementError):
        best_rank_map(slots, ALTERNATING, SCORES, Traffic("ps", ps=ps))


def test_thousands_of_ranks() -> None:
    leaves = [[f"n{16 * z + i}" for i in range(16)] for z in range(64)]
    topology = two_level(*leaves)
    slots = [(name, 4) for leaf in leaves for name in leaf]
    found = best_rank_map(slots, topology, SCORES, Traffic("ps", ps=32))
    assert Counter(found.nodes) == dict(slots)
    assert found.cost.sort_key <= min(cost.sort_key for cost in found.order_costs.values())
