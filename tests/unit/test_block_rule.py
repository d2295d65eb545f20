"""The base blocks of a job without segments, as Slurm's topology/block chooses them."""

from __future__ import annotations

import numpy as np
import pytest

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.candidate_nodes import BlockRule, block_rule
from slurmdl.placement.place import place_job
from slurmdl.topology.source import block_topology
from tests.placing import cluster, node


@pytest.mark.parametrize(("nodes", "rule"), [
    (1, (1, 1, 1)), (4, (1, 1, 1)), (5, (2, 1, 2)), (8, (2, 1, 2)), (9, (8, 2, 2)), (17, (8, 2, 3)), (32, (8, 2, 4)),
    (33, (16, 8, 2))])
def test_rule(nodes: int, rule: tuple[int, int, int]) -> None:
    """16 blocks of 4 nodes, aggregates of 8 and 32 nodes."""
    assert block_rule(block_topology((16, 64), (4, 8, 32)), nodes) == BlockRule(*rule)


def test_default_aggregates_are_powers_of_two() -> None:
    topology = block_topology((40, 720))
    assert [block_rule(topology, nodes).parent_blocks for nodes in (18, 19, 72, 73, 288, 289)] == [1, 2, 4, 8, 16, 40]


def test_incomplete_aggregate_of_all_blocks() -> None:
    """Three blocks of 4, aggregates of 8: Slurm starts no job of 9 nodes."""
    rule = block_rule(block_topology((3, 12), (4, 8)), 9)
    assert not rule.allows(np.array([0, 1, 2]))
    topology = block_topology((3, 12), (4, 8))
    with pytest.raises(PlacementError, match="topology/block without --segment: no choice of 9 nodes"):
        place_job(JobRequest(nodes=(9, 9)), cluster(*map(node, topology.nodes)), topology, LinkScores())


def test_nodes_of_one_block_although_others_are_free() -> None:
    topology = block_topology((4, 16), (4, 8))
    idle = [name for name in topology.nodes if name not in ("n01", "n05", "n06", "n09")]
    snapshot = cluster(*(node(name, "IDLE" if name in idle else "ALLOCATED",
                              cpus_unallocated=4 if name in idle else 0) for name in topology.nodes))

    def placed(request: JobRequest) -> tuple[bool, dict[str, int]]:
        placement = place_job(request, snapshot, topology, LinkScores())
        return placement.free_now, dict(placement.nodes_per_zone)

    assert placed(JobRequest(nodes=(4, 4))) == (True, {"block4": 4})
    assert [*placed(JobRequest(nodes=(6, 6)))[1]] == ["block3", "block4"]
    assert placed(JobRequest(nodes=(8, 8)))[0] is False
    assert placed(JobRequest(nodes=(8, 8), segment=2))[0] is True
    assert placed(JobRequest(DlOptions(node_binding="zone"), nodes=(8, 8)))[0] is True
