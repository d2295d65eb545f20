"""Traffic by pattern: what goes over the links, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SCORES, two_level

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.result import Cost
from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

N = 1200.0


def cost_on(traffic: Traffic, topology: Topology, order: list[str], scores: LinkScores = SCORES) -> Cost:
    network = network_links(sorted(set(order)), topology, scores)
    place = np.array([network.nodes.index(name) for name in order])
    return predict_cost(traffic.phases(len(order), network.leaf[place]), network, place)


def test_hierarchical_allreduce_of_equal_zones() -> None:
    """Z = 2 zones of m = 2: in the zone N (m-1)/m twice over each node's link, 2 N (Z-1)/Z over each uplink, of which
    each rank's shard is a half."""
    found = cost_on(Traffic("allreduce", N, pattern="hierarchical"), two_level(["a1", "a2"], ["b1", "b2"]),
                    ["a1", "a2", "b1", "b2"])
    inside, between = N / 2 / 1000, 2 * N * (1 / 2) / 50
    assert found.seconds == pytest.approx(inside + between + inside)
    assert found.inter_zone_bytes == 2 * (2 * N / 2)
    assert found.bottleneck_link == "z0"
    # a flat ring sends 2 N (n-1)/n over each uplink
    flat = cost_on(Traffic("allreduce", N), two_level(["a1", "a2"], ["b1", "b2"]), ["a1", "a2", "b1", "b2"])
    assert flat.seconds == pytest.approx(2 * N * (3 / 4) / 50)
    assert found.inter_zone_bytes / flat.inter_zone_bytes == pytest.approx((1 / 2) / (3 / 4))


def test_shards_of_unequal_zones_overlap() -> None:
    """Zones of 2 and 3: shards 0-1/2, 1/2-1 against 0-1/3, 1/3-2/3, 2/3-1; each way N bytes (Z = 2) in parts."""
    traffic = Traffic("allreduce", N, pattern="hierarchical")
    within, between, after = traffic.phases(5, np.array([0, 0, 1, 1, 1]))
    assert within is after
    assert dict(zip(within.source.tolist(), np.asarray(within.bytes_per_pair).tolist(), strict=True)) == {
        0: N / 2, 1: N / 2, 2: pytest.approx(2 * N / 3), 3: pytest.approx(2 * N / 3), 4: pytest.approx(2 * N / 3)}
    sent = dict(zip(zip(between.source.tolist(), between.target.tolist(),
                strict=True), between.bytes_per_pair, strict=True))
    parts = {(0, 2): 1 / 3, (0, 3): 1 / 6, (1, 3): 1 / 6, (1, 4): 1 / 3}
    assert sent == {pair: pytest.approx(N * part) for one, part in parts.items() for pair in (one, one[::-1])}
    assert (within.rounds, between.rounds) == (2, 2)


def test_hierarchical_allreduce_where_zones_are_single_ranks_or_one() -> None:
    traffic = Traffic("allreduce", N, pattern="hierarchical")
    (alone,) = traffic.phases(3, np.array([5, 1, 9]))
    assert sorted(zip(alone.source.tolist(), alone.target.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0)]
    assert np.allclose(alone.bytes_per_pair, 2 * N * 2 / 3)
    first, second = traffic.phases(4)
    assert np.allclose(first.bytes_per_pair, N * 3 / 4) and first is second, "one zone: the two halves of a ring"


def test_base_graph_of_a_power_of_two() -> None:
    """n = 4: a model to r xor 1 and to r xor 2, each in half of the iterations."""
    near, far = Traffic("gossip", N, pattern="base").phases(4)
    assert near.target.tolist() == [1, 0, 3, 2] and far.target.tolist() == [2, 3, 0, 1]
    assert (near.bytes_per_pair, far.bytes_per_pair, near.rounds) == (N / 2, N / 2, 1 / 2)
    found = cost_on(Traffic("gossip", N, pattern="base"), two_level(["a1", "a2"], ["b1", "b2"]),
                    ["a1", "a2", "b1", "b2"])
    assert found.seconds == pytest.approx(N / 2 / 1000 + 2 * (N / 2) / 50)


