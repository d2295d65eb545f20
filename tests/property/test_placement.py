"""Properties of rank maps and placements on random instances."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from placing import SCORES, cluster, cost_of, job, matrix, node, two_level

from slurmdl.errors import InputError, PlacementError
from slurmdl.launch import rankmap_formats
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement import rank_search
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map, depth_first, largest_first, leaf_order, rank_orders
from slurmdl.plan import COMM_PATTERNS, Plan
from slurmdl.slurm.hostlist import expand_hostlist, fold_hostlist
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

bounded = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def topologies(draw: st.DrawFn, zones: int = 4, nodes: int = 4) -> Topology:
    """Two levels with the node names in random leaves."""
    sizes = draw(st.lists(st.integers(1, nodes), min_size=1, max_size=zones))
    names = draw(st.permutations([f"n{i:02d}" for i in range(sum(sizes))]))
    ends = list(itertools.accumulate(sizes))
    return two_level(*(names[end - size:end] for size, end in zip(sizes, ends, strict=True)))


@st.composite
def link_scores(draw: st.DrawFn, topology: Topology) -> LinkScores:
    bandwidths = st.floats(1.0, 1000.0)
    return LinkScores(nodes={name: LinkScore(draw(bandwidths)) for name in topology.nodes if draw(st.booleans())},
                      zones={name: LinkScore(draw(bandwidths)) for name in topology.zones if draw(st.booleans())},
                      default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,),
                      default_latency=draw(st.sampled_from([0.0, 0.1])))


@st.composite
def sparse(draw: st.DrawFn, ranks: int) -> npt.NDArray[np.float64]:
    """Sparse matrix of bytes from rank to rank."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    sends = generator.random((ranks, ranks)) < draw(st.sampled_from([1, 3])) / ranks
    return np.where(sends, generator.integers(1, 10, (ranks, ranks)), 0.0)


@settings(bounded, max_examples=100)
@given(st.data())
def test_rank_map_of_any_traffic(data: st.DataObject) -> None:
    """It keeps the tasks of each node, is never worse than a plain order, and has rank 0 on the first node."""
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    slots = [(name, data.draw(st.integers(1, 3))) for name in data.draw(st.permutations(sorted(topology.nodes)))]
    slots = slots[:data.draw(st.integers(1, len(slots)))]
    tasks = np.array([count for _, count in slots])
    ranks = int(tasks.sum())
    strategy, pattern = data.draw(st.sampled_from(
        [*((s, p) for s, patterns in COMM_PATTERNS.items() for p in patterns), ("gossip", "m.npz")]))
    assume(strategy != "ps" or ranks > 1)
    ps = data.draw(st.integers(1, ranks - 1)) if strategy == "ps" else 0
    count = data.draw(st.integers(1, 3)) if pattern == "m.npz" else 0
    matrices = tuple(data.draw(sparse(ranks)) for _ in range(count))
    traffic = Traffic(strategy, 1000.0, ps, pattern, matrices)
    first, free = (best_rank_map(slots, topology, scores, traffic, rank0) for rank0 in ("first", "any"))
    network = network_links([name for name, _ in slots], topology, scores)
    for rank_map, rank0, rank0_option in ((first, 0, "first"), (free, None, "any")):
        assert Counter(rank_map.nodes) == dict(slots)
        assert rank_map.roles == ("ps",) * ps + ("worker",) * (ranks - ps)
        assert rank_map.cost == rank_map.order_costs[rank_map.order]
        assert rank_map.cost.sort_key == cost_of(traffic, topology, rank_map.nodes, scores).sort_key
        assert rank_map.any_rank0_cost == free.cost
        rule_based = rank_orders(slots, topology, scores, traffic, rank0_option).rule_based_cost.sort_key
        assert rank_map.cost.sort_key <= rule_based
        plain = [leaf_order(network, rank0), np.arange(len(tasks)), depth_first(network, rank0),
                 largest_first(network, tasks, rank0)]
        for nodes in plain if traffic.kind in ("graph", "matrices") else plain[:2] if rank0 is None else ():
            order = [network.nodes[i] for i in np.repeat(nodes, tasks[nodes])]
            cost = cost_of(traffic, topology, order, scores).sort_key
            assert rank_map.cost.sort_key <= cost
            assert traffic.kind == "ring" or traffic.ps or rule_based <= cost
    assert first.nodes[0] == slots[0][0]
    assert (first.rank0_slowdown > 0) == (first.cost.sort_key[0] > free.cost.sort_key[0])
    if pattern == "ring":
        assert first.cost.sort_key == free.cost.sort_key


