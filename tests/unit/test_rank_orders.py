"""Rank maps: tasks per node are kept, ranks are ordered by zone, servers are placed by the cost model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, three_level, two_level

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.rank_orders import best_rank_map, is_node_by_node
from slurmdl.placement.server_assignment import assign_servers
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

ALTERNATING = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
ALL = [(f"n{i}", 1) for i in range(1, 9)]
#: the file lists leaf switches in an order that differs from the grouping by parents
SCATTERED = build_topology([
    *(ZoneDecl(f"l{i}", nodes=(name,)) for i, name in enumerate("abcd", 1)), ZoneDecl("m1", children=("l1", "l3")),
    ZoneDecl("m2", children=("l2", "l4")), ZoneDecl("r", children=("m1", "m2"))], kind="tree", source="")
FOUR = two_level(("a",), ("b",), ("c",), ("d",))
ODD = [(f"n{i}", 2) for i in (1, 3, 5, 7)]
ABCD = [(name, 1) for name in "abcd"]
THIN_TOP = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e9, 1e7), default_latency=0.0)
SLOW_PATH = LinkScores(inter_leaf={"z0|z1": LinkScore(1e8, 2e-4)})
BETTER_LINKS = replace(SCORES, nodes={"n5": LinkScore(5000.0), "n7": LinkScore(4000.0)})
RING, PS, PS_2 = Traffic("allreduce"), Traffic("ps", ps=1), Traffic("ps", ps=2)


@pytest.mark.parametrize(("slots", "topology", "scores", "traffic", "rank0", "nodes", "order", "slower"), [
    # name of an order that takes a multiple of the time
    (ALL, ALTERNATING, SCORES, RING, "first", "n1 n3 n5 n7 n2 n4 n6 n8", "depth-first", ("alphabetical", 4)),
    ([("n1", 2), ("n2", 3), ("n3", 1)], ALTERNATING, SCORES, RING, "first", "n1 n1 n3 n2 n2 n2", "depth-first", None),
    ([("n1", 0), ("n2", 2), ("n3", 1)], ALTERNATING, SCORES, RING, "first", "n2 n2 n3", "depth-first", None),
    (ABCD, SCATTERED, THIN_TOP, RING, "first", "a c b d", "depth-first", ("leaf", 2)),
    # without zones Slurm's order is kept, and a node outside the topology comes last
    (ABCD, Topology.flat("abcd"), SCORES, RING, "first", "a b c d", "depth-first", None),
    (ABCD, Topology.flat("abcd"), SCORES, PS_2, "first", "a b c d", "roles", None),
    ([ALL[0], ("x", 1), *ALL[1:4]], ALTERNATING, SCORES, RING, "first", "n1 n3 n2 n4 x", "depth-first", None),
    ([("x", 1), *ALL[:4]], ALTERNATING, SCORES, RING, "any", "n1 n3 n2 n4 x", "depth-first", None),
    ([("x", 1), *ALL[:4]], ALTERNATING, SCORES, RING, "first", "x n1 n3 n2 n4", "depth-first", None),
    # all orders cost the same
    (ALL, ALTERNATING, SCORES, Traffic("gossip"), "first", "n1 n3 n5 n7 n2 n4 n6 n8", "depth-first", ("leaf", 1)),
    (ABCD, FOUR, SLOW_PATH, RING, "first", "a c b d", "detour", ("depth-first", 12.46)),
    # two servers in two equal zones, one in the zone with most workers, or on the best links of different nodes
    (ALL[2:], ALTERNATING, SCORES, PS_2, "first", "n3 n4 n5 n7 n6 n8", "roles", ("leaf", 3)),
    ([*ALL[:3:2], *ALL[4::2], ALL[1]], ALTERNATING, SCORES, PS, "any", "n1 n3 n5 n7 n2", "roles", None),
    (ODD, ALTERNATING, BETTER_LINKS, PS_2, "any", "n5 n7 n1 n1 n3 n3 n5 n7", "roles", None),
    (ODD, ALTERNATING, BETTER_LINKS, PS_2, "first", "n1 n5 n1 n3 n3 n5 n7 n7", "roles", None),
])
def test_best_order(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores, traffic: Traffic,
                    rank0: str, nodes: str, order: str, slower: tuple[str, float] | None) -> None:
    rank_map = best_rank_map(slots, topology, scores, traffic, rank0)
    assert (" ".join(rank_map.nodes), rank_map.order) == (nodes, order)
    assert rank_map.roles == ("ps",) * traffic.ps + ("worker",) * (len(rank_map.nodes) - traffic.ps)
    assert rank_map.any_rank0_cost is not None
    assert rank_map.rank0_slowdown == pytest.approx(rank_map.cost.seconds / rank_map.any_rank0_cost.seconds - 1)
    if slower:
        assert rank_map.order_costs[slower[0]].seconds == pytest.approx(slower[1] * rank_map.cost.seconds, rel=0.01)


def test_server_avoids_the_zone_with_a_slow_uplink_unless_a_node_of_it_is_required() -> None:
    topology = two_level(*([f"n{z}{i:02d}" for i in range(100)] for z in range(3)))
    links = network_links(topology.nodes, topology, replace(SCORES, zones={"z0": LinkScore(25.0)}))
    phases, tasks = PS.phases(300), np.ones(300, np.int64)
    servers = assign_servers(links, tasks, phases, 1)
    assert (servers[:100].sum(), servers.sum()) == (0, 1)
    required = assign_servers(links, tasks, phases, 1, required_node=43)
    assert (required[43], required.sum()) == (1, 1)


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
    for _ in range(12):
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
        rank_map, unconstrained = (best_rank_map(slots, topology, scores, RING, rank0) for rank0 in ("first", "any"))
        assert rank_map.nodes[0] == nodes[0] and rank_map.cost.sort_key == unconstrained.cost.sort_key


@pytest.mark.parametrize(("slots", "ps", "node_by_node", "message"), [
    ([], 0, False, "at least one task"), ([("n1", 0)], 0, False, "at least one task"),
    ([("n1", 2), ("n2", -1)], 1, False, "negative number of tasks"),
    ([("n1", 2)], 2, False, "--dl-ps=2: 2 tasks can hold 1 to 1 parameter servers"),
    ([("n1", 2)], 0, False, "--dl-ps=0"),
    ([("n1", 2)], 1, True, "parameter servers: their ranks come first, .*; expected one task per rank")])
def test_invalid_slots_or_servers_are_an_error(slots: list[tuple[str, int]], ps: int, node_by_node: bool,
                                               message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        best_rank_map(slots, ALTERNATING, SCORES, Traffic("ps", ps=ps), node_by_node=node_by_node)


def test_ranks_of_a_node_are_consecutive_if_a_launcher_numbers_them() -> None:
    slots = [(f"n{i}", 1 + i % 2) for i in range(1, 9)]
    for traffic in (RING, Traffic("gossip", pattern="base-2"), Traffic("gossip", matrices=(np.ones((12, 12)),))):
        rank_map = best_rank_map(slots, ALTERNATING, SCORES, traffic, node_by_node=True)
        assert Counter(rank_map.nodes) == dict(slots)
        assert is_node_by_node(np.array([int(name[1:]) for name in rank_map.nodes]))
    one_each = best_rank_map(ALL, ALTERNATING, SCORES, PS_2, node_by_node=True)
    assert one_each.nodes == best_rank_map(ALL, ALTERNATING, SCORES, PS_2).nodes


def test_thousands_of_ranks() -> None:
    leaves = [[f"n{16 * z + i}" for i in range(16)] for z in range(64)]
    slots = [(name, 4) for leaf in leaves for name in leaf]
    rank_map = best_rank_map(slots, two_level(*leaves), SCORES, Traffic("ps", ps=32))
    assert Counter(rank_map.nodes) == dict(slots)
    assert rank_map.cost.sort_key <= min(cost.sort_key for cost in rank_map.order_costs.values())