def test_exponential_graph_of_any_number() -> None:
    """n = 5: distances 1, 2, 4, each in a third of the iterations; every rank sends one model in each."""
    phases = Traffic("adaptive-gossip", N, pattern="exponential").phases(5)
    assert [phase.target.tolist() for phase in phases] == [[1, 2, 3, 4, 0], [2, 3, 4, 0, 1], [4, 0, 1, 2, 3]]
    assert sum(5 * phase.bytes_per_pair for phase in phases) == pytest.approx(5 * N)
    assert sum(phase.rounds for phase in phases) == pytest.approx(1)


def test_delay_of_a_phase_with_a_share_of_the_iterations() -> None:
    scores = LinkScores(default_node_bandwidth=1e12, default_zone_bandwidth=(1e12,), default_latency=0.5)
    found = cost_on(Traffic("gossip", N, pattern="exponential"), two_level(["a", "b", "c", "d", "e"]),
                    ["a", "b", "c", "d", "e"], scores)
    assert found.seconds == pytest.approx(2 * 0.5)


def test_a_users_matrices() -> None:
    """Phase by phase: 10 bytes a1 -> b1 while 4 go a2 -> a1; then 5 bytes b1 -> a2. The diagonal does not count."""
    first = np.array([[7.0, 0, 10], [4, 0, 0], [0, 0, 0]])
    second = np.array([[0.0, 0, 0], [0, 0, 0], [0, 5, 0]])
    found = cost_on(Traffic("gossip", N, matrices=(first, second)), two_level(["a1", "a2"], ["b1"]),
                    ["a1", "a2", "b1"])
    assert found.seconds == pytest.approx(10 / 50 + 5 / 50)
    assert (found.inter_node_bytes, found.inter_zone_bytes) == (19, 15)
    assert found.intra_zone_fraction == pytest.approx(4 / 19)
    with pytest.raises(PlacementError, match=r"f.npz: a matrix of 3 x 3, but there are 4 ranks; valid: 4 x 4"):
        Traffic("gossip", N, pattern="f.npz", matrices=(first,)).phases(4)


def test_a_pattern_of_another_strategy() -> None:
    with pytest.raises(PlacementError, match="base: not valid with allreduce; valid: ring, hierarchical"):
        Traffic("allreduce", pattern="base").phases(4)


@pytest.mark.parametrize(("strategy", "pattern"), [(s, p) for s, patterns in COMM_PATTERNS.items() for p in patterns])
def test_the_default_is_the_first_and_one_rank_is_silent(strategy: str, pattern: str) -> None:
    ps = 1 if strategy == "ps" else 0
    one, other = (Traffic(strategy, N, ps, name).phases(8) for name in ("", COMM_PATTERNS[strategy][0]))
    assert [phase.target.tolist() for phase in one] == [phase.target.tolist() for phase in other]
    assert strategy == "ps" or Traffic(strategy, N, ps, pattern).phases(1) == []


def test_bytes_by_level_and_aggregation_degree() -> None:
    """Two tasks on a, one on each other node; leaves ab, c, d; m over ab and c. Ring a a b c d."""
    topology = build_topology([ZoneDecl("ab", nodes=("a", "b")), ZoneDecl("c", nodes=("c1",)), ZoneDecl("d", nodes=("d1",)),
                      ZoneDecl("m", children=("ab", "c")), ZoneDecl("o", children=("d",)),
                      ZoneDecl("r", children=("m", "o"))], kind="tree", source="")
    found = cost_on(Traffic("allreduce", N), topology, ["a", "a", "b", "c1", "d1"])
    each = 2 * N * 4 / 5
    # a-a stays on the node, a-b in the leaf, b-c below m, c-d and d-a cross both levels
    assert found.inter_zone_bytes_by_level == pytest.approx((3 * each, 2 * each, 0))
    assert found.inter_zone_bytes_by_level[0] == found.inter_zone_bytes
    assert (found.intra_node_fraction, found.intra_zone_fraction) == pytest.approx((1 / 5, 2 / 5))
    assert found.leaf_zone_count == 3


def test_aggregation_degree_of_servers_and_workers() -> None:
    """2 servers (a1, b1) and 4 workers (a1 a2 b1 b2): of 8 pairs 2 share a node and 4 a zone."""
    found = cost_on(Traffic("ps", N, 2), two_level(["a1", "a2"], ["b1", "b2"]), ["a1", "b1", "a1", "a2", "b1", "b2"])
    assert (found.intra_node_fraction, found.intra_zone_fraction) == pytest.approx((2 / 8, 4 / 8))
    assert cost_on(Traffic("allreduce", N), two_level(["a1"]), ["a1"]).intra_node_fraction == 1
