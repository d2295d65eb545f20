"""The cost model against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SCORES, cost_of, two_level

from slurmdl.errors import PlacementError
from slurmdl.network.model import LinkScore, LinkScores
from slurmdl.placement.cost import links
from slurmdl.placement.traffic import Traffic
from slurmdl.topology.build import Declared, build
from slurmdl.topology.model import Topology

N = 1200.0
TOPOLOGY = two_level(["a1", "a2"], ["b1", "b2"])


def test_ring_by_zone_crosses_each_uplink_once() -> None:
    found = cost_of(["a1", "a2", "b1", "b2"], TOPOLOGY, SCORES, "allreduce", N)
    each = 2 * N * 3 / 4
    assert found.bytes_across_nodes == 4 * each
    assert found.bytes_across_zones == 2 * each
    assert found.seconds == each / 50
    assert found.busiest in ("z0", "z1")


def test_alternating_ring_crosses_at_every_step() -> None:
    found = cost_of(["a1", "b1", "a2", "b2"], TOPOLOGY, SCORES, "allreduce", N)
    assert found.bytes_across_zones == 4 * 2 * N * 3 / 4
    assert found.seconds == 2 * 2 * N * 3 / 4 / 50


def test_inside_a_zone_the_node_links_bound() -> None:
    found = cost_of(["a1", "a2"], TOPOLOGY, SCORES, "allreduce", N)
    assert (found.bytes_across_zones, found.seconds, found.busiest) == (0.0, N / 1000, "a1")


def test_inside_a_node_nothing_is_sent() -> None:
    found = cost_of(["a1", "a1", "a1"], TOPOLOGY, SCORES, "allreduce", N)
    assert (found.seconds, found.bytes_across_nodes, found.busiest) == (0.0, 0.0, "")


@pytest.mark.parametrize("n", [2, 3, 6])
def test_colocated_servers_cost_each_node_the_published_bytes(n: int) -> None:
    """One worker and 1/n of the shards on each of n hosts: 2N(n-1)/n over each link and direction (Jiang et al.,
    A unified architecture for accelerating distributed DNN training, OSDI 2020)."""
    nodes = [f"a{i}" for i in range(n)]
    found = cost_of(nodes + nodes, two_level(nodes), SCORES, "ps", N, ps=n)
    assert found.seconds == pytest.approx(2 * N * (n - 1) / n / 1000)
    assert found.bytes_across_nodes == pytest.approx(n * 2 * N * (n - 1) / n)


def test_pure_server_is_the_bottleneck() -> None:
    found = cost_of(["a0", "a1", "a2", "a3"], two_level(["a0", "a1", "a2", "a3"]), SCORES, "ps", N, ps=1)
    assert (found.seconds, found.busiest) == (2 * 3 * N / 1000, "a0")


def test_zone_uplink_with_servers_follows_the_formula() -> None:
    """A zone with w of W workers and a share f of the shards sends N f (W - w) when the model is pulled and
    N w (1 - f) when gradients are pushed; the busier direction bounds each phase."""
    topology = two_level(["a0", "a1", "a2"], ["b0", "b1"])
    found = cost_of(["a0", "a1", "a2", "b0", "b1"], topology, SCORES, "ps", N, ps=1)
    workers_a, workers = 2, 4
    assert found.seconds == 2 * N * (workers - workers_a) / 50
    assert found.bytes_across_zones == 2 * N * (workers - workers_a)


def test_gossip_is_the_same_in_every_order() -> None:
    orders = (["a1", "a2", "b1", "b2"], ["a1", "b1", "a2", "b2"], ["b2", "a1", "b1", "a2"])
    found = [cost_of(order, TOPOLOGY, SCORES, "gossip", N) for order in orders]
    assert {cost.key for cost in found} == {found[0].key}
    assert found[0].bytes_across_nodes == pytest.approx(4 * N)
    assert found[0].bytes_across_zones == pytest.approx(4 * 2 * N / 3)


def test_three_levels_load_every_uplink_on_the_way() -> None:
    topology = build([Declared("l1", nodes=("a",)), Declared("l2", nodes=("b",)), Declared("m1", children=("l1",)),
                      Declared("m2", children=("l2",)), Declared("r", children=("m1", "m2"))], kind="tree", source="")
    scores = LinkScores(node_default=1e9, zone_default=(1e9, 10.0), delay_default=1.0)
    found = cost_of(["a", "b"], topology, scores, "allreduce", N)
    assert found.busiest in ("m1", "m2")
    # two rounds, each up and down over node link, leaf uplink and middle uplink
    assert found.seconds == pytest.approx(N / 10 + 2 * 6 * 1.0)
    assert found.bytes_across_zones == 2 * N


def test_capacity_is_score_then_topology_then_default() -> None:
    topology = build([Declared("z0", nodes=("a",), link_speed=8000), Declared("z1", nodes=("b",), link_speed=8000),
                      Declared("z2", nodes=("c",))], kind="tree", source="")
    scores = LinkScores(nodes={"a": LinkScore(7.0, delay=0.5)}, zones={"z0": LinkScore(3.0)}, zone_default=(5.0,))
    found = links(["a", "b", "c"], topology, scores)
    assert found.zone_capacity.tolist() == [3.0, 1e9, 5.0]
    assert found.node_capacity.tolist() == [7.0, 1.25e9, 1.25e9]
    assert found.node_delay.tolist() == [0.25, 2e-5, 2e-5]


def test_nodes_without_zones() -> None:
    flat = Topology.flat(["a", "b"])
    assert cost_of(["a", "b", "x"], flat, SCORES, "allreduce", N).bytes_across_zones == 0
    mixed = cost_of(["a1", "x"], TOPOLOGY, SCORES, "allreduce", N)
    assert (mixed.bytes_across_zones, mixed.seconds) == (2 * N, N / 50)


def test_dense_formulas_against_a_matrix() -> None:
    """The counted loads of crossed phases against every message summed one by one."""
    generator = np.random.default_rng(1)
    topology = two_level(["a0", "a1", "a2"], ["b0", "b1"], ["c0"])
    names = sorted(topology.nodes)
    for strategy, ps in (("gossip", 0), ("ps", 3)):
        order = generator.choice(names, 12).tolist()
        out: dict[str, float] = {}
        across = seconds = 0.0
        for phase in Traffic(strategy, N, ps).phases(12):
            out.clear()
            for s in phase.source:
                for t in phase.target:
                    here, there = order[s], order[t]
                    if s != t and here != there:
                        out[f"{here} out"] = out.get(f"{here} out", 0) + phase.size / 1000
                        out[f"{there} in"] = out.get(f"{there} in", 0) + phase.size / 1000
                        here, there = topology.leaf_of(here), topology.leaf_of(there)
                        if here != there:
                            across += phase.size
                            out[f"{here} out"] = out.get(f"{here} out", 0) + phase.size / 50
                            out[f"{there} in"] = out.get(f"{there} in", 0) + phase.size / 50
            seconds += max(out.values())
        found = cost_of(order, topology, SCORES, strategy, N, ps)
        assert found.bytes_across_zones == pytest.approx(across)
        assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks", "ps"), [(4, 0), (4, 4), (1, 1)])
def test_servers_need_workers(ranks: int, ps: int) -> None:
    with pytest.raises(PlacementError):
        Traffic("ps", N, ps).phases(ranks)
