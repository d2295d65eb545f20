"""A sandbox whose nodes are a cloud: the controller is real and chooses, and its nodes can be chosen again."""

from __future__ import annotations

import os

import pytest

from slurmdl.cluster import scontrol
from slurmdl.errors import SandboxError
from slurmdl.sandbox import cloud, hosts
from slurmdl.sandbox import cluster as sandbox
from slurmdl.sandbox.spec import LOGIN, Spec
from slurmdl.topology import example


def test_jobs_get_nodes_and_give_them_back():
    spec = Spec(f"cloud-{os.getpid()}", example.tree((1, 30, 600)), cpus=4, cloud=True, settings=cloud.SETTINGS)
    try:
        box = sandbox.up(spec)
    except SandboxError as error:
        if os.environ.get("SLURMDL_REQUIRE_CLUSTER") == "1":
            raise
        pytest.skip(f"no real Slurm cluster: {error}")
    try:
        one, other = (cloud.submit(box, ["-N", "20", "--exclusive"]) for _ in range(2))
        nodes = cloud.nodes_of(box, one)
        # topology/tree takes one leaf for a job that fits into it
        assert len({spec.topology.leaf_of(node) for node in nodes}) == 1
        assert not set(nodes) & set(cloud.nodes_of(box, other))
        text = hosts.run(box.pids[LOGIN], ["scontrol", "-o", "-d", "show", "nodes"])
        snapshot = scontrol.parse(text)
        assert len(snapshot.nodes) == 600
        assert all(snapshot.node[node].cpus_free == 0 for node in nodes)
        cloud.end(box, one, nodes)
        cloud.wait_idle(box, nodes)
        assert cloud.running(box, one) == ("", "")
    finally:
        sandbox.down(spec.name)
