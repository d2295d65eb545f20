"""Properties of traffic, costs and rank swaps on random instances."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placing import SCORES, matrix, two_level
from test_placement import link_scores, topologies

from slurmdl.launch import rankmap_formats
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement import rank_search
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.rank_orders import best_rank_map, depth_first, largest_first, leaf_order, rank_orders
from slurmdl.plan import COMM_PATTERNS, Plan
from slurmdl.traffic import Traffic

bounded = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
zonings = st.lists(st.integers(0, 5), min_size=2, max_size=40).map(lambda zones: np.array(zones))


@st.composite
def sparse(draw: st.DrawFn, ranks: int) -> npt.NDArray[np.float64]:
    """Sparse matrix of bytes from rank to rank."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    sends = generator.random((ranks, ranks)) < draw(st.sampled_from([1, 3])) / ranks
    return np.where(sends, generator.integers(1, 10, (ranks, ranks)), 0.0)


@bounded
@given(st.sampled_from([(s, p) for s in ("allreduce", "gossip") for p in COMM_PATTERNS[s]]), zonings)
def test_every_rank_receives_as_much_as_it_sends(strategy_and_pattern: tuple[str, str],
                                                 zone: npt.NDArray[np.int64]) -> None:
    strategy, pattern = strategy_and_pattern
    ranks = len(zone)
    phases = Traffic(strategy, 60.0, pattern=pattern).phases(ranks, zone)
    total = sum(matrix(phase, ranks) for phase in phases)
    if pattern == "hierarchical":
        # reduce-scatter and allgather in each zone of m: 2 N (m - 1), and 2 N (Z - 1) between the zones
        _, sizes = np.unique(zone, return_counts=True)
        expected = 2 * 60 * ((sizes - 1).sum() + len(sizes) - 1)
        assert np.isclose(np.sum(total), expected)
    else:
        resting = 1 / ranks if pattern == "random-matching" and ranks % 2 else 0
        each = 2 * 60 * (ranks - 1) / ranks if pattern == "ring" else 60 * (1 - resting)
        if pattern in ("base-2", "zone-aware"):  # some ranks are idle in some rounds
            assert (np.sum(total, axis=1) <= each + 1e-9).all()
        else:
            assert np.allclose(np.sum(total, axis=1), each)
    if pattern != "hierarchical":
        assert np.allclose(np.sum(total, axis=0), np.sum(total, axis=1))


@bounded
@given(zonings)
def test_uplinks_of_hierarchical_allreduce(zone: npt.NDArray[np.int64]) -> None:
    """2 N (Z - 1) / Z per uplink and direction, for all zone sizes."""
    zones = np.unique(zone)
    total = np.asarray(sum(matrix(phase, len(zone)) for phase in
                           Traffic("allreduce", 60.0, pattern="hierarchical").phases(len(zone), zone)))
    for name in zones:
        inside = zone == name
        for bytes_of_uplink in (total[np.ix_(inside, ~inside)].sum(), total[np.ix_(~inside, inside)].sum()):
            assert np.isclose(bytes_of_uplink, 2 * 60 * (len(zones) - 1) / len(zones))
        # each rank sends at most its shard's fraction to other zones
        most = 2 * 60 * (len(zones) - 1) / len(zones) / inside.sum()
        assert (total[np.ix_(inside, ~inside)].sum(axis=1) <= most + 1e-9).all()


@bounded
@given(st.data())
def test_local_fractions_equal_the_sum_of_messages(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    names = sorted(topology.nodes)
    order = data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=12))
    strategy, pattern = data.draw(st.sampled_from([(s, p) for s, ps in COMM_PATTERNS.items() for p in ps]))
    ps = data.draw(st.integers(1, len(order) - 1)) if strategy == "ps" else 0
    network = network_links(names, topology, SCORES)
    node_of_rank = np.array([names.index(name) for name in order])
    phases = Traffic(strategy, 60.0, ps, pattern).phases(len(order), network.leaf[node_of_rank])
    cost = predict_cost(phases, network, node_of_rank)
    sent = node = zone = 0.0
    for phase in phases:
        for (i, j), size in np.ndenumerate(matrix(phase, len(order))):
            sent += size
            node += size * (order[i] == order[j])
            zone += size * (topology.leaf_of(order[i]) == topology.leaf_of(order[j]))
    assert np.isclose(cost.inter_node_bytes, sent - node) and np.isclose(cost.inter_zone_bytes, sent - zone)
    assert np.isclose(cost.intra_node_fraction, node / sent) and np.isclose(cost.intra_zone_fraction, zone / sent)
    assert 0 <= cost.intra_node_fraction <= cost.intra_zone_fraction <= 1
    assert cost.inter_zone_bytes_by_level == (cost.inter_zone_bytes, 0.0)
    assert cost.leaf_zone_count == len({topology.leaf_of(name) for name in order})


