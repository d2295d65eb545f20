"""What is refused before anything is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import SCORES, cluster, node, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.placement.place import place_job
from slurmdl.topology.topology import Topology

NODES = cluster(*(node(f"n{i}") for i in range(1, 5)))
TOPOLOGY = replace(two_level(["n1", "n2"], ["n3", "n4"]), source="/etc/slurm/topology.conf")
OTHER = replace(two_level(["x1", "x2"], ["x3", "x4"]), source="/etc/slurm/topology.conf")


@pytest.mark.parametrize(("request_", "topology", "says"), [
    (JobRequest(nodes=(2, 2)), OTHER, "/etc/slurm/topology.conf has none of the cluster's nodes: the cluster's are "
                                      "n1, n2, n3, ..., the topology's x1, x2, x3, ..."),
    (JobRequest(nodes=(2, 2)), Topology.flat(["n1"]), "the topology has no zones"),
    (JobRequest(nodes=(5, 5)), TOPOLOGY, "5 nodes are asked for, the cluster has 4"),
    (JobRequest(nodes=(2, 2), ntasks=999_999_999), TOPOLOGY, "999999999 tasks are asked for, the cluster has 16"),
    (JobRequest(nodes=(2, 2), ntasks=999_999_999, dl=DlOptions("ps", 1)), TOPOLOGY, "999999999 tasks"),
])
def test_refused_at_once(request_: JobRequest, topology: Topology, says: str) -> None:
    with pytest.raises(PlacementError, match=f"^{says}"):
        place_job(request_, NODES, topology, SCORES)


def test_a_topology_that_knows_some_of_the_nodes_serves_for_those() -> None:
    found = place_job(JobRequest(nodes=(2, 2)), NODES, two_level(["x1", "x2", "n1"], ["n3", "n4"]), SCORES)
    assert found.nodes == ("n3", "n4")
    with pytest.raises(PlacementError, match="no zone has 4 fitting nodes"):
        place_job(JobRequest(nodes=(4, 4)), NODES, two_level(["x1", "x2", "n1"], ["n3", "n4"]), SCORES)
