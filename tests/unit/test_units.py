"""Formatting and parsing of quantities, and the assumptions of predictions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl import units
from slurmdl.dl_options import DlOptions
from slurmdl.errors import UsageError
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement import explain
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology


@pytest.mark.parametrize(("function", "value", "text"), [
    (units.format_bytes, 0, "0 B"), (units.format_bytes, 999, "999 B"), (units.format_bytes, 999.6, "1 kB"),
    (units.format_bytes, 320e6, "320 MB"), (units.format_bytes, 1.2345e9, "1.23 GB"),
    (units.format_bytes, 5e15, "5,000 TB"),
    (units.format_duration, 0, "0 s"), (units.format_duration, 25.6, "25.6 s"),
    (units.format_duration, 0.0652, "65.2 ms"), (units.format_duration, 0.99996, "1 s"),
    (units.format_duration, 2e-5, "20 us"), (units.format_duration, 1e-8, "0.01 us"),
    (units.format_duration, 12345.6, "12,346 s"),
    (units.format_bit_rate, 1.25e9, "10 Gbit/s"), (units.format_bit_rate, 6.25e6, "50 Mbit/s"),
    (units.format_bit_rate, 1, "8 bit/s"),
    *((units.format_coarse_duration, seconds, text) for seconds, text in (
        (-1, "0 s"), (0.4, "0 s"), (59.6, "1 min"), (125, "2 min 5 s"), (3600, "1 h"), (12_059, "3 h 20 min"),
        (187_300, "2 d 4 h"))),
])
def test_format_has_digits_and_units(function, value, text):
    assert function(value) == text


@given(st.floats(1e-6, 1e15))
def test_formatted_text_equals_the_value(value):
    factors = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "s": 1, "ms": 1e-3, "us": 1e-6}
    for function in (units.format_bytes, units.format_duration):
        number, unit = function(value).replace(",", "").split()
        assert math.isclose(float(number) * factors[unit], value, rel_tol=5.1e-3)


@pytest.mark.parametrize(("parse", "values", "invalid", "message"), [
    (units.parse_duration, {"10ms": 0.01, "250us": 2.5e-4, "0.5s": 0.5, "0.01": 0.01, "0": 0.0, "10": 10.0},
     ("", "-1ms", "1h", "11s", "ms", "nan", "1e3", "1 0ms"), r"time .*10ms"),
    (units.parse_fraction, {"2%": 0.02, "0.02": 0.02, "0": 0.0, "99.9%": 0.999},
     ("", "1", "100%", "-0.1", "2 %", "inf", "%"), r"fraction .*2%"),
])
def test_quantities_are_parsed_or_rejected(parse, values, invalid, message):
    assert {text: parse(text) for text in values} == pytest.approx(values)
    for text in invalid:
        with pytest.raises(UsageError, match=message):
            parse(text)


def tree(**link_speeds: int) -> Topology:
    return build_topology([*(ZoneDecl(name, nodes=(f"n{name}",), link_speed=speed or None)
                             for name, speed in link_speeds.items()),
                  ZoneDecl("core", tuple(link_speeds))], kind="tree", source="")


@pytest.mark.parametrize(("options", "topology", "scores", "text"), [
    (DlOptions(), Topology.flat(["n1"]), LinkScores(), "model 100 MB (default), links 10 Gbit/s (default)"),
    (DlOptions(bytes="400M"), tree(a=0, b=0), LinkScores(default_node_bandwidth=1.25e8),
     "model 400 MB, links 1 Gbit/s, uplinks 1/2 of their nodes"),
    (DlOptions(), tree(a=0, b=2), LinkScores(default_zone_bandwidth=(6.25e6,)),
     "model 100 MB (default), links 10 Gbit/s (default), uplinks 50 Mbit/s"),
    (DlOptions(comm_pattern="hierarchical"), tree(a=40000, b=40000), LinkScores(),
     "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"),
    (DlOptions(comm_pattern="sent.npz"), tree(a=40000, b=0), LinkScores(nodes={"na": LinkScore(1e8)}),
     "traffic of sent.npz, links 10 Gbit/s (default), uplinks by LinkSpeed or 1/2 of their nodes, or as "
     "measured"),
])
def test_assumptions_of_predictions(options, topology, scores, text):
    assert explain.format_assumptions(options, topology, scores) == text
