"""Capacity and latency of scored links, calculated by hand, and their effect on placements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placing import cluster, node, two_level

from slurmdl import units
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.launch.step_plan import explain_step
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights
from slurmdl.placement.explain import explain_placement
from slurmdl.placement.place import place_job
from slurmdl.plan import Plan

TCP, RDMA = np.array([False]), np.array([True])
FOUR = two_level(("n1", "n2", "n3", "n4"), ("n5", "n6", "n7", "n8"))
IDLE = cluster(*map(node, FOUR.nodes))


def test_padhye_throughput_follows_equation_32() -> None:
    # Padhye et al., equation 32: b = 2, MSS 1448, RTT 0.1 s, T0 = 0.204 s, p = 0.01
    by_acks = 0.1 * (2 * 2 * 0.01 / 3) ** 0.5
    by_timeouts = 0.204 * 3 * (3 * 2 * 0.01 / 8) ** 0.5 * 0.01 * (1 + 32 * 0.0001)
    throughput = capacity.padhye_throughput(np.array([0.01]), np.array([0.1]))
    assert throughput == pytest.approx([1448 / (by_acks + by_timeouts)])


def test_throughput_without_loss_is_unlimited_by_tcp() -> None:
    assert np.isinf(capacity.padhye_throughput(np.zeros(1), np.array([1e-4])))
    assert capacity.usable_throughput(np.array([7e8]), np.zeros(1), np.array([1e-4]), TCP) == [7e8]


def test_rdma_loss_has_no_tcp_penalty() -> None:
    loss, rtt = np.array([0.3]), np.array([1e-5])
    assert capacity.usable_throughput(np.array([1e9]), loss, rtt, RDMA) == [1e9]
    assert capacity.usable_throughput(np.array([1e9]), loss, rtt, TCP) < 1e6
    assert capacity.expected_rto_stall(loss, rtt, RDMA) == [0.0]


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.2, 0.5, 1.0])
def test_throughput_and_stall_get_worse_with_loss(loss: float) -> None:
    rtt = np.array([1e-3])
    high, low = (np.array([loss * factor]) for factor in (1.0, 0.7))
    assert 0 < capacity.padhye_throughput(high, rtt) < capacity.padhye_throughput(low, rtt)
    assert np.isfinite(capacity.expected_rto_stall(high, rtt, TCP))
    assert capacity.expected_rto_stall(high, rtt, TCP) >= capacity.expected_rto_stall(low, rtt, TCP) > 0


def test_expected_stall_sums_doubled_timeouts() -> None:
    # 200 ms, then 400 ms, 800 ms: 0.02 * 0.2 + 0.02^2 * 0.4 + ...
    expected = sum(0.02 ** (k + 1) * 0.2 * 2**k for k in range(40))
    assert capacity.expected_rto_stall(np.array([0.02]), np.array([1e-4]), TCP) == pytest.approx([expected])


def test_quantize_rounds_within_the_tolerance_to_the_baseline() -> None:
    baseline = np.full(4, 100.0)
    assert (capacity.quantize(np.array([81.0, 124.0, 100.0, 99.0]), baseline, 0.25) == baseline).all()
    assert (capacity.quantize(np.array([10.0]), baseline[:1], 0.25) < 15).all()
    exact = np.array([81.0])
    for tolerance in (0.0, 1e-308):  # a step of the second one is not representable
        assert capacity.quantize(exact, baseline[:1], tolerance) is exact


def test_unmeasured_link_has_its_default() -> None:
    scores = LinkScores(nodes={"a": LinkScore(1e8, 1e-3)}, default_node_bandwidth=1e9, default_latency=2e-5)
    bandwidth, latency = capacity.node_links(["b", "a"], scores)
    assert bandwidth.tolist() == [1e9, 1e8]
    assert latency.tolist() == [2e-5, 5e-4]


def test_missing_metrics_of_a_link_are_defaults() -> None:
    lossy, slow = LinkScore(loss=0.05), LinkScore(rtt=0.01)
    bandwidth, latency = capacity.node_links(["l", "s"], LinkScores(nodes={"l": lossy, "s": slow}))
    assert bandwidth[0] < 1.25e9 and bandwidth[1] == 1.25e9
    assert latency[0] > 0.05 * 0.2 and latency[1] == 0.005


def test_scores_decay_by_half_after_each_half_life() -> None:
    scores = LinkScores(nodes={"a": LinkScore(1e7, age=0), "b": LinkScore(1e7, age=60), "c": LinkScore(1e7, age=1e6)},
                        default_node_bandwidth=1e9, half_life=60.0)
    bandwidth, _ = capacity.node_links(["a", "b", "c"], scores)
    assert bandwidth == pytest.approx([1e7, 1e8, 1e9])


@pytest.mark.parametrize(("weights", "worst"), [
    (MetricWeights(1, 0, 0), "slow"), (MetricWeights(0, 1, 0), "distant"), (MetricWeights(0, 0, 1), "lossy")])
def test_each_weight_alone_ranks_by_its_metric(weights: MetricWeights, worst: str) -> None:
    links = {"slow": LinkScore(1e8, 4e-5), "distant": LinkScore(1e9, 4e-3), "lossy": LinkScore(1e9, 4e-5, 0.3)}
    scores = LinkScores(nodes=links, default_node_bandwidth=1e9, weights=weights)
    bandwidth, _ = capacity.node_links(list(links), scores)
    assert list(links)[int(bandwidth.argmin())] == worst
    assert (bandwidth > 0).all() and (bandwidth <= 1e9).all()


BAD = {"slow": LinkScore(1.25e8, 4e-5), "lossy": LinkScore(1.25e9, 4e-5, 0.02), "distant": LinkScore(1.25e9, 0.02),
       "all": LinkScore(1.25e8, 0.02, 0.05)}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("dl", [DlOptions(), DlOptions(strategy="ps", ps=1), DlOptions(strategy="gossip")],
                         ids=["allreduce", "ps", "gossip"])
@pytest.mark.parametrize("tolerance", [0.0, 0.25])
def test_degraded_node_is_chosen_last(bad: LinkScore, dl: DlOptions, tolerance: float) -> None:
    scores = LinkScores(nodes={"n2": bad, "n7": LinkScore(1.2e9, 4.1e-5)}, tolerance=tolerance)
    for count in (2, 4, 7):
        nodes = place_job(JobRequest(nodes=(count, count), dl=dl), IDLE, FOUR, scores).nodes
        assert "n2" not in nodes, f"{count} of 8"
    assert "n2" in place_job(JobRequest(nodes=(8, 8), dl=dl), IDLE, FOUR, scores).nodes


def test_degraded_node_is_avoided_even_with_a_better_weight() -> None:
    preferred = cluster(*(node(name, weight=1 if name == "n2" else 10) for name in FOUR.nodes))
    request = JobRequest(nodes=(4, 4))
    assert "n2" in place_job(request, preferred, FOUR, LinkScores()).nodes
    assert "n2" not in place_job(request, preferred, FOUR, LinkScores(nodes={"n2": BAD["slow"]})).nodes


def test_parameter_servers_are_placed_on_good_links() -> None:
    scores = LinkScores(nodes={"n1": BAD["slow"], "n2": BAD["lossy"]})
    request = JobRequest(nodes=(4, 4), dl=DlOptions(strategy="ps", ps=1, zone=("z0",), rank0="any"))
    ranks = place_job(request, IDLE, FOUR, scores).rank_map
    assert ranks is not None
    assert {name for name, role in zip(ranks.nodes, ranks.roles, strict=True) if role == "ps"} <= {"n3", "n4"}


def test_cost_of_rank_0_on_the_first_node_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    scores = LinkScores(nodes={"n3": LinkScore(5e9), "n4": LinkScore(4e9)}, default_node_bandwidth=1e9)
    request = JobRequest(nodes=(4, 4), ntasks_per_node=2, dl=DlOptions(strategy="ps", ps=2, zone=("z0",)))
    placement = place_job(request, IDLE, FOUR, scores)
    assert placement.rank_map is not None and placement.rank_map.any_rank0_cost is not None
    assert placement.rank_map.nodes[0] == "n1"
    free = place_job(replace(request, dl=replace(request.dl, rank0="any")), IDLE, FOUR, scores)
    assert free.rank_map is not None and placement.rank_map.any_rank0_cost == free.rank_map.cost
    seconds, free_seconds = placement.rank_map.cost.seconds, free.rank_map.cost.seconds
    line = (f"  rank 0 stays on n1, the first node, which takes {seconds / free_seconds - 1:.1%} more time; "
            f"--dl-rank0=any: {units.format_duration(free_seconds)}, ")
    assert seconds > free_seconds and line in explain_placement(placement, FOUR, IDLE, scores, request.dl)
    assert "rank 0 stays" not in explain_placement(free, FOUR, IDLE, scores, request.dl)
    plan = Plan("ps", placement.rank_map.nodes, placement.rank_map.roles, {})
    lines = explain_step(plan, placement.rank_map, request.dl, FOUR, scores, plan.nodes)
    prefix = "rank 0 stays on n1, the first node: with --dl-rank0=any an iteration takes"
    assert f"{prefix} {units.format_duration(free_seconds)}" in lines


def test_zone_with_slow_uplink_is_avoided() -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"), ("c1", "c2"))
    request = JobRequest(nodes=(4, 4))
    for slow, expected_zones in (("z0", {"z1", "z2"}), ("z1", {"z0", "z2"}), ("z2", {"z0", "z1"})):
        scores = LinkScores(zones={slow: LinkScore(1e8, 1e-4)})
        placement = place_job(request, cluster(*map(node, topology.nodes)), topology, scores)
        assert set(placement.nodes_per_zone) == expected_zones


@pytest.mark.parametrize("slow", ["z0|z1", "z0|z2", "z1|z2"])
@pytest.mark.parametrize("dl", [DlOptions(), DlOptions(strategy="ps", ps=1), DlOptions(strategy="gossip")],
                         ids=["allreduce", "ps", "gossip"])
def test_slow_inter_leaf_path_is_avoided(slow: str, dl: DlOptions) -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"), ("c1", "c2"))
    request, idle = JobRequest(nodes=(4, 4), dl=dl), cluster(*map(node, topology.nodes))
    clean = place_job(request, idle, topology, LinkScores()).rank_map
    for bad in (LinkScore(1e8, 2e-4), LinkScore(1.25e9, 8e-5, 0.02), LinkScore(1.2e9, 0.01)):
        scores = LinkScores(inter_leaf={slow: bad, "z1|z3": LinkScore(1.0)})
        placement = place_job(request, idle, topology, scores)
        assert set(placement.nodes_per_zone) != set(slow.split("|"))
        assert placement.rank_map is not None and clean is not None
        assert placement.rank_map.cost.seconds == pytest.approx(clean.cost.seconds)


def test_ring_detours_around_a_slow_inter_leaf_path() -> None:
    topology = two_level(("a1",), ("b1",), ("c1",), ("d1",))
    scores = LinkScores(inter_leaf={"z0|z1": LinkScore(1e8, 2e-4)})
    ranks = place_job(JobRequest(nodes=(4, 4)), cluster(*map(node, topology.nodes)), topology, scores).rank_map
    assert ranks is not None and ranks.order == "detour"
    order = [topology.leaf_of(name) for name in ranks.nodes]
    assert {"z0", "z1"} not in [{left, right} for left, right in zip(order, order[1:] + order[:1], strict=True)]
    assert ranks.cost.seconds < ranks.order_costs["depth-first"].seconds / 5
    assert ranks.order_costs["depth-first"].bottleneck_link == "z0|z1"


def test_path_limited_by_nodes_or_uplinks_is_not_slow() -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"))
    request, idle = JobRequest(nodes=(4, 4)), cluster(*map(node, topology.nodes))
    for speed, uplinks in ((1.1e9, {}), (1.9e8, {"z0": LinkScore(2e8)})):
        without = LinkScores(zones=uplinks)
        placement = place_job(request, idle, topology, replace(without, inter_leaf={"z0|z1": LinkScore(speed, 8e-5)}))
        assert placement.rank_map == place_job(request, idle, topology, without).rank_map


def test_scores_of_unknown_nodes_change_nothing() -> None:
    for dl in (DlOptions(), DlOptions(strategy="ps", ps=2)):
        request = JobRequest(nodes=(5, 5), dl=dl)
        without = place_job(request, IDLE, FOUR, LinkScores())
        rules = LinkScores(tolerance=0.25, half_life=300.0)
        assert place_job(request, IDLE, FOUR, rules).to_json() == without.to_json()
        unknown = LinkScores(nodes={"unknown": LinkScore(1.0)})
        assert place_job(request, IDLE, FOUR, unknown).to_json() == without.to_json()


def test_noise_below_the_tolerance_does_not_scatter_a_job() -> None:
    topology = two_level(*([f"n{zone}-{i}" for i in range(8)] for zone in range(8)))
    rng = np.random.default_rng(0)
    noisy = LinkScores(nodes={name: LinkScore(1.25e9 * rng.uniform(0.85, 1.15), 4e-5 * rng.uniform(0.85, 1.15))
                              for name in topology.nodes}, tolerance=0.25)
    idle = cluster(*map(node, topology.nodes))
    request = JobRequest(nodes=(16, 16))
    assert len(place_job(request, idle, topology, noisy).nodes_per_zone) == 2
    assert len(place_job(request, idle, topology, replace(noisy, tolerance=0.0)).nodes_per_zone) > 2
