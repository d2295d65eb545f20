"""What loss, delay and throughput of a link come to, worked out by hand, and what placement makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placing import cluster, node, two_level

from slurmdl import units
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.launch.step_command import StepCommand
from slurmdl.launch.step_plan import StepPlan, explanation_lines
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights
from slurmdl.placement.explain import explain_placement
from slurmdl.placement.place import place_job
from slurmdl.plan import Plan

TCP, RDMA = np.array([False]), np.array([True])
FOUR = two_level(("n1", "n2", "n3", "n4"), ("n5", "n6", "n7", "n8"))
IDLE = cluster(*map(node, FOUR.nodes))


def test_tcp_by_the_formula() -> None:
    # Padhye et al., equation 32: b = 2, MSS 1448, RTT 0.1 s, T0 = 0.204 s, p = 0.01
    by_acks = 0.1 * (2 * 2 * 0.01 / 3) ** 0.5
    by_timeouts = 0.204 * 3 * (3 * 2 * 0.01 / 8) ** 0.5 * 0.01 * (1 + 32 * 0.0001)
    assert capacity.padhye_throughput(np.array([0.01]), np.array(
        [0.1])) == pytest.approx([1448 / (by_acks + by_timeouts)])


def test_without_loss_tcp_bounds_nothing() -> None:
    assert np.isinf(capacity.padhye_throughput(np.zeros(1), np.array([1e-4])))
    assert capacity.usable_throughput(np.array([7e8]), np.zeros(1), np.array([1e-4]), TCP) == [7e8]


def test_losses_of_rdma_show_in_its_throughput_alone() -> None:
    loss, round_trip = np.array([0.3]), np.array([1e-5])
    assert capacity.usable_throughput(np.array([1e9]), loss, round_trip, RDMA) == [1e9]
    assert capacity.usable_throughput(np.array([1e9]), loss, round_trip, TCP) < 1e6
    assert capacity.expected_rto_stall(loss, round_trip, RDMA) == [0.0]


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.2, 0.5, 1.0])
def test_the_worse_the_loss_the_worse_the_figures(loss: float) -> None:
    round_trip = np.array([1e-3])
    worse, better = (np.array([loss * share]) for share in (1.0, 0.7))
    assert 0 < capacity.padhye_throughput(worse, round_trip) < capacity.padhye_throughput(better, round_trip)
    assert np.isfinite(capacity.expected_rto_stall(worse, round_trip, TCP))
    assert capacity.expected_rto_stall(worse, round_trip, TCP) >= capacity.expected_rto_stall(better, round_trip, TCP) > 0


def test_a_lost_tail_waits_for_the_timeout() -> None:
    # 200 ms, then 400 ms, 800 ms: 0.02 * 0.2 + 0.02^2 * 0.4 + ...
    expected = sum(0.02 ** (k + 1) * 0.2 * 2**k for k in range(40))
    assert capacity.expected_rto_stall(np.array([0.02]), np.array([1e-4]), TCP) == pytest.approx([expected])


def test_noise_below_the_margin_is_no_difference() -> None:
    usual = np.full(4, 100.0)
    assert (capacity.quantize(np.array([81.0, 124.0, 100.0, 99.0]), usual, 0.25) == usual).all()
    assert (capacity.quantize(np.array([10.0]), usual[:1], 0.25) < 15).all()
    exact = np.array([81.0])
    assert capacity.quantize(exact, usual[:1], 0.0) is exact


def test_a_link_that_was_never_measured_has_its_default() -> None:
    scores = LinkScores(nodes={"a": LinkScore(1e8, 1e-3)}, default_node_bandwidth=1e9, default_latency=2e-5)
    carried, delay = capacity.node_links(["b", "a"], scores)
    assert carried.tolist() == [1e9, 1e8]
    assert delay.tolist() == [2e-5, 5e-4]


def test_what_was_measured_of_a_link_in_part_has_defaults_for_the_rest() -> None:
    lossy, slow = LinkScore(loss=0.05), LinkScore(rtt=0.01)
    carried, delay = capacity.node_links(["l", "s"], LinkScores(nodes={"l": lossy, "s": slow}))
    assert carried[0] < 1.25e9 and carried[1] == 1.25e9
    assert delay[0] > 0.05 * 0.2 and delay[1] == 0.005


def test_old_scores_count_half_after_each_half_life() -> None:
    scores = LinkScores(nodes={"a": LinkScore(1e7, age=0), "b": LinkScore(1e7, age=60), "c": LinkScore(1e7, age=1e6)},
                        default_node_bandwidth=1e9, half_life=60.0)
    carried, _ = capacity.node_links(["a", "b", "c"], scores)
    assert carried == pytest.approx([1e7, 1e8, 1e9])


@pytest.mark.parametrize(("weights", "worst"), [
    (MetricWeights(1, 0, 0), "slow"), (MetricWeights(0, 1, 0), "late"), (MetricWeights(0, 0, 1), "lossy")])
def test_each_weight_alone_finds_its_own_worst(weights: MetricWeights, worst: str) -> None:
    links = {"slow": LinkScore(1e8, 4e-5), "late": LinkScore(1e9, 4e-3), "lossy": LinkScore(1e9, 4e-5, 0.3)}
    scores = LinkScores(nodes=links, default_node_bandwidth=1e9, weights=weights)
    carried, _ = capacity.node_links(list(links), scores)
    assert list(links)[int(carried.argmin())] == worst
    assert (carried > 0).all() and (carried <= 1e9).all()


BAD = {"slow": LinkScore(1.25e8, 4e-5), "lossy": LinkScore(1.25e9, 4e-5, 0.02), "late": LinkScore(1.25e9, 0.02),
       "all": LinkScore(1.25e8, 0.02, 0.05)}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("dl", [DlOptions(), DlOptions(strategy="ps", ps=1), DlOptions(strategy="gossip")],
                         ids=["allreduce", "ps", "gossip"])
@pytest.mark.parametrize(("place_", "margin"), [("pack", 0.0), ("pack", 0.25), ("spread", 0.25)])
def test_a_degraded_node_loses_and_is_used_last(bad: LinkScore, dl: DlOptions, place_: str, margin: float) -> None:
    dl = replace(dl, place=place_)
    scores = LinkScores(nodes={"n2": bad, "n7": LinkScore(1.2e9, 4.1e-5)}, tolerance=margin)
    for wanted in (2, 4, 7):
        nodes = place_job(JobRequest(nodes=(wanted, wanted), dl=dl), IDLE, FOUR, scores).nodes
        assert "n2" not in nodes, f"{wanted} of 8"
    assert "n2" in place_job(JobRequest(nodes=(8, 8), dl=dl), IDLE, FOUR, scores).nodes


@pytest.mark.parametrize("place_", ["pack", "balance", "spread"])
def test_a_degraded_node_that_slurm_prefers_loses_too(place_: str) -> None:
    preferred = cluster(*(node(name, weight=1 if name == "n2" else 10) for name in FOUR.nodes))
    request = JobRequest(nodes=(4, 4), dl=DlOptions(place=place_))
    assert "n2" in place_job(request, preferred, FOUR, LinkScores()).nodes
    assert "n2" not in place_job(request, preferred, FOUR, LinkScores(nodes={"n2": BAD["slow"]})).nodes


def test_servers_stand_on_good_links() -> None:
    scores = LinkScores(nodes={"n1": BAD["slow"], "n2": BAD["lossy"]})
    request = JobRequest(nodes=(4, 4), dl=DlOptions(strategy="ps", ps=1, zone=("z0",), rank0="any"))
    ranks = place_job(request, IDLE, FOUR, scores).rank_map
    assert ranks is not None
    assert {name for name, role in zip(ranks.nodes, ranks.roles, strict=True) if role == "ps"} <= {"n3", "n4"}


def test_what_rank_0_on_the_first_node_costs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    scores = LinkScores(nodes={"n3": LinkScore(5e9), "n4": LinkScore(4e9)}, default_node_bandwidth=1e9)
    request = JobRequest(nodes=(4, 4), ntasks_per_node=2, dl=DlOptions(strategy="ps", ps=2, zone=("z0",)))
    found = place_job(request, IDLE, FOUR, scores)
    assert found.rank_map is not None and found.rank_map.any_rank0_cost is not None and found.rank_map.nodes[
        0] == "n1"
    free = place_job(replace(request, dl=replace(request.dl, rank0="any")), IDLE, FOUR, scores)
    assert free.rank_map is not None and found.rank_map.any_rank0_cost == free.rank_map.cost
    seconds, less = found.rank_map.cost.seconds, free.rank_map.cost.seconds
    line = (f"  rank 0 stays on n1, the first node, which takes {seconds / less - 1:.1%} more time; "
            f"--dl-rank0=any: {units.format_duration(less)}, ")
    assert seconds > less and line in explain_placement(found, FOUR, IDLE, scores, request.dl)
    assert "rank 0 stays" not in explain_placement(free, FOUR, IDLE, scores, request.dl)
    plan = Plan("ps", found.rank_map.nodes, found.rank_map.roles, {})
    lines = explanation_lines(StepPlan(StepCommand(()), plan, found.rank_map, "a file"))
    said = "rank 0 stays on n1, the first node: with --dl-rank0=any an iteration takes"
    assert f"{said} {units.format_duration(less)}" in lines


def test_a_zone_behind_a_slow_uplink_is_left_out() -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"), ("c1", "c2"))
    request = JobRequest(nodes=(4, 4))
    for slow, used in (("z0", {"z1", "z2"}), ("z1", {"z0", "z2"}), ("z2", {"z0", "z1"})):
        scores = LinkScores(zones={slow: LinkScore(1e8, 1e-4)})
        found = place_job(request, cluster(*map(node, topology.nodes)), topology, scores)
        assert set(found.nodes_per_zone) == used


@pytest.mark.parametrize("slow", ["z0|z1", "z0|z2", "z1|z2"])
@pytest.mark.parametrize("dl", [DlOptions(), DlOptions(strategy="ps", ps=1), DlOptions(strategy="gossip")],
                         ids=["allreduce", "ps", "gossip"])
def test_a_slow_way_between_two_zones_is_avoided(slow: str, dl: DlOptions) -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"), ("c1", "c2"))
    request, idle = JobRequest(nodes=(4, 4), dl=dl), cluster(*map(node, topology.nodes))
    clean = place_job(request, idle, topology, LinkScores()).rank_map
    for bad in (LinkScore(1e8, 2e-4), LinkScore(1.25e9, 8e-5, 0.02), LinkScore(1.2e9, 0.01)):
        scores = LinkScores(inter_leaf={slow: bad, "z1|z3": LinkScore(1.0)})
        found = place_job(request, idle, topology, scores)
        assert set(found.nodes_per_zone) != set(slow.split("|"))
        assert found.rank_map is not None and clean is not None
        assert found.rank_map.cost.seconds == pytest.approx(clean.cost.seconds)


def test_a_ring_goes_round_a_slow_way() -> None:
    topology = two_level(("a1",), ("b1",), ("c1",), ("d1",))
    scores = LinkScores(inter_leaf={"z0|z1": LinkScore(1e8, 2e-4)})
    ranks = place_job(JobRequest(nodes=(4, 4)), cluster(*map(node, topology.nodes)), topology, scores).rank_map
    assert ranks is not None and ranks.order == "detour"
    order = [topology.leaf_of(name) for name in ranks.nodes]
    assert {"z0", "z1"} not in [{one, other} for one, other in zip(order, order[1:] + order[:1], strict=True)]
    assert ranks.cost.seconds < ranks.order_costs["depth-first"].seconds / 5
    assert ranks.order_costs["depth-first"].bottleneck_link == "z0|z1"


def test_a_way_that_its_nodes_or_uplinks_bound_is_not_slow() -> None:
    topology = two_level(("a1", "a2"), ("b1", "b2"))
    request, idle = JobRequest(nodes=(4, 4)), cluster(*map(node, topology.nodes))
    for speed, uplinks in ((1.1e9, {}), (1.9e8, {"z0": LinkScore(2e8)})):
        without = LinkScores(zones=uplinks)
        found = place_job(request, idle, topology, replace(without, inter_leaf={"z0|z1": LinkScore(speed, 8e-5)}))
        assert found.rank_map == place_job(request, idle, topology, without).rank_map


def test_scores_of_no_node_change_nothing() -> None:
    for dl in (DlOptions(), DlOptions(strategy="ps", ps=2)):
        request = JobRequest(nodes=(5, 5), dl=dl)
        without = place_job(request, IDLE, FOUR, LinkScores())
        assert place_job(
    request,
    IDLE,
    FOUR,
    LinkScores(
        tolerance=0.25,
         half_life=300.0)).to_json() == without.to_json()
        stranger = LinkScores(nodes={"unknown": LinkScore(1.0)})
        assert place_job(request, IDLE, FOUR, stranger).to_json() == without.to_json()


def test_noise_does_not_scatter_a_job() -> None:
    topology = two_level(*([f"n{zone}-{i}" for i in range(8)] for zone in range(8)))
    draw = np.random.default_rng(0)
    noisy = LinkScores(nodes={name: LinkScore(1.25e9 * draw.uniform(0.85, 1.15), 4e-5 * draw.uniform(0.85, 1.15))
                              for name in topology.nodes}, tolerance=0.25)
    idle = cluster(*map(node, topology.nodes))
    request = JobRequest(nodes=(16, 16))
    assert len(place_job(request, idle, topology, noisy).nodes_per_zone) == 2
    assert len(place_job(request, idle, topology, replace(noisy, tolerance=0.0)).nodes_per_zone) > 2
