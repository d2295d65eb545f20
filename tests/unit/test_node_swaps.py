"""Single-node swaps, for traffic patterns whose time depends on more than node counts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from placing import SCORES, cluster, node, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.traffic import Traffic
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology


def unequal(seed: int) -> tuple[Topology, LinkScores]:
    """Two to four leaves of up to four nodes with unequal bandwidths and latencies."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 4) for _ in range(draw.randint(2, 4))]
    topology = two_level(*([f"n{z}{i}" for i in range(size)] for z, size in enumerate(sizes)))

    def score() -> LinkScore:
        return LinkScore(draw.uniform(2e9, 12.5e9), rtt=draw.choice([0.0, 1e-4, 1e-3]))

    return topology, LinkScores(nodes={name: score() for name in topology.nodes if draw.random() < 0.5},
                                zones={zone: score() for zone in topology.zones if draw.random() < 0.6},
                                default_node_bandwidth=12.5e9, default_latency=1e-4)


@pytest.mark.parametrize(("dl", "cases"), [
    (DlOptions(comm_pattern="hierarchical"), 12),
    pytest.param(DlOptions(mesh="dp=2,tp=2"), 12, marks=pytest.mark.nightly),
    pytest.param(DlOptions("gossip", comm_pattern="base-2"), 6, marks=pytest.mark.nightly),
    pytest.param(DlOptions("gossip", comm_pattern="one-peer-exponential"), 12, marks=pytest.mark.nightly)],
    ids=["hierarchical", "mesh", "base-2", "one-peer"])
def test_small_jobs_are_close_to_the_best_choice(dl: DlOptions, cases: int) -> None:
    ratios = []
    for seed in range(cases):
        topology, scores = unequal(seed)
        request = JobRequest(dl, (4, 4), ntasks_per_node=1)
        placement = place_job(request, cluster(*map(node, topology.nodes)), topology, scores)
        assert placement.rank_map is not None
        assert len(set(placement.nodes)) == 4
        traffic = Traffic.from_options(request.dl)
        best = min(best_rank_map([(name, 1) for name in names], topology, scores, traffic).cost.seconds
                   for names in itertools.combinations(topology.nodes, 4))
        ratios.append(placement.rank_map.cost.seconds / best)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= cases * 5 // 6
    assert max(ratios) <= 1.3


def test_swaps_stay_in_one_tree() -> None:
    """Two trees that no switch joins: the better node of the other tree is out of reach."""
    topology = build_topology([ZoneDecl("a", nodes=("a1", "a2", "a3")), ZoneDecl("b", nodes=("b1",))], kind="tree",
                              source="")
    scores = LinkScores(nodes={name: LinkScore(1e6) for name in ("a1", "a2", "a3")})
    request = JobRequest(DlOptions(strategy="gossip", comm_pattern="one-peer-exponential"), (3, 3), ntasks_per_node=1)
    placement = place_job(request, cluster(*map(node, topology.nodes)), topology, scores)
    assert placement.nodes == ("a1", "a2", "a3")


@pytest.mark.parametrize("dl", [DlOptions(mesh="dp=4"), DlOptions(groups="a=3,b=1"),
                                DlOptions("gossip", comm_pattern="base-2")], ids=["mesh", "groups", "graph"])
def test_slow_path_is_avoided_before_the_nodes_are_swapped(dl: DlOptions) -> None:
    topology = two_level(["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2", "c3"])
    scores = replace(SCORES, inter_leaf={"z0|z1": LinkScore(5.0)})
    placement = place_job(JobRequest(dl, (4, 4)), cluster(*map(node, topology.nodes)), topology, scores)
    assert len(placement.nodes) == 4 and set(placement.nodes_per_zone) != {"z0", "z1"}
