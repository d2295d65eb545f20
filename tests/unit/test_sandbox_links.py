"""Link options of a sandbox: queueing disciplines and pairs of zones."""

from __future__ import annotations

import pytest

from slurmdl.errors import UsageError
from slurmdl.links.link_scores import inter_leaf_name
from slurmdl.sandbox import veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology


def test_netem_delay_precedes_token_bucket():
    lines = veth_links.netem_lines("eth0", 0.01, "tbf rate 8000bit burst 70000 limit 280000")
    assert lines == ["qdisc replace dev eth0 root handle 1: netem delay 10000us limit 100000",
                     "qdisc replace dev eth0 parent 1:1 tbf rate 8000bit burst 70000 limit 280000"]
    assert len(veth_links.netem_lines("eth0", 0.01, "")) == 1


@pytest.mark.parametrize("pair", ["zoneA:zoneZ", "zoneA|zoneA", "zoneA:", "zoneA:core", ":"])
def test_invalid_pair_of_leaf_zones_is_rejected(pair):
    with pytest.raises(UsageError, match=r"leaf zone|two different zones"):
        veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), pair)


@pytest.mark.parametrize("pair", ["zoneB:zoneA", "zoneA|zoneB"])
def test_pair_of_leaf_zones_has_one_name(pair):
    ends = veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), pair)
    assert ends and inter_leaf_name(*ends) == "zoneA|zoneB"


def test_node_is_no_pair_of_leaf_zones():
    assert veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), "n1") is None