@bounded
@given(st.data())
def test_servers_are_close_to_the_best_assignment(data: st.DataObject) -> None:
    topology = data.draw(topologies(zones=3, nodes=3))
    scores = data.draw(link_scores(topology))
    slots = [(name, data.draw(st.integers(1, 2))) for name in sorted(topology.nodes)]
    tasks = [name for name, count in slots for _ in range(count)]
    assume(len(tasks) > 1)
    ps = data.draw(st.integers(1, min(3, len(tasks) - 1)))
    orders = [[*servers, *(Counter(tasks) - Counter(servers)).elements()]
              for servers in set(itertools.combinations(tasks, ps))]
    seconds = {order[0]: min(cost_of(Traffic("ps", 1000.0, ps), topology, each, scores).seconds for each in orders
                             if each[0] == order[0]) for order in orders}
    for rank0, best in (("any", min(seconds.values())), ("first", seconds[tasks[0]])):
        rank_map = best_rank_map(slots, topology, scores, Traffic("ps", 1000.0, ps), rank0)
        assert rank_map.cost.seconds <= 1.15 * best + 1e-9


@bounded
@given(st.data())
def test_placement_uses_free_nodes_and_is_deterministic(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    states = [data.draw(st.sampled_from(["IDLE", "ALLOCATED", "DOWN", "IDLE+DRAIN"])) for _ in topology.nodes]
    snapshot = cluster(*(node(name, state, cpus_unallocated=4 * (state == "IDLE"),
                              memory_unallocated=1000 * (state == "IDLE"))
                         for name, state in zip(sorted(topology.nodes), states, strict=True)))
    free = sum(state == "IDLE" for state in states)
    usable = free + sum(state == "ALLOCATED" for state in states)
    node_count = data.draw(st.integers(1, len(topology.nodes)))
    request = job(node_count, ntasks_per_node=2)
    try:
        placement = place_job(request, snapshot, topology, scores)
    except PlacementError:
        assert usable < node_count
        return
    assert len(set(placement.nodes)) == node_count
    assert placement.free_now == (free >= node_count)
    assert all(placement.free_now <= (snapshot.node_by_name[name].state == ("IDLE",)) for name in placement.nodes)
    assert placement.rank_map is not None
    assert Counter(placement.rank_map.nodes) == dict.fromkeys(placement.nodes, 2)
    assert sum(placement.nodes_per_zone.values()) == node_count
    assert place_job(request, snapshot, topology, scores) == placement
    if len(placement.nodes_per_zone) == 1:
        return
    # several leaves are used only if no single leaf is as fast; a leaf may have a slow node
    idle = [name for name in snapshot.names if snapshot.node_by_name[name].state == ("IDLE",)]
    for zone in topology.zones[:-1]:
        for names in itertools.combinations([name for name in idle if topology.leaf_of(name) == zone], node_count):
            one_leaf = best_rank_map([(name, 2) for name in names], topology, scores, Traffic("allreduce"))
            assert placement.rank_map.cost.seconds < one_leaf.cost.seconds


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


@bounded
@given(st.lists(st.from_regex(r"\A[a-z]{1,3}[0-9]{0,3}\Z"), max_size=30))
def test_fold_and_expand_are_inverse(names: list[str]) -> None:
    assert sorted(expand_hostlist(fold_hostlist(names))) == sorted(set(names))


@bounded
@given(st.text(alphabet="n[]0189-,:{} \t", max_size=24))
def test_any_text_is_a_hostlist_or_a_one_line_error(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all(name and "," not in name for name in names)
