"""How the links of a sandbox are written: rates, times and shares, and what is none of them."""

from __future__ import annotations

import pytest

from slurmdl.errors import UsageError
from slurmdl.sandbox import qdisc, veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.units import parse_duration, parse_fraction


@pytest.mark.parametrize(("text", "seconds"), [("10ms", 0.01), ("250us", 2.5e-4), ("0.5s", 0.5), ("0.01", 0.01),
                                               ("0", 0.0), ("10", 10.0)])
def test_times(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1ms", "1h", "11s", "ms", "nan", "1e3", "1 0ms"])
def test_what_is_no_time(text):
    with pytest.raises(UsageError, match=r"time .*10ms"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), ("0", 0.0), ("99.9%", 0.999)])
def test_shares(text, share):
    assert parse_fraction(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "1", "100%", "-0.1", "2 %", "inf", "%"])
def test_what_is_no_share(text):
    with pytest.raises(UsageError, match=r"fraction .*2%"):
        parse_fraction(text)


def test_netem_holds_before_the_bucket_limits():
    lines = qdisc.netem_lines("eth0", 0.01, "tbf rate 8000bit burst 70000 limit 280000")
    assert lines == ["qdisc replace dev eth0 root handle 1: netem delay 10000us limit 100000",
                     "qdisc replace dev eth0 parent 1:1 tbf rate 8000bit burst 70000 limit 280000"]
    assert len(qdisc.netem_lines("eth0", 0.01, "")) == 1


@pytest.mark.parametrize("pair", ["zoneA:zoneZ", "zoneA|zoneA", "zoneA:", "zoneA:core", ":"])
def test_what_is_no_way_between_zones(pair):
    with pytest.raises(UsageError, match=r"leaf zone|two different zones"):
        veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), pair)


@pytest.mark.parametrize("pair", ["zoneB:zoneA", "zoneA|zoneB"])
def test_a_way_has_one_name(pair):
    ends = veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), pair)
    assert ends and veth_links.inter_leaf_label(ends) == "zoneA|zoneB"


def test_a_node_is_no_way():
    assert veth_links.find_inter_leaf(SandboxSpec("any", round_robin_topology(4, 2)), "n1") is None
