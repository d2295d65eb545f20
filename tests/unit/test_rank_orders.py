"""Rank maps: tasks per node are kept, ranks are ordered by zone, servers are placed by the cost model."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, three_level, two_level

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.server_assignment import assign_servers
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

ALTERNATING = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
ALL = [(f"n{i}", 1) for i in range(1, 9)]


def test_ring_is_ordered_by_zone() -> None:
    rank_map = best_rank_map(ALL, ALTERNATING, SCORES, Traffic("allreduce"))
    assert rank_map.nodes == ("n1", "n3", "n5", "n7", "n2", "n4", "n6", "n8")
    assert rank_map.order_costs["alphabetical"].inter_zone_bytes == 4 * rank_map.cost.inter_zone_bytes


def test_tasks_of_a_node_are_contiguous() -> None:
    rank_map = best_rank_map([("n1", 2), ("n2", 3), ("n3", 1)], ALTERNATING, SCORES, Traffic("allreduce"))
    assert rank_map.nodes == ("n1", "n1", "n3", "n2", "n2", "n2")


def test_depth_first_order_costs_less_than_leaf_order_if_the_file_scatters_leaves() -> None:
    """The file lists leaf switches in an order that differs from the grouping by parents."""
    leaves = [ZoneDecl(f"l{i}", nodes=(name,)) for i, name in enumerate("abcd", 1)]
    topology = build_topology([*leaves, ZoneDecl("m1", children=("l1", "l3")), ZoneDecl("m2", children=("l2", "l4")),
                               ZoneDecl("r", children=("m1", "m2"))], kind="tree", source="")
    scores = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e9, 1e7), default_latency=0.0)
    rank_map = best_rank_map([(name, 1) for name in "abcd"], topology, scores, Traffic("allreduce"))
    assert rank_map.nodes == ("a", "c", "b", "d")
    assert rank_map.order_costs["leaf"].seconds == pytest.approx(2 * rank_map.cost.seconds)


def test_servers_are_split_over_two_equal_zones() -> None:
    rank_map = best_rank_map(ALL[2:], ALTERNATING, SCORES, Traffic("ps", ps=2))
    assert rank_map.roles == ("ps",) * 2 + ("worker",) * 4
    assert {ALTERNATING.leaf_of(name) for name in rank_map.nodes[:2]} == {"z0", "z1"}
    assert rank_map.cost.seconds < rank_map.order_costs["leaf"].seconds


def test_server_goes_to_the_zone_with_most_workers() -> None:
    slots = [("n1", 1), ("n3", 1), ("n5", 1), ("n7", 1), ("n2", 1)]
    rank_map = best_rank_map(slots, ALTERNATING, SCORES, Traffic("ps", ps=1))
    assert ALTERNATING.leaf_of(rank_map.nodes[0]) == "z0"


def test_servers_get_the_best_links_on_different_nodes() -> None:
    scores = LinkScores(nodes={"n5": LinkScore(5000.0), "n7": LinkScore(4000.0)}, default_node_bandwidth=1000.0,
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    slots = [(name, 2) for name in ("n1", "n3", "n5", "n7")]
    assert set(best_rank_map(slots, ALTERNATING, scores, Traffic("ps", ps=2), "any").nodes[:2]) == {"n5", "n7"}
    # rank 0, a server, stays on the first node
    rank_map = best_rank_map(slots, ALTERNATING, scores, Traffic("ps", ps=2))
    assert rank_map.nodes[:2] == ("n1", "n5")
    assert rank_map.any_rank0_cost is not None
    assert rank_map.rank0_slowdown == rank_map.cost.seconds / rank_map.any_rank0_cost.seconds - 1 > 0


def test_server_avoids_the_zone_with_a_slow_uplink_unless_a_node_of_it_is_required() -> None:
    topology = two_level(*([f"n{z}{i:02d}" for i in range(100)] for z in range(3)))
    links = network_links(topology.nodes, topology, replace(SCORES, zones={"z0": LinkScore(25.0)}))
    phases, tasks = Traffic("ps", ps=1).phases(300), np.ones(300, np.int64)
    servers = assign_servers(links, tasks, phases, 1)
    assert (servers[:100].sum(), servers.sum()) == (0, 1)
    required = assign_servers(links, tasks, phases, 1, required_node=43)
    assert (required[43], required.sum()) == (1, 1)


def test_without_zones_slurm_order_is_kept() -> None:
    rank_map = best_rank_map(ALL, Topology.flat([name for name, _ in ALL]), SCORES, Traffic("allreduce"))
    assert rank_map.nodes == tuple(name for name, _ in ALL)


def test_node_outside_the_topology_comes_last() -> None:
    rank_map = best_rank_map([ALL[0], ("alien", 1), *ALL[1:]], ALTERNATING, SCORES, Traffic("allreduce"))
    assert rank_map.nodes[-1] == "alien"
    assert best_rank_map([("alien", 1), *ALL], ALTERNATING, SCORES, Traffic("allreduce"), "any").nodes[-1] == "alien"
    assert Counter(rank_map.nodes) == Counter([name for name, _ in ALL] + ["alien"])
    assert best_rank_map([("alien", 1), *ALL], ALTERNATING, SCORES, Traffic("allreduce")).nodes[0] == "alien"


def test_gossip_ranks_are_ordered_by_zone_although_all_orders_cost_the_same() -> None:
    rank_map = best_rank_map(ALL, ALTERNATING, SCORES, Traffic("gossip"))
    assert len({cost.sort_key for cost in rank_map.order_costs.values()}) == 1
    assert rank_map.order == "depth-first"


@pytest.mark.parametrize(("strategy", "pattern"), [("allreduce", "ring"), ("allreduce", "hierarchical"),
                                                   ("gossip", "random-matching"), ("gossip", "zone-aware")])
def test_fixed_rank_0_costs_nothing_on_interleaved_nodes(strategy: str, pattern: str) -> None:
    """All choices of 6 of 8 nodes of two zones; in 6 choices the first node is in the second zone."""
    traffic, rank0_elsewhere = Traffic(strategy, pattern=pattern), 0
    for nodes in itertools.combinations(ALL, 6):
        rank_map = best_rank_map(nodes, ALTERNATING, SCORES, traffic)
        assert rank_map.nodes[0] == nodes[0][0]
        zones = [ALTERNATING.leaf_of(node) for node in rank_map.nodes]
        assert sum(left != right for left, right in itertools.pairwise(zones)) == len(set(zones)) - 1
        unconstrained = best_rank_map(nodes, ALTERNATING, SCORES, traffic, "any")
        assert rank_map.cost.sort_key == unconstrained.cost.sort_key and rank_map.rank0_slowdown == 0
        rank0_elsewhere += unconstrained.nodes[0] != nodes[0][0]
    assert rank0_elsewhere == 6


@pytest.mark.parametrize("pattern", ["base-2", "one-peer-exponential"])
def test_fixed_rank_0_costs_nothing_on_a_symmetric_graph(pattern: str) -> None:
    """Random choices of 16 of 64 nodes in three levels; the ranks are renumbered within the graph."""
    topology = three_level(4, 4, 4)
    scores = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(5e8, 2.5e8, 1e8), default_latency=0.0)
    random = np.random.default_rng(1)
    rank0_elsewhere = 0
    for _ in range(20):
        slots = [(topology.nodes[i], 1) for i in sorted(random.choice(64, 16, replace=False).tolist())]
        traffic = Traffic("adaptive-gossip", pattern=pattern)
        rank_map, unconstrained = (best_rank_map(slots, topology, scores, traffic, rank0)
                                   for rank0 in ("first", "any"))
        assert rank_map.nodes[0] == slots[0][0] and sorted(rank_map.nodes) == sorted(name for name, _ in slots)
        assert rank_map.cost.sort_key <= unconstrained.cost.sort_key
        rank0_elsewhere += unconstrained.nodes[0] != slots[0][0]
    assert rank0_elsewhere > 0


def test_fixed_rank_0_detours_around_a_slow_path_at_no_cost() -> None:
    """Three zones with a slow path between two of them: the same ring, started at the first node."""
    topology = two_level(["n1", "n4"], ["n2", "n5"], ["n0", "n3"])
    scores = LinkScores(inter_leaf={"z0|z1": LinkScore(1.0)}, default_node_bandwidth=1000.0,
                        default_zone_bandwidth=(500.0,), default_latency=0.0)
    for nodes in itertools.combinations(sorted(topology.nodes), 5):
        slots = [(name, 1) for name in nodes]
        rank_map = best_rank_map(slots, topology, scores, Traffic("allreduce"))
        assert rank_map.nodes[0] == nodes[0]
        unconstrained = best_rank_map(slots, topology, scores, Traffic("allreduce"), "any")
        assert rank_map.cost.sort_key == unconstrained.cost.sort_key


def test_ring_detours_around_a_slow_inter_leaf_path() -> None:
    topology = two_level(("a1",), ("b1",), ("c1",), ("d1",))
    scores = LinkScores(inter_leaf={"z0|z1": LinkScore(1e8, 2e-4)})
    rank_map = best_rank_map([(name, 1) for name in ("a1", "b1", "c1", "d1")], topology, scores, Traffic("allreduce"))
    assert rank_map.order == "detour"
    order = "".join(name[0] for name in (*rank_map.nodes, rank_map.nodes[0]))
    assert "ab" not in order and "ba" not in order
    assert rank_map.cost.seconds < rank_map.order_costs["depth-first"].seconds / 5
    assert rank_map.order_costs["depth-first"].bottleneck_link == "z0|z1"


@pytest.mark.parametrize(("slots", "ps"), [([], 0), ([("n1", 0)], 0), ([("n1", 2)], 2), ([("n1", 2)], 0)])
def test_invalid_slots_or_servers_are_an_error(slots: list[tuple[str, int]], ps: int) -> None:
    with pytest.raises(PlacementError):
        best_rank_map(slots, ALTERNATING, SCORES, Traffic("ps", ps=ps))


def test_thousands_of_ranks() -> None:
    leaves = [[f"n{16 * z + i}" for i in range(16)] for z in range(64)]
    topology = two_level(*leaves)
    slots = [(name, 4) for leaf in leaves for name in leaf]
    rank_map = best_rank_map(slots, topology, SCORES, Traffic("ps", ps=32))
    assert Counter(rank_map.nodes) == dict(slots)
    assert rank_map.cost.sort_key <= min(cost.sort_key for cost in rank_map.order_costs.values())
