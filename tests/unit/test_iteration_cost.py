"""Predicted costs compared with results computed by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from placing import SCORES, cost_of, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

N = 1200.0
TOPOLOGY = two_level(["a1", "a2"], ["b1", "b2"])


def test_ring_by_zone_crosses_each_uplink_once() -> None:
    cost = cost_of(["a1", "a2", "b1", "b2"], TOPOLOGY, SCORES, "allreduce", N)
    each = 2 * N * 3 / 4
    assert cost.inter_node_bytes == 4 * each
    assert cost.inter_zone_bytes == 2 * each
    assert cost.seconds == each / 50
    assert cost.bottleneck_link in ("z0", "z1")


def test_alternating_ring_crosses_uplinks_at_every_step() -> None:
    cost = cost_of(["a1", "b1", "a2", "b2"], TOPOLOGY, SCORES, "allreduce", N)
    assert cost.inter_zone_bytes == 4 * 2 * N * 3 / 4
    assert cost.seconds == 2 * 2 * N * 3 / 4 / 50


def test_node_links_limit_a_ring_inside_a_zone() -> None:
    cost = cost_of(["a1", "a2"], TOPOLOGY, SCORES, "allreduce", N)
    assert (cost.inter_zone_bytes, cost.seconds, cost.bottleneck_link) == (0.0, N / 1000, "a1")


def test_messages_inside_a_node_are_free() -> None:
    cost = cost_of(["a1", "a1", "a1"], TOPOLOGY, SCORES, "allreduce", N)
    assert (cost.seconds, cost.inter_node_bytes, cost.bottleneck_link) == (0.0, 0.0, "")


@pytest.mark.parametrize("n", [2, 3, 6])
def test_colocated_servers_send_the_published_bytes(n: int) -> None:
    """One worker and 1/n of the shards on each of n hosts: 2N(n-1)/n per link and direction (Jiang et al.,
    A unified architecture for accelerating distributed DNN training, OSDI 2020)."""
    nodes = [f"a{i}" for i in range(n)]
    cost = cost_of(nodes + nodes, two_level(nodes), SCORES, "ps", N, ps=n)
    assert cost.seconds == pytest.approx(2 * N * (n - 1) / n / 1000)
    assert cost.inter_node_bytes == pytest.approx(n * 2 * N * (n - 1) / n)


def test_dedicated_server_is_the_bottleneck() -> None:
    cost = cost_of(["a0", "a1", "a2", "a3"], two_level(["a0", "a1", "a2", "a3"]), SCORES, "ps", N, ps=1)
    assert (cost.seconds, cost.bottleneck_link) == (2 * 3 * N / 1000, "a0")


def test_zone_uplink_with_servers_follows_the_formula() -> None:
    """A zone with w of W workers and a fraction f of the shards sends N f (W - w) in the pull phase and
    N w (1 - f) in the push phase; the busier direction limits each phase."""
    topology = two_level(["a0", "a1", "a2"], ["b0", "b1"])
    cost = cost_of(["a0", "a1", "a2", "b0", "b1"], topology, SCORES, "ps", N, ps=1)
    workers_a, workers = 2, 4
    assert cost.seconds == 2 * N * (workers - workers_a) / 50
    assert cost.inter_zone_bytes == 2 * N * (workers - workers_a)


def test_random_gossip_costs_the_same_in_every_order() -> None:
    orders = (["a1", "a2", "b1", "b2"], ["a1", "b1", "a2", "b2"], ["b2", "a1", "b1", "a2"])
    costs = [cost_of(order, TOPOLOGY, SCORES, "gossip", N) for order in orders]
    assert {cost.sort_key for cost in costs} == {costs[0].sort_key}
    assert costs[0].inter_node_bytes == pytest.approx(4 * N)
    assert costs[0].inter_zone_bytes == pytest.approx(4 * 2 * N / 3)


def test_every_uplink_on_a_path_is_loaded() -> None:
    topology = build_topology([ZoneDecl("l1", nodes=("a",)), ZoneDecl("l2", nodes=("b",)),
                               ZoneDecl("m1", children=("l1",)), ZoneDecl("m2", children=("l2",)),
                               ZoneDecl("r", children=("m1", "m2"))], kind="tree", source="")
    scores = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e9, 10.0), default_latency=1.0)
    cost = cost_of(["a", "b"], topology, scores, "allreduce", N)
    assert cost.bottleneck_link in ("m1", "m2")
    # two rounds, each up and down over node link, leaf uplink and middle uplink
    assert cost.seconds == pytest.approx(N / 10 + 2 * 6 * 1.0)
    assert cost.inter_zone_bytes == 2 * N


def test_capacity_comes_from_score_then_topology_then_default() -> None:
    topology = build_topology([ZoneDecl("z0", nodes=("a",), link_speed=8000),
                               ZoneDecl("z1", nodes=("b",), link_speed=8000), ZoneDecl("z2", nodes=("c",))],
                              kind="tree", source="")
    scores = LinkScores(nodes={"a": LinkScore(7.0, rtt=0.5)}, zones={"z0": LinkScore(3.0)},
                        default_zone_bandwidth=(5.0,))
    network = network_links(["a", "b", "c"], topology, scores)
    assert network.zone_capacity.tolist() == [3.0, 1e9, 5.0]
    assert network.node_capacity.tolist() == [7.0, 1.25e9, 1.25e9]
    assert network.node_latency.tolist() == [0.25, 2e-5, 2e-5]


def test_nodes_without_a_zone() -> None:
    flat = Topology.flat(["a", "b"])
    assert cost_of(["a", "b", "x"], flat, SCORES, "allreduce", N).inter_zone_bytes == 0
    mixed = cost_of(["a1", "x"], TOPOLOGY, SCORES, "allreduce", N)
    assert (mixed.inter_zone_bytes, mixed.seconds) == (2 * N, N / 50)


def test_all_pairs_load_equals_the_sum_of_messages() -> None:
    generator = np.random.default_rng(1)
    topology = two_level(["a0", "a1", "a2"], ["b0", "b1"], ["c0"])
    names = sorted(topology.nodes)
    for strategy, ps in (("gossip", 0), ("ps", 3)):
        order = generator.choice(names, 12).tolist()
        inter_zone = seconds = 0.0
        for phase in Traffic(strategy, N, ps).phases(12):
            busy: defaultdict[str, float] = defaultdict(float)
            size = float(phase.bytes_per_pair)
            for i, j in itertools.product(phase.source, phase.target):
                source, target = order[i], order[j]
                if i != j and source != target:
                    busy[f"{source} out"] += size / 1000
                    busy[f"{target} in"] += size / 1000
                    source, target = topology.leaf_of(source), topology.leaf_of(target)
                    if source != target:
                        inter_zone += size
                        busy[f"{source} out"] += size / 50
                        busy[f"{target} in"] += size / 50
            seconds += max(busy.values())
        cost = cost_of(order, topology, SCORES, strategy, N, ps)
        assert cost.inter_zone_bytes == pytest.approx(inter_zone)
        assert cost.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks", "ps"), [(4, 0), (4, 4), (1, 1)])
def test_servers_without_workers_are_an_error(ranks: int, ps: int) -> None:
    with pytest.raises(PlacementError):
        Traffic("ps", N, ps).phases(ranks)


def naive_seconds(traffic: Traffic, nodes: list[str], topology: Topology, leaf_bandwidth: float, rails: int) -> float:
    """Seconds without latency: node links of 1,000 bytes/s in equal rails, uplinks of 50, networks in leaf zones."""
    seconds = 0.0
    for phase in traffic.phases(len(nodes)):
        load: defaultdict[tuple[object, ...], float] = defaultdict(float)
        pairs = list(itertools.product(phase.source, phase.target)) if phase.all_pairs else \
            list(zip(phase.source, phase.target, strict=True))
        sizes = np.broadcast_to(phase.bytes_per_pair, len(pairs))
        for (source, target), size in zip(pairs, sizes, strict=True):
            here, there = nodes[source], nodes[target]
            if here == there:
                continue
            for rank, node, direction in ((source, here, "out"), (target, there, "in")):
                if topology.leaf_of(here) == topology.leaf_of(there):
                    if leaf_bandwidth:
                        load["leaf", node, direction] += size / leaf_bandwidth
                        continue
                else:
                    load["uplink", topology.leaf_of(node), direction] += size / 50
                local = nodes[:rank].count(node)
                if phase.all_pairs:
                    load["node", node, direction] += size / 1000
                else:
                    load["node", node, local % rails, direction] += size / (1000 / rails)
        seconds += max(load.values(), default=0.0)
    return seconds


@pytest.mark.parametrize("leaf_bandwidth", [0.0, 5000.0])
@pytest.mark.parametrize("rails", [1, 2, 4])
@pytest.mark.parametrize(("strategy", "dl"), [
    ("allreduce", {}), ("ps", {"ps": 2}), ("gossip", {"comm_pattern": "random-matching"}),
    ("gossip", {"comm_pattern": "base-2"}),
    ("allreduce", {"mesh": "dp=2,pp=2,tp=2", "bytes": "dp=900,pp=50,tp=3000"}),
    ("allreduce", {"mesh": "dp=2,ep=4", "bytes": "dp=900,ep=500"})])
def test_links_of_two_tiers_and_rails(strategy: str, dl: dict[str, object], rails: int,
                                      leaf_bandwidth: float) -> None:
    traffic = DlOptions(strategy, **{"bytes": str(N), **dl}).traffic  # type: ignore[arg-type]
    scores = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,), default_latency=0.0,
                        default_leaf_bandwidth=leaf_bandwidth, default_rails=rails)
    generator = np.random.default_rng(rails)
    for slots in (["a1", "a2", "b1", "b2"] * 2, ["a1", "a2"] * 4, ["a1", "b1"] * 4):
        nodes = generator.permutation(slots).tolist()
        names = sorted(set(nodes))
        order = np.array([names.index(node) for node in nodes])
        cost = predict_cost(traffic.phases(8), network_links(names, TOPOLOGY, scores), order)
        assert cost.seconds == pytest.approx(naive_seconds(traffic, nodes, TOPOLOGY, leaf_bandwidth, rails))
