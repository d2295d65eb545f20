"""Link options of a sandbox: valid and invalid durations, fractions and pairs of zones."""

from __future__ import annotations

import pytest

from slurmdl.errors import UsageError
from slurmdl.links.link_scores import inter_leaf_name
from slurmdl.sandbox import qdisc, veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.units import parse_duration, parse_fraction


@pytest.mark.parametrize(("text", "seconds"), [("10ms", 0.01), ("250us", 2.5e-4), ("0.5s", 0.5), ("0.01", 0.01),
                                               ("0", 0.0), ("10", 10.0)])
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1ms", "1h", "11s", "ms", "nan", "1e3", "1 0ms"])
def test_invalid_duration_is_rejected(text):
    with pytest.raises(UsageError, match=r"time .*10ms"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "fraction"), [("2%", 0.02), ("0.02", 0.02), ("0", 0.0), ("99.9%", 0.999)])
def test_fractions(text, fraction):
    assert parse_fraction(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["", "1", "100%", "-0.1", "2 %", "inf", "%"])
def test_invalid_fraction_is_rejected(text):
    with pytest.raises(UsageError, match=r"fraction .*2%"):
        parse_fraction(text)


def test_netem_delay_precedes_token_bucket():
    lines = qdisc.netem_lines("eth0", 0.01, "tbf rate 8000bit burst 70000 limit 280000")
    assert lines == ["qdisc replace dev eth0 root handle 1: netem delay 10000us limit 100000",
                     "qdisc replace dev eth0 parent 1:1 tbf rate 8000bit burst 70000 limit 280000"]
    assert len(qdisc.netem_lines("eth0", 0.01, "")) == 1


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
