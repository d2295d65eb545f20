"""Properties of rank maps, placements and hostlists on random instances."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from placing import cluster, cost_of, node, two_level

from slurmdl.errors import InputError, PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.plan import COMM_PATTERNS, STRATEGIES
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


@bounded
@given(st.data())
def test_rank_map_keeps_the_tasks_and_is_never_worse(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    slots = [(name, data.draw(st.integers(1, 3))) for name in sorted(topology.nodes)]
    tasks = sum(count for _, count in slots)
    strategy = data.draw(st.sampled_from(STRATEGIES))
    assume(strategy != "ps" or tasks > 1)
    ps = data.draw(st.integers(1, min(4, tasks - 1))) if strategy == "ps" else 0
    rank_map = best_rank_map(slots, topology, scores, Traffic(strategy, 1000.0, ps), "any")
    assert Counter(rank_map.nodes) == dict(slots)
    assert rank_map.roles == ("ps",) * ps + ("worker",) * (tasks - ps)
    in_slot_order = [name for name, count in slots for _ in range(count)]
    by_leaf = sorted(in_slot_order, key=lambda name: topology.zone_index[topology.leaf_of(name)])
    for order in (in_slot_order, by_leaf):
        assert rank_map.cost.sort_key <= cost_of(order, topology, scores, strategy, 1000.0, ps).sort_key
    assert rank_map.cost.sort_key == cost_of(rank_map.nodes, topology, scores, strategy, 1000.0, ps).sort_key


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
    for rank0, valid in (("any", orders), ("first", [order for order in orders if order[0] == tasks[0]])):
        rank_map = best_rank_map(slots, topology, scores, Traffic("ps", 1000.0, ps), rank0)
        best = min(cost_of(order, topology, scores, "ps", 1000.0, ps).seconds for order in valid)
        assert rank_map.cost.seconds <= 1.15 * best + 1e-9


@bounded
@given(st.data())
def test_rank_0_is_on_the_first_node(data: st.DataObject) -> None:
    """For all traffic patterns; the cost is at least the cost without this constraint."""
    topology = data.draw(topologies())
    scores = data.draw(link_scores(topology))
    slots = [(name, data.draw(st.integers(1, 3))) for name in data.draw(st.permutations(sorted(topology.nodes)))]
    slots = slots[:data.draw(st.integers(1, len(slots)))]
    tasks = sum(count for _, count in slots)
    strategy, pattern = data.draw(st.sampled_from(
        [(s, p) for s, patterns in COMM_PATTERNS.items() for p in patterns]))
    assume(strategy != "ps" or tasks > 1)
    ps = data.draw(st.integers(1, tasks - 1)) if strategy == "ps" else 0
    flow = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 50.0]), min_size=tasks**2, max_size=tasks**2)))
    matrices = (flow.reshape(tasks, tasks),) if data.draw(st.booleans()) else ()
    traffic = Traffic(strategy, 1000.0, ps, "m.csv" if matrices else pattern, matrices)
    rank_map, unconstrained = (best_rank_map(slots, topology, scores, traffic, rank0) for rank0 in ("first", "any"))
    assert rank_map.nodes[0] == slots[0][0]
    assert Counter(rank_map.nodes) == dict(slots)
    assert rank_map.any_rank0_cost == unconstrained.cost == unconstrained.any_rank0_cost
    assert (rank_map.rank0_slowdown > 0) == (rank_map.cost.sort_key[0] > unconstrained.cost.sort_key[0])
    assert rank_map.cost == rank_map.order_costs[rank_map.order]
    if pattern == "ring" and not matrices:
        assert rank_map.cost.sort_key == unconstrained.cost.sort_key


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
    request = JobRequest(nodes=(node_count, node_count), ntasks_per_node=2)
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
