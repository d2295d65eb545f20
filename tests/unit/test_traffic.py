"""Traffic of all kinds, and its predicted cost: results by hand, and all messages summed one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placing import SCORES, cost_of, matrix, sum_messages, three_level, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.plan import COMM_PATTERNS
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

N = 1200.0
bounded = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
TWO = two_level(["a1", "a2"], ["b1", "b2"])
STAR = two_level(["a0", "a1", "a2", "a3", "a4", "a5"])
UNEVEN = two_level(["a0", "a1", "a2"], ["b0", "b1"])
HIERARCHICAL = Traffic("allreduce", N, pattern="hierarchical")
ISLANDS = Traffic("local-sgd", N, islands="zone")


def mesh(sizes: str, volumes: str) -> Traffic:
    return DlOptions(mesh=sizes, bytes=volumes).traffic


def groups(names: str, volumes: str, meshes: str = "") -> Traffic:
    return DlOptions(groups=names, bytes=volumes, mesh=meshes).traffic


#: traffic -> bytes of an iteration of 8 ranks, four in each of two zones; whether each rank receives what it sends
KINDS: dict[str, tuple[Traffic, float, bool]] = {
    "ring": (Traffic("allreduce", N), 14 * N, True), "hierarchical": (HIERARCHICAL, 14 * N, True),
    "local-sgd": (Traffic("local-sgd", N), 14 * N, True), "servers": (Traffic("ps", N, 2), 12 * N, True),
    **{pattern: (Traffic("gossip", N, pattern=pattern), 8 * N, True) for pattern in COMM_PATTERNS["gossip"]},
    "adaptive": (Traffic("adaptive-gossip", N), 8 * N, True),
    # 2 (m - 1) models in each of two zones of m, every 32nd time one to the other zone, which gathers its shards
    "islands": (ISLANDS, 12 * N + 2 * N / 32 + 6 * N / 32, True),
    "gossip between islands": (Traffic("gossip", N, islands="zone"), 12 * N + 2 * N + 6 * N, True),
    "graph between islands": (Traffic("adaptive-gossip", N, islands="zone"), 12 * N + 2 * N + 6 * N, True),
    # of 8 ranks: each half of 3,000 twice, each half of 900 twice; four pairs of stages, forward and backward
    "mesh": (mesh("dp=2,pp=2,tp=2", "dp=900,pp=50,tp=3000"), 8 * 3000 + 8 * 900 + 8 * 50, True),
    "experts": (mesh("dp=2,ep=4", "dp=900,ep=500"), 2 * 900 * 7 + 8 * 3 * 125, True),
    "groups": (groups("a=2,b=2", "a=1200,a:b=800"), 2 * 1200 * 3 + 800, False),
    "groups with meshes": (groups("a=1,b=1", "tp=1000", "a:tp=4/b:tp=4"), 2 * 2 * 1000 * 3, True),
    "matrix": (Traffic("gossip", N, pattern="m.npz", matrices=(np.arange(64.0).reshape(8, 8), np.eye(8))),
               64 * 63 / 2 - 9 * 28, False),
}
ZONES = np.array([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_an_iteration(kind: str) -> None:
    traffic, expected, is_balanced = KINDS[kind]
    total = np.sum([matrix(phase, 8) for phase in traffic.phases(8, ZONES)], axis=0)
    assert total.sum() == pytest.approx(expected)
    assert np.allclose(total.sum(axis=0), total.sum(axis=1)) == is_balanced
    assert all(phase.rounds > 0 for phase in traffic.phases(8, ZONES)) and len(traffic.roles(8)) == 8
    if kind not in ("mesh", "experts", "groups", "groups with meshes", "matrix", "servers"):
        assert traffic.phases(1) == []
    if kind != "servers" and not (traffic.is_zone_dependent or traffic.matrices):
        assert [matrix(phase, 8).tolist() for phase in traffic.phases(8)] == [
            matrix(phase, 8).tolist() for phase in traffic.phases(8, ZONES)]


TIERS = three_level(2, 2, 3)


@st.composite
def networks(draw: st.DrawFn) -> LinkScores:
    """Scores of links in three levels: unequal, with slow paths, rails and a network inside leaf zones."""
    def score() -> LinkScore:
        return LinkScore(draw(st.sampled_from([300.0, 1000.0, 2000.0])), draw(st.sampled_from([0.0, 0.2, 1.0])))

    return LinkScores({name: score() for name in ("n000", "n001", "n005", "x")}, {
        name: score() for name in TIERS.zones if draw(st.booleans())},
        inter_leaf={pair: LinkScore(20.0, draw(st.sampled_from([0.1, 9.0]))) for pair in ("z0|z1", "z1|z3")
                    if draw(st.booleans())},
        default_node_bandwidth=1000.0, default_zone_bandwidth=draw(st.sampled_from([(50.0, 25.0), (1e4, 1e5)])),
        default_latency=draw(st.sampled_from([0.0, 0.1])),
        default_leaf_bandwidth=draw(st.sampled_from([0.0, 5000.0])), default_rails=draw(st.sampled_from([1, 2, 4])))


@bounded
@given(st.sampled_from([*KINDS]), networks(), st.lists(st.sampled_from([*TIERS.nodes, "x"]), min_size=1, max_size=6),
       st.randoms(use_true_random=False))
def test_cost_is_that_of_all_messages(kind: str, scores: LinkScores, names: list[str], random: object) -> None:
    links = network_links(sorted(set(names)), TIERS, scores)
    node_of_rank = np.array([random.randrange(len(links.nodes)) for _ in range(8)])  # type: ignore[attr-defined]
    phases = KINDS[kind][0].phases(8, links.leaf[node_of_rank])
    cost, expected = predict_cost(phases, links, node_of_rank), sum_messages(phases, links, node_of_rank)
    assert cost.bottleneck_link in expected.bottleneck_link.split(",")
    assert (cost.seconds, cost.inter_node_bytes, cost.inter_zone_bytes, cost.intra_node_fraction,
            cost.intra_zone_fraction) == pytest.approx((
                expected.seconds, expected.inter_node_bytes, expected.inter_zone_bytes, expected.intra_node_fraction,
                expected.intra_zone_fraction), abs=1e-9)
    assert cost.inter_zone_bytes_by_level == pytest.approx(expected.inter_zone_bytes_by_level)
    assert cost.leaf_zone_count == expected.leaf_zone_count


# root over m1 and m2, each over a leaf with one node
DEEP = build_topology([
    ZoneDecl("l1", nodes=("a",)), ZoneDecl("l2", nodes=("b",)), ZoneDecl("m1", children=("l1",)),
    ZoneDecl("m2", children=("l2",)), ZoneDecl("r", children=("m1", "m2"))], kind="tree", source="")
SLOW_TOP = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e9, 10.0), default_latency=1.0)
SLOW_START = LinkScores(default_node_bandwidth=1e12, default_zone_bandwidth=(1e12,), default_latency=0.5)
MATRICES = (np.array([[7.0, 0, 10], [4, 0, 0], [0, 0, 0]]), np.array([[0.0, 0, 0], [0, 0, 0], [0, 5, 0]]))


@pytest.mark.parametrize(("traffic", "topology", "order", "scores", "seconds", "inter_node", "inter_zone", "link"), [
    # a ring by zone crosses each uplink once, an alternating one at every step
    (Traffic("allreduce", N), TWO, "a1 a2 b1 b2", SCORES, 1.5 * N / 50, 6 * N, 3 * N, "z0"),
    (Traffic("allreduce", N), TWO, "a1 b1 a2 b2", SCORES, 3 * N / 50, 6 * N, 6 * N, "z0"),
    (Traffic("allreduce", N), TWO, "a1 a2", SCORES, N / 1000, 2 * N, 0, "a1"),
    (Traffic("allreduce", N), TWO, "a1 a1 a1", SCORES, 0, 0, 0, ""),
    # nodes without a zone
    (Traffic("allreduce", N), Topology.flat(["a", "b"]), "a b x", SCORES, 4 / 3 * N / 1000, 4 * N, 0, "a"),
    (Traffic("allreduce", N), TWO, "a1 x", SCORES, N / 50, 2 * N, 2 * N, "z0"),
    # two rounds, each up and down over node link, leaf uplink and middle uplink
    (Traffic("allreduce", N), DEEP, "a b", SLOW_TOP, N / 10 + 2 * 6 * 1.0, 2 * N, 2 * N, "m1"),
    # one worker and 1/n of the shards on each of n hosts send 2 N (n - 1) / n per link and direction (Jiang et al.,
    # A unified architecture for accelerating distributed DNN training, OSDI 2020)
    *((Traffic("ps", N, n), STAR, " ".join([f"a{i}" for i in range(n)] * 2), SCORES, 2 * N * (n - 1) / n / 1000,
       2 * N * (n - 1), 0, "a0") for n in (2, 3, 6)),
    (Traffic("ps", N, 1), STAR, "a0 a1 a2 a3", SCORES, 2 * 3 * N / 1000, 6 * N, 0, "a0"),
    # a zone with w of W workers and a fraction f of the shards sends N f (W - w), and N w (1 - f) back
    (Traffic("ps", N, 1), UNEVEN, "a0 a1 a2 b0 b1", SCORES, 2 * N * 2 / 50, 8 * N, 4 * N, "z0"),
    *((Traffic("gossip", N), TWO, order, SCORES, 4 / 3 * N / 50, 4 * N, 8 / 3 * N, "z0")
      for order in ("a1 a2 b1 b2", "a1 b1 a2 b2", "b2 a1 b1 a2")),
    # Z = 2 zones of m = 2: twice N (m - 1) / m over each node link, 2 N (Z - 1) / Z over each uplink
    (HIERARCHICAL, TWO, "a1 a2 b1 b2", SCORES, 2 * N / 2 / 1000 + N / 50, 6 * N, 2 * N, "z0"),
    (Traffic("gossip", N, pattern="base-2"), TWO, "a1 a2 b1 b2", SCORES, N / 2 / 1000 + N / 50, 4 * N, 2 * N, "z0"),
    # zones of 2 and 1: gradients in the first one in every iteration; models between them in every 32nd
    (ISLANDS, two_level(["a1", "a2"], ["b1"]), "a1 a2 b1", SCORES, N / 1000 + N / 50 / 32 + N / 2 / 1000 / 32,
     2 * N + 2 * N / 32 + N / 32, 2 * N / 32, "z0"),
    (ISLANDS, TWO, "a1 a2", SCORES, N / 1000, 2 * N, 0, "a1"),
    (Traffic("gossip", N, pattern="one-peer-exponential"), STAR, "a0 a1 a2 a3 a4", SLOW_START, 1.0, 5 * N, 0, "a0"),
    # first 10 bytes a1 -> b1 and 4 bytes a2 -> a1, then 5 bytes b1 -> a2; the diagonal is ignored
    (Traffic("gossip", N, matrices=MATRICES), TWO, "a1 a2 b1", SCORES, 10 / 50 + 5 / 50, 19, 15, "z0"),
])
def test_cost_by_hand(traffic: Traffic, topology: Topology, order: str, scores: LinkScores, seconds: float,
                      inter_node: float, inter_zone: float, link: str) -> None:
    cost = cost_of(traffic, topology, order.split(), scores)
    assert (cost.seconds, cost.inter_node_bytes, cost.inter_zone_bytes) == pytest.approx(
        (seconds, inter_node, inter_zone))
    assert cost.bottleneck_link == link


def test_bytes_by_level_and_local_fractions() -> None:
    """Ring a a b c1 d1 on leaves ab, c, d, with m over ab and c, o over d, and r over m and o."""
    topology = build_topology([ZoneDecl("ab", nodes=("a", "b")), ZoneDecl("c", nodes=("c1",)),
                               ZoneDecl("d", nodes=("d1",)), ZoneDecl("m", children=("ab", "c")),
                               ZoneDecl("o", children=("d",)), ZoneDecl("r", children=("m", "o"))],
                              kind="tree", source="")
    cost = cost_of(Traffic("allreduce", N), topology, ["a", "a", "b", "c1", "d1"])
    each = 2 * N * 4 / 5
    # a-a stays on the node, a-b in the leaf, b-c below m, c-d and d-a cross both levels
    assert cost.inter_zone_bytes_by_level == pytest.approx((3 * each, 2 * each, 0))
    assert (cost.intra_node_fraction, cost.intra_zone_fraction) == pytest.approx((1 / 5, 2 / 5))
    assert cost.leaf_zone_count == 3
    # 2 servers and 4 workers: of 8 pairs 2 share a node and 4 a zone
    servers = cost_of(Traffic("ps", N, 2), TWO, ["a1", "b1", "a1", "a2", "b1", "b2"])
    assert (servers.intra_node_fraction, servers.intra_zone_fraction) == pytest.approx((2 / 8, 4 / 8))
    assert cost_of(Traffic("allreduce", N), TWO, ["a1"]).intra_node_fraction == 1


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


def test_shards_of_unequal_zones_overlap() -> None:
    """Zones of 2 and 3: shards 0-1/2, 1/2-1 and 0-1/3, 1/3-2/3, 2/3-1; N bytes per direction (Z = 2) in parts."""
    within, between, after = HIERARCHICAL.phases(5, np.array([0, 0, 1, 1, 1]))
    assert within is after
    assert dict(zip(within.source.tolist(), np.asarray(within.bytes_per_pair).tolist(), strict=True)) == {
        0: N / 2, 1: N / 2, 2: pytest.approx(2 * N / 3), 3: pytest.approx(2 * N / 3), 4: pytest.approx(2 * N / 3)}
    pairs = zip(between.source.tolist(), between.target.tolist(), strict=True)
    overlaps = {(0, 2): 1 / 3, (0, 3): 1 / 6, (1, 3): 1 / 6, (1, 4): 1 / 3}
    assert dict(zip(pairs, between.bytes_per_pair, strict=True)) == {
        pair: pytest.approx(N * fraction) for key, fraction in overlaps.items() for pair in (key, key[::-1])}
    assert (within.rounds, between.rounds) == (2, 2)


@pytest.mark.parametrize(("traffic", "zones", "expected"), [
    # single ranks, or one zone: a ring, in the second case in two halves
    (HIERARCHICAL, [5, 1, 9], [([1, 2, 0], 2 * N * 2 / 3, 4)]),
    (HIERARCHICAL, [0] * 4, [([1, 2, 3, 0], N * 3 / 4, 3)] * 2),
    # to r xor 1 and to r xor 2, each in half of the iterations
    (Traffic("gossip", N, pattern="base-2"), [0] * 4, [([1, 0, 3, 2], N / 2, 1 / 2), ([2, 3, 0, 1], N / 2, 1 / 2)]),
    (Traffic("adaptive-gossip", N, pattern="one-peer-exponential"), [0] * 5, [
        ([(i + step) % 5 for i in range(5)], pytest.approx(N / 3), pytest.approx(1 / 3)) for step in (1, 2, 4)]),
    (Traffic("local-sgd", N, islands="node"), [0] * 3, [([1, 2, 0], pytest.approx(4 / 3 * N), 4)]),
])
def test_messages_by_hand(traffic: Traffic, zones: list[int], expected: list[tuple[list[int], float, float]]) -> None:
    """Target of each rank, bytes of each message and rounds of each phase."""
    assert [(phase.target[np.argsort(phase.source)].tolist(), float(np.mean(phase.bytes_per_pair)), phase.rounds)
            for phase in traffic.phases(len(zones), np.array(zones))] == expected


@pytest.mark.parametrize("pattern", ["random-matching", "one-peer-exponential", "base-2", "zone-aware"])
def test_islands_of_gossip_send_one_model_from_each_zone(pattern: str) -> None:
    """In every iteration, whatever the number of ranks of a zone; with random partners a ring stands for them."""
    zones = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"], ["d1", "d2"]]
    ranks = [node for zone in zones for node in zone]
    cost = cost_of(Traffic("gossip", N, pattern=pattern, islands="zone"), two_level(*zones), ranks)
    assert cost.inter_zone_bytes == pytest.approx(4 * N)


@bounded
@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_bytes_for_all_zone_sizes(zone_list: list[int]) -> None:
    zone, ranks = np.array(zone_list), len(zone_list)
    zones, sizes = np.unique(zone, return_counts=True)

    def total(traffic: Traffic) -> npt.NDArray[np.float64]:
        return np.asarray(np.sum([matrix(phase, ranks) for phase in traffic.phases(ranks, zone)], axis=0))

    for pattern in COMM_PATTERNS["gossip"]:
        sent = total(Traffic("gossip", N, pattern=pattern))
        assert np.allclose(sent.sum(axis=0), sent.sum(axis=1))
        resting = 1 / ranks if pattern == "random-matching" and ranks % 2 else 0
        if pattern in ("base-2", "zone-aware"):  # some ranks are idle in some rounds
            assert (sent.sum(axis=1) <= N + 1e-9).all()
        else:
            assert np.allclose(sent.sum(axis=1), N * (1 - resting))
    # reduce-scatter and allgather in each zone of m: 2 N (m - 1), and 2 N (Z - 1) between the zones
    sent = total(HIERARCHICAL)
    assert np.isclose(sent.sum(), 2 * N * ((sizes - 1).sum() + len(sizes) - 1))
    each = 2 * N * (len(zones) - 1) / len(zones)
    for name, size in zip(zones, sizes, strict=True):
        inside = zone == name
        assert np.isclose(sent[np.ix_(inside, ~inside)].sum(), each)
        assert np.isclose(sent[np.ix_(~inside, inside)].sum(), each)
        # each rank sends at most its shard's fraction to other zones
        assert (sent[np.ix_(inside, ~inside)].sum(axis=1) <= each / size + 1e-9).all()


@pytest.mark.parametrize(("traffic", "ranks", "message"), [
    (Traffic("allreduce", pattern="base-2"), 4,
     "--dl-comm-pattern=base-2: not valid with allreduce; expected ring, hierarchical"),
    (Traffic("gossip", pattern="f.npz", matrices=MATRICES[:1]), 4,
     "--dl-comm-pattern=f.npz: a matrix of 3 x 3 for 4 ranks; expected 4 x 4"),
    (Traffic("ps", N, 0), 4, "--dl-ps=0: 4 tasks can hold 1 to 3 parameter servers"),
    (Traffic("ps", N, 4), 4, "--dl-ps=4: 4 tasks can hold 1 to 3 parameter servers"),
    (Traffic("ps", N, 1), 1, "--dl-strategy=ps: expected at least 2 tasks, a parameter server and a worker"),
    (mesh("dp=2,pp=2,tp=8", ""), 8, "a mesh of 32 ranks"),
    (groups("a=2,b=3", "a=1G"), 9, "--dl-groups: 9 ranks on 5 nodes; expected the same number on each node"),
    (groups("a=2,b=1", "tp=1G", "a:dp=2,tp=4/b:tp=4"), 6,
     "--dl-mesh: a: 4 ranks on each node; the job has 6 ranks on 3 nodes"),
    (Traffic("allreduce"), 2**20 + 1, "1,048,577 ranks; expected at most 1048576"),
])
def test_traffic_that_does_not_fit_is_an_error(traffic: Traffic, ranks: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        traffic.phases(ranks)
