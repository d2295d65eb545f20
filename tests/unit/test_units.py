"""Quantities for people, and what predictions say of their assumptions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl import units
from slurmdl.dl_options import DlOptions
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement import score_report
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology


@pytest.mark.parametrize(("form", "value", "text"), [
    (units.format_bytes, 0, "0 B"), (units.format_bytes, 999,
     "999 B"), (units.format_bytes, 999.6, "1 kB"), (units.format_bytes, 320e6, "320 MB"),
    (units.format_bytes, 1.2345e9, "1.23 GB"), (units.format_bytes, 5e15, "5,000 TB"),
    (units.format_duration, 0, "0 s"), (units.format_duration,
     25.6, "25.6 s"), (units.format_duration, 0.0652, "65.2 ms"),
    (units.format_duration, 0.99996, "1 s"), (units.format_duration,
     2e-5, "20 us"), (units.format_duration, 1e-8, "0.01 us"),
    (units.format_duration, 12345.6, "12,346 s"),
    (units.format_bit_rate, 1.25e9, "10 Gbit/s"), (units.format_bit_rate,
     6.25e6, "50 Mbit/s"), (units.format_bit_rate, 1, "8 bit/s"),
])
def test_three_digits_and_a_unit(form, value, text):
    assert form(value) == text


@given(st.floats(1e-6, 1e15))
def test_the_text_is_the_value(value):
    factors = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "s": 1, "ms": 1e-3, "us": 1e-6}
    for form in (units.format_bytes, units.format_duration):
        number, unit = form(value).replace(",", "").split()
        assert math.isclose(float(number) * factors[unit], value, rel_tol=5.1e-3)


def tree(**speeds: int) -> Topology:
    return build_topology([*(ZoneDecl(name, nodes=(f"n{name}",), link_speed=speed or None) for name, speed in speeds.items()),
                  ZoneDecl("core", tuple(speeds))], kind="tree", source="")


@pytest.mark.parametrize(("dl", "topology", "scores", "text"), [
    (DlOptions(), Topology.flat(["n1"]), LinkScores(), "model 100 MB (default), links 10 Gbit/s (default)"),
    (DlOptions(model_bytes=4e8), tree(a=0, b=0), LinkScores(default_node_bandwidth=1.25e8),
     "model 400 MB, links 1 Gbit/s, uplinks 1/2 of their nodes"),
    (DlOptions(), tree(a=0, b=2), LinkScores(default_zone_bandwidth=(6.25e6,)),
     "model 100 MB (default), links 10 Gbit/s (default), uplinks 50 Mbit/s"),
    (DlOptions(comm_pattern="hierarchical"), tree(a=40000, b=40000), LinkScores(),
     "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"),
    (DlOptions(comm_pattern="sent.npz"), tree(a=40000, b=0), LinkScores(nodes={"na": LinkScore(1e8)}),
     "traffic of sent.npz, links 10 Gbit/s (default), uplinks by LinkSpeed or 1/2 of their nodes, or as "
     "measured"),
])
def test_assumptions(dl, topology, scores, text):
    assert score_report.format_assumptions(dl, topology, scores) == text


@pytest.mark.parametrize("seconds, text", [(-1, "0 s"), (0.4, "0 s"), (59.6, "1 min"), (125, "2 min 5 s"),
                                           (3600, "1 h"), (12_059, "3 h 20 min"), (187_300, "2 d 4 h")])
def test_coarse_durations_have_two_units(seconds: float, text: str) -> None:
    assert units.format_coarse_duration(seconds) == text
