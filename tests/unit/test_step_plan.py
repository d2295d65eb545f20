"""The plan of a step: zone costs, calculated by hand, its pattern, and the promise of its submission."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SCORES, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.launch.step_plan import MAX_ZONES, broken_promise, build_plan, compute_zone_costs
from slurmdl.launch.submission_record import Promise, SubmissionRecord
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.result import Cost, RankMap
from slurmdl.plan import Plan
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic


def test_slowest_link_of_the_path_decides() -> None:
    zones = [ZoneDecl("a", nodes=("a1", "a2", "a3")), ZoneDecl("b", nodes=("b1",)), ZoneDecl("c", nodes=("c1",)),
             ZoneDecl("m", children=("a", "b")), ZoneDecl("r", children=("m", "c"))]
    topology = build_topology(zones, kind="tree", source="")
    scores = LinkScores(nodes={"a2": LinkScore(1.0), "c1": LinkScore(80.0)}, default_node_bandwidth=100.0,
                        zones={"b": LinkScore(10.0)}, default_zone_bandwidth=(50.0, 20.0))
    # a: its median node; a-b: b's uplink; a-c: the uplink of m, above a; b-c: b's
    assert compute_zone_costs(network_links(topology.nodes, topology, scores)) == {
        "a|a": 1 / 100, "a|b": 1 / 10, "a|c": 1 / 20, "b|b": 1 / 100, "b|c": 1 / 10, "c|c": 1 / 80}
    # a measured inter-leaf path counts if it is slower than its links
    measured = LinkScores(inter_leaf={"a|c": LinkScore(5.0), "a|b": LinkScore(90.0)}, default_node_bandwidth=100.0,
                          default_zone_bandwidth=(50.0, 20.0))
    assert compute_zone_costs(network_links(topology.nodes, topology, measured)) == {
        "a|a": 1 / 100, "a|b": 1 / 50, "a|c": 1 / 5, "b|b": 1 / 100, "b|c": 1 / 20, "c|c": 1 / 100}


def test_no_costs_without_zones_or_with_too_many() -> None:
    assert compute_zone_costs(network_links(["a", "b"], Topology.flat(["a", "b"]), LinkScores())) == {}
    many = two_level(*((f"n{i}",) for i in range(MAX_ZONES + 1)))
    assert compute_zone_costs(network_links(many.nodes, many, LinkScores())) == {}
    costs = compute_zone_costs(network_links(many.nodes[1:], many, LinkScores()))
    assert len(costs) == MAX_ZONES * (MAX_ZONES + 1) / 2


@pytest.mark.parametrize(("traffic", "pattern"), [
    (None, ""), (Traffic("gossip", pattern="one-peer-exponential"), "one-peer-exponential"),
    (Traffic("gossip", pattern="flow.csv", matrices=(np.roll(np.eye(3), 1, axis=1),)), "")])
def test_plan_has_zone_costs_and_the_requested_pattern(traffic: Traffic | None, pattern: str) -> None:
    layout = StepLayout((("n1", 2), ("n2", 1)))
    plan, _ = build_plan(layout, two_level(["n1"], ["n2"]), SCORES, DlOptions(), traffic)
    assert plan.costs == {"z0|z0": 1e-3, "z0|z1": 0.02, "z1|z1": 1e-3}
    assert plan.comm_pattern == pattern


@pytest.mark.parametrize(("promise", "dl", "text"), [
    (Promise(1.0, 4, "a x2 + b x2"), DlOptions(), "Slurm gave the job other nodes than the submission promised: "
                                                  "a x3 + b x1 instead of a x2 + b x2, 3.00 times the promised time"),
    (Promise(1.0, 4, "a x3 + b x1"), DlOptions(),
     "links have become slower since the submission, 3.00 times the promised time"),
    (Promise(2.95, 4, "a x2 + b x2"), DlOptions(), ""),
    (Promise(1.0, 8, "a x2 + b x2"), DlOptions(), ""),
    (Promise(1.0, 4, "a x2 + b x2"), DlOptions(bytes="1G"), ""),
    (None, DlOptions(), ""),
])
def test_nodes_worse_than_promised_are_reported(promise: Promise | None, dl: DlOptions, text: str) -> None:
    nodes = ("a1", "a2", "a3", "b1")
    plan = Plan("allreduce", nodes, ("worker",) * 4, {node: ("r", node[0]) for node in nodes}, {})
    rank_map = RankMap(nodes, plan.roles, Cost(3.0, 0.0, 0.0))
    record = SubmissionRecord(DlOptions(), "", 1, "login", promise=promise)
    assert broken_promise(record, plan, rank_map, dl) == text
