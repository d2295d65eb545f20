"""A sandbox with cloud nodes: a real controller allocates them to jobs, and again after a power-down."""

from __future__ import annotations

import os

from conftest import skipped_without_cluster

from benchmarks import cloud_nodes
from slurmdl.cluster import reader
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec
from slurmdl.topology.source import tree_topology


def test_cloud_nodes_are_allocated_and_released():
    spec = SandboxSpec(f"cloud-{os.getpid()}", tree_topology((1, 30, 600)),
                       cpus=4, cloud_nodes=True, slurm_conf_lines=cloud_nodes.SLURM_CONF_LINES)
    with skipped_without_cluster():
        sandbox = lifecycle.sandbox_up(spec)
    try:
        first, second = (cloud_nodes.submit_job(sandbox, ["-N", "20", "--exclusive"]) for _ in range(2))
        nodes = cloud_nodes.wait_for_nodes(sandbox, first)
        # topology/tree allocates one leaf to a job that fits in it
        assert len({spec.topology.leaf_of(node) for node in nodes}) == 1
        assert not set(nodes) & set(cloud_nodes.wait_for_nodes(sandbox, second))
        text = namespaces.run_on_host(sandbox.pids[LOGIN], ["scontrol", "-o", "-d", "show", "nodes"])
        snapshot = reader.parse_snapshot(text)
        assert len(snapshot.nodes) == 600
        assert all(snapshot.node_by_name[node].cpus_unallocated == 0 for node in nodes)
        cloud_nodes.power_down_job(sandbox, first, nodes)
        cloud_nodes.wait_for_idle_nodes(sandbox, nodes)
        assert cloud_nodes.job_state(sandbox, first) == ("", "")
    finally:
        lifecycle.sandbox_down(spec.name)
