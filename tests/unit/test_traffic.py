"""Traffic by pattern, compared with results computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SCORES, two_level

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.result import Cost
from slurmdl.plan import COMM_PATTERNS
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

N = 1200.0


def cost_on(traffic: Traffic, topology: Topology, order: list[str], scores: LinkScores = SCORES) -> Cost:
    network = network_links(sorted(set(order)), topology, scores)
    place = np.array([network.nodes.index(name) for name in order])
    return predict_cost(traffic.phases(len(order), network.leaf[place]), network, place)


def test_hierarchical_allreduce_of_equal_zones() -> None:
    """Z = 2 zones of m = 2: twice N (m-1)/m over each node link, 2 N (Z-1)/Z over each uplink."""
    cost = cost_on(Traffic("allreduce", N, pattern="hierarchical"), two_level(["a1", "a2"], ["b1", "b2"]),
                    ["a1", "a2", "b1", "b2"])
    inside, between = N / 2 / 1000, 2 * N * (1 / 2) / 50
    assert cost.seconds == pytest.approx(inside + between + inside)
    assert cost.inter_zone_bytes == 2 * (2 * N / 2)
    assert cost.bottleneck_link == "z0"
    # a flat ring sends 2 N (n-1)/n over each uplink
    flat = cost_on(Traffic("allreduce", N), two_level(["a1", "a2"], ["b1", "b2"]), ["a1", "a2", "b1", "b2"])
    assert flat.seconds == pytest.approx(2 * N * (3 / 4) / 50)
    assert cost.inter_zone_bytes / flat.inter_zone_bytes == pytest.approx((1 / 2) / (3 / 4))


def test_shards_of_unequal_zones_overlap() -> None:
    """Zones of 2 and 3: shards 0-1/2, 1/2-1 and 0-1/3, 1/3-2/3, 2/3-1; N bytes per direction (Z = 2) in parts."""
    traffic = Traffic("allreduce", N, pattern="hierarchical")
    within, between, after = traffic.phases(5, np.array([0, 0, 1, 1, 1]))
    assert within is after
    assert dict(zip(within.source.tolist(), np.asarray(within.bytes_per_pair).tolist(), strict=True)) == {
        0: N / 2, 1: N / 2, 2: pytest.approx(2 * N / 3), 3: pytest.approx(2 * N / 3), 4: pytest.approx(2 * N / 3)}
    pairs = zip(between.source.tolist(), between.target.tolist(), strict=True)
    sent = dict(zip(pairs, between.bytes_per_pair, strict=True))
    overlaps = {(0, 2): 1 / 3, (0, 3): 1 / 6, (1, 3): 1 / 6, (1, 4): 1 / 3}
    assert sent == {pair: pytest.approx(N * fraction)
                    for key, fraction in overlaps.items() for pair in (key, key[::-1])}
    assert (within.rounds, between.rounds) == (2, 2)


def test_hierarchical_allreduce_of_single_ranks_or_one_zone_is_a_ring() -> None:
    traffic = Traffic("allreduce", N, pattern="hierarchical")
    (alone,) = traffic.phases(3, np.array([5, 1, 9]))
    assert sorted(zip(alone.source.tolist(), alone.target.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0)]
    assert np.allclose(alone.bytes_per_pair, 2 * N * 2 / 3)
    first, second = traffic.phases(4)
    assert np.allclose(first.bytes_per_pair, N * 3 / 4) and first is second, "one zone: both halves of a ring"


def test_base_graph_of_a_power_of_two() -> None:
    """n = 4: one model to r xor 1 and to r xor 2, each in half of the iterations."""
    near, far = Traffic("gossip", N, pattern="base-2").phases(4)
    assert near.target.tolist() == [1, 0, 3, 2] and far.target.tolist() == [2, 3, 0, 1]
    assert (near.bytes_per_pair, far.bytes_per_pair, near.rounds) == (N / 2, N / 2, 1 / 2)
    cost = cost_on(Traffic("gossip", N, pattern="base-2"), two_level(["a1", "a2"], ["b1", "b2"]),
                    ["a1", "a2", "b1", "b2"])
    assert cost.seconds == pytest.approx(N / 2 / 1000 + 2 * (N / 2) / 50)


def test_exponential_graph_of_an_odd_number() -> None:
    """n = 5: distances 1, 2, 4, each in a third of the iterations; each rank sends one model per iteration."""
    phases = Traffic("adaptive-gossip", N, pattern="one-peer-exponential").phases(5)
    assert [phase.target.tolist() for phase in phases] == [[1, 2, 3, 4, 0], [2, 3, 4, 0, 1], [4, 0, 1, 2, 3]]
    assert sum(5 * phase.bytes_per_pair for phase in phases) == pytest.approx(5 * N)
    assert sum(phase.rounds for phase in phases) == pytest.approx(1)


def test_islands_of_local_sgd() -> None:
    """Two zones of 2 and 1: gradients in the first one in every iteration; models between them in every 32nd."""
    traffic = Traffic("local-sgd", N, islands="zone")
    cost = cost_on(traffic, two_level(["a1", "a2"], ["b1"]), ["a1", "a2", "b1"])
    gradients, models, gathered = 2 * N / 2 / 1000, 2 * N / 2 / 50 / 32, N / 2 / 1000 / 32
    assert cost.seconds == pytest.approx(gradients + models + gathered)
    assert cost.inter_zone_bytes == pytest.approx(2 * N / 32)
    one_zone = cost_on(traffic, two_level(["a1", "a2"]), ["a1", "a2"])
    assert one_zone.seconds == pytest.approx(gradients)
    assert Traffic("local-sgd", N, islands="node").phases(3)[0].bytes_per_pair == pytest.approx(4 / 3 * N)


@pytest.mark.parametrize("pattern", ["random-matching", "one-peer-exponential", "base-2", "zone-aware"])
def test_islands_of_gossip_send_one_model_from_each_zone(pattern: str) -> None:
    """In every iteration, whatever the number of ranks of a zone; with random partners a ring stands for them."""
    zones = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"], ["d1", "d2"]]
    ranks = [node for zone in zones for node in zone]
    cost = cost_on(Traffic("gossip", N, pattern=pattern, islands="zone"), two_level(*zones), ranks)
    assert cost.inter_zone_bytes == pytest.approx(4 * N)


def test_latency_of_phases_in_a_fraction_of_the_iterations() -> None:
    scores = LinkScores(default_node_bandwidth=1e12, default_zone_bandwidth=(1e12,), default_latency=0.5)
    cost = cost_on(Traffic("gossip", N, pattern="one-peer-exponential"), two_level(["a", "b", "c", "d", "e"]),
                    ["a", "b", "c", "d", "e"], scores)
    assert cost.seconds == pytest.approx(2 * 0.5)


def test_matrices_of_the_user() -> None:
    """First 10 bytes a1 -> b1 and 4 bytes a2 -> a1, then 5 bytes b1 -> a2; the diagonal is ignored."""
    first = np.array([[7.0, 0, 10], [4, 0, 0], [0, 0, 0]])
    second = np.array([[0.0, 0, 0], [0, 0, 0], [0, 5, 0]])
    cost = cost_on(Traffic("gossip", N, matrices=(first, second)), two_level(["a1", "a2"], ["b1"]),
                    ["a1", "a2", "b1"])
    assert cost.seconds == pytest.approx(10 / 50 + 5 / 50)
    assert (cost.inter_node_bytes, cost.inter_zone_bytes) == (19, 15)
    assert cost.intra_zone_fraction == pytest.approx(4 / 19)
    with pytest.raises(PlacementError, match=r"--dl-comm-pattern=f.npz: .*3 x 3.* 4 x 4"):
        Traffic("gossip", N, pattern="f.npz", matrices=(first,)).phases(4)


def test_pattern_of_another_strategy_is_an_error() -> None:
    with pytest.raises(PlacementError, match=r"--dl-comm-pattern=base-2: .*allreduce.* ring, hierarchical"):
        Traffic("allreduce", pattern="base-2").phases(4)


@pytest.mark.parametrize(("strategy", "pattern"), [(s, p) for s, patterns in COMM_PATTERNS.items() for p in patterns])
def test_default_pattern_is_the_first_and_a_single_rank_sends_nothing(strategy: str, pattern: str) -> None:
    ps = 1 if strategy == "ps" else 0
    default, first = (Traffic(strategy, N, ps, name).phases(8) for name in ("", COMM_PATTERNS[strategy][0]))
    assert [phase.target.tolist() for phase in default] == [phase.target.tolist() for phase in first]
    assert strategy == "ps" or Traffic(strategy, N, ps, pattern).phases(1) == []


def test_bytes_by_level_and_local_fractions() -> None:
    """Ring a a b c1 d1 on leaves ab, c, d, with m over ab and c, o over d, and r over m and o."""
    topology = build_topology([ZoneDecl("ab", nodes=("a", "b")), ZoneDecl("c", nodes=("c1",)),
                               ZoneDecl("d", nodes=("d1",)), ZoneDecl("m", children=("ab", "c")),
                               ZoneDecl("o", children=("d",)), ZoneDecl("r", children=("m", "o"))],
                              kind="tree", source="")
    cost = cost_on(Traffic("allreduce", N), topology, ["a", "a", "b", "c1", "d1"])
    each = 2 * N * 4 / 5
    # a-a stays on the node, a-b in the leaf, b-c below m, c-d and d-a cross both levels
    assert cost.inter_zone_bytes_by_level == pytest.approx((3 * each, 2 * each, 0))
    assert cost.inter_zone_bytes_by_level[0] == cost.inter_zone_bytes
    assert (cost.intra_node_fraction, cost.intra_zone_fraction) == pytest.approx((1 / 5, 2 / 5))
    assert cost.leaf_zone_count == 3


def test_local_fractions_of_servers_and_workers() -> None:
    """2 servers (a1, b1) and 4 workers (a1 a2 b1 b2): of 8 pairs 2 share a node and 4 a zone."""
    cost = cost_on(Traffic("ps", N, 2), two_level(["a1", "a2"], ["b1", "b2"]), ["a1", "b1", "a1", "a2", "b1", "b2"])
    assert (cost.intra_node_fraction, cost.intra_zone_fraction) == pytest.approx((2 / 8, 4 / 8))
    assert cost_on(Traffic("allreduce", N), two_level(["a1"]), ["a1"]).intra_node_fraction == 1