@bounded
@given(st.data())
def test_searched_map_keeps_the_tasks_and_is_never_worse(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    slots = [(name, data.draw(st.integers(1, 3))) for name in sorted(topology.nodes)]
    ranks = sum(count for _, count in slots)
    has_matrices = data.draw(st.booleans())
    matrices = tuple(data.draw(sparse(ranks)) for _ in range(data.draw(st.integers(1, 3)))) if has_matrices else ()
    traffic = Traffic("gossip", 60.0, pattern="m.npz" if matrices else "one-peer-exponential", matrices=matrices)
    rank0 = data.draw(st.sampled_from(["first", "any"]))
    rank_map = best_rank_map(slots, topology, scores, traffic, rank0)
    rule_based_cost = rank_orders(slots, topology, scores, traffic, rank0).rule_based_cost
    assert Counter(rank_map.nodes) == dict(slots)
    network = network_links([name for name, _ in slots], topology, scores)
    tasks = np.array([count for _, count in slots])
    first = 0 if rank0 == "first" else None
    for nodes in (depth_first(network, first), leaf_order(network, first), largest_first(network, tasks, first),
                  np.arange(len(tasks))):
        plain = predict_cost(traffic.phases(ranks), network, np.repeat(nodes, tasks[nodes]))
        assert rank_map.cost.sort_key <= rule_based_cost.sort_key <= plain.sort_key
    node_of_rank = np.array([network.nodes.index(name) for name in rank_map.nodes])
    assert predict_cost(traffic.phases(ranks), network, node_of_rank).sort_key == rank_map.cost.sort_key


@bounded
@given(st.data())
def test_swap_search_updates_every_link_load(data: st.DataObject) -> None:
    """The updated link loads equal link loads computed from scratch."""
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    names = sorted(topology.nodes)
    node_of_rank = np.repeat(np.arange(len(names)), [data.draw(st.integers(1, 3)) for _ in names])
    network = network_links(names, topology, scores)
    flow = np.stack([data.draw(sparse(len(node_of_rank))) for _ in range(2)])
    for phase in flow:
        np.fill_diagonal(phase, 0)
    search = rank_search._SwapSearch(flow, network, node_of_rank)
    for power in rank_search.NORM_POWERS:
        assert search.descend(power, 400) > 0, "the swaps end"
    fresh = rank_search._SwapSearch(flow, network, search.node_of_rank)
    assert np.allclose(search.load, fresh.load, atol=1e-6)
    assert np.allclose(search.below, fresh.below, atol=1e-6)
    assert Counter(search.node_of_rank.tolist()) == Counter(node_of_rank.tolist())


def test_swaps_end_if_phases_differ_much() -> None:
    """Base graph on zones of 6 and 2: with a high power one phase dominates the cost."""
    topology = two_level(["n0", "n1", "n2", "n3", "n4", "n5"], ["n6", "n7"])
    network = network_links(sorted(topology.nodes), topology, SCORES)
    flow = np.stack([matrix(phase, 8) for phase in Traffic("gossip", 1e8, pattern="base-2").phases(8)])
    search = rank_search._SwapSearch(flow, network, np.arange(8))
    for power in rank_search.NORM_POWERS:
        assert search.descend(power, 100) > 0


def test_ring_with_permuted_ranks_is_found() -> None:
    """Permuted ranks of a ring on 4 zones of 8: the cost of the map equals the cost of an ordered ring."""
    topology = two_level(*[[f"n{8 * z + i:02d}" for i in range(8)] for z in range(4)])
    label = np.random.default_rng(3).permutation(32)
    ring = np.zeros((32, 32))
    ring[label, np.roll(label, -1)] = 50.0
    slots = [(name, 1) for name in sorted(topology.nodes)]
    rank_map = best_rank_map(slots, topology, SCORES, Traffic("gossip", matrices=(ring,)))
    assert rank_map.cost.seconds == 1.0 < rank_map.order_costs["depth-first"].seconds
    assert rank_map.cost.inter_zone_bytes == 4 * 50


def test_stencil_with_permuted_ranks_is_cut_into_squares() -> None:
    """8 x 8 in 4 zones of 16: squares of 4 x 4 have 8 edges to their neighbors, 32 messages in total."""
    index = np.arange(64).reshape(8, 8)
    stencil = np.zeros((64, 64))
    for left, right in ((index[:-1], index[1:]), (index[:, :-1], index[:, 1:])):
        stencil[left, right] = stencil[right, left] = 1.0
    label = np.random.default_rng(5).permutation(64)
    topology = two_level(*[[f"n{16 * z + i:02d}" for i in range(16)] for z in range(4)])
    scores = LinkScores(default_node_bandwidth=1e6, default_zone_bandwidth=(1.0,), default_latency=0.0)
    rank_map = best_rank_map([(name, 1) for name in sorted(topology.nodes)], topology, scores,
                          Traffic("gossip", matrices=(stencil[np.ix_(label, label)],)))
    assert rank_map.cost.inter_zone_bytes == 32
    assert rank_map.cost.seconds == 8


@bounded
@given(st.data())
def test_every_rank_map_format_is_read_back(data: st.DataObject) -> None:
    nodes = [f"n{i}" for i in range(data.draw(st.integers(1, 6)))]
    extra = data.draw(st.lists(st.sampled_from(nodes), max_size=12))
    order = tuple(data.draw(st.permutations(nodes + extra)))
    tasks = RankMapInput(Plan("allreduce", order, ("worker",) * len(order), {}), nodes, data.draw(st.integers(1, 4)))
    for form, (_, read) in rankmap_formats.FORMATS.items():
        if form != "torchrun":
            assert tuple(read(rankmap_formats.format_rank_map(form, tasks), tasks)) == order
