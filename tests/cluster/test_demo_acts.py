"""The demo's acts without a trainer on a real Slurm; `make demo` runs all."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from conftest import skipped_without_cluster

from benchmarks.demo import jobs
from benchmarks.demo.cluster import DemoCluster
from benchmarks.demo.jobs import LEAF, PLACED, PLAIN
from benchmarks.demo.story import FRAGMENTED, NODES, ZONES, Story
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

pytestmark = pytest.mark.nightly


@pytest.fixture
def cluster() -> Iterator[DemoCluster]:
    name = f"demo-{os.getpid()}"
    with skipped_without_cluster():
        sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(NODES, ZONES)))
    log = io.StringIO()
    yield DemoCluster(sandbox, log)
    lifecycle.sandbox_down(name)
    print(log.getvalue())  # pytest shows it if the test has failed


def test_mesh_keeps_its_groups_in_zones_and_bad_link_is_left_out(
        cluster: DemoCluster, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(cluster, with_controls=False)
    story.act_mesh()
    for variant in (PLAIN, LEAF, PLACED):
        ranks = story.outcomes[jobs.MESH.key, variant].rank_nodes
        assert len(set(ranks)) == jobs.MESH.ranks and not set(ranks) & set(FRAGMENTED)
        zones = [cluster.zone(node) for node in ranks]
        are_whole = zones[::2] == zones[1::2]  # the two ranks of each tp group
        assert are_whole == (variant == PLACED)
    assert list(ranks) != sorted(ranks), "the placed ranks are not in the order of names"

    story.act_bad_link()
    text = capsys.readouterr().out
    bad = text.split("The link of ")[1].split()[0]
    assert f"probe             {bad}: " in text
    for variant in (PLAIN, LEAF, PLACED):
        nodes = story.outcomes[jobs.BAD_LINK.key, variant].rank_nodes
        assert (bad in nodes) == (variant != PLACED)
    assert len(story.outcomes[jobs.BAD_LINK.key, PLACED].seconds) == 1
