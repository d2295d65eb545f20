"""Requests that are rejected before any choice is computed."""

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


@pytest.mark.parametrize(("request_", "topology", "message"), [
    (JobRequest(nodes=(2, 2)), OTHER, "/etc/slurm/topology.conf .*n1, n2, n3, ..., .*x1, x2, x3, ..."),
    (JobRequest(nodes=(2, 2)), Topology.flat(["n1"]), "the topology has no zones"),
    (JobRequest(nodes=(5, 5)), TOPOLOGY, "5 nodes requested; the cluster has 4"),
    (JobRequest(nodes=(2, 2), ntasks=999_999_999), TOPOLOGY, "999,999,999 tasks requested; the cluster has 16"),
    (JobRequest(nodes=(2, 2), ntasks=999_999_999, dl=DlOptions("ps", 1)), TOPOLOGY, "999,999,999 tasks"),
])
def test_infeasible_request_is_rejected(request_: JobRequest, topology: Topology, message: str) -> None:
    with pytest.raises(PlacementError, match=f"^{message}"):
        place_job(request_, NODES, topology, SCORES)


def test_topology_of_some_nodes_places_jobs_on_these_nodes() -> None:
    placement = place_job(JobRequest(nodes=(2, 2)), NODES, two_level(["x1", "x2", "n1"], ["n3", "n4"]), SCORES)
    assert placement.nodes == ("n3", "n4")
    with pytest.raises(PlacementError, match="no zone has 4 fitting nodes"):
        place_job(JobRequest(nodes=(4, 4)), NODES, two_level(["x1", "x2", "n1"], ["n3", "n4"]), SCORES)
