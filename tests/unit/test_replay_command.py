"""The command `slurmdl replay`."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from slurmdl.cli.main import main
from slurmdl.history.replay import round_ticks
from slurmdl.topology import write
from slurmdl.topology.source import tree_topology


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text(write.format_topology_conf(tree_topology((1, 4, 32))))
    return str(path)


def run(capsys, *argv):
    status = main(["replay", *argv])
    return status, *capsys.readouterr()


def test_generated_trace_as_text_json_and_chart(capsys, topology, tmp_path):
    chart = tmp_path / "out.svg"
    status, text, errors = run(capsys, "--topology", topology, "--jobs", "60", "--strategy", "gossip", "--svg",
                               str(chart))
    assert (status, errors) == (0, "")
    assert "Lublin-Feitelson, seed 0: 60 jobs, load 0.85" in text
    assert "32 nodes in 4 leaf zones" in text
    assert "50% of the multi-node jobs are bound by communication (gossip), 30% of their run time" in text
    for metric in ("waiting time", "bounded slowdown", "useful utilisation", "step-time factor", "largest job"):
        assert metric in text
    assert re.search(r"mixed: with slurmdl \d+ jobs", text)
    drawing = ET.parse(chart).getroot()
    assert len(drawing.findall(".//{*}polyline")) == 4 * 5
    labels = [element.text for element in drawing.findall(".//{*}text")]
    assert {"0%", "50%", "100%", "1x", "0.1 min"} <= set(labels)
    width, height = (float(drawing.get(name)) for name in ("width", "height"))
    for element in drawing.findall(".//{*}text"):
        assert 0 <= float(element.get("x")) < width - 20
        assert 20 <= float(element.get("y")) < height - 20
    # each curve from the lower to the upper border of its panel
    panels = [element for element in drawing.findall(".//{*}rect") if element.get("fill") == "none"]
    for number, curve in enumerate(drawing.findall(".//{*}polyline")):
        x, y, across, down = (float(panels[number // 4].get(name)) for name in ("x", "y", "width", "height"))
        points = np.array([point.split(",") for point in curve.get("points").split()], float)
        assert (points[0, 1], points[-1, 1]) == (y + down, y)
        assert x <= points[:, 0].min() <= points[:, 0].max() <= x + across
    first = run(capsys, "--topology", topology, "--jobs", "60", "--json")[1]
    assert first == run(capsys, "--topology", topology, "--jobs", "60", "--json")[1]
    policies = json.loads(first)["policies"]
    assert [policy["policy"] for policy in policies] == ["slurm", "slurmdl", "mixed", "random"]
    assert all(0 < policy["utilization"] <= 1 and policy["jobs"] == 60 for policy in policies)


@pytest.mark.parametrize(("low", "high", "is_log", "ticks"), [
    (0, 50, False, [0, 10, 20, 30, 40, 50]), (1, 2, False, [1, 1.2, 1.4, 1.6, 1.8, 2]),
    (0.93, 1.07, False, [0.95, 1, 1.05]), (0.1, 3700, True, [0.1, 1, 10, 100, 1000]),
    (0, 7, False, [0, 2, 4, 6])])
def test_axes_have_round_numbers(low, high, is_log, ticks):
    assert round_ticks(low, high, is_log) == pytest.approx(ticks)


def test_seeds_give_the_same_result_in_any_number_of_processes(capsys, topology):
    argv = ["--topology", topology, "--jobs", "40", "--seeds", "2", "--policy", "slurm", "--json"]
    one, two = (run(capsys, *argv, "--processes", count)[1] for count in "12")
    assert one == two
    assert json.loads(one)["policies"][0]["jobs"] == 80


def test_trace_file_with_load_and_first_jobs(capsys, topology, tmp_path):
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit,run,nodes,user\n" + "".join(f"{60 * i},600,{1 + i % 40},u{i % 3}\n" for i in range(80)))
    _, text, _ = run(capsys, "--topology", topology, str(trace), "--jobs", "70", "--load", "0.5", "--policy",
                     "slurm,slurmdl")
    assert "the first 70 of 80 jobs" in text
    assert "8 jobs skipped: more than the cluster's 32 nodes, up to 40" in text
    assert re.search(r"jobs.csv: 62 jobs, load 0.5;", text)
    assert "times between submissions multiplied by" in text


@pytest.mark.parametrize(("argv", "message"), [
    (["--policy", "best"], "--policy best: expected slurm, slurmdl, mixed, random"),
    (["--policy", ","], "--policy ,: expected"),
    (["--share", "1.5"], "--share 1.5: expected 0 to 1"),
    (["--load", "0"], "--load 0: expected 0.01 to 2"),
    (["--jobs", "1"], "--jobs 1: expected 2"),
    (["--strategy", "ps"], "--strategy ps: expected allreduce or gossip"),
    (["--model-bytes", "x"], "--model-bytes: invalid value 'x'"),
    (["missing.swf", "--seeds", "2"], "--seeds: expected without FILE"),
    (["--svg", "/nowhere/x.svg", "--jobs", "5"], "--svg=/nowhere/x.svg: cannot be written")])
def test_usage_errors(capsys, topology, argv, message):
    status, _, errors = run(capsys, "--topology", topology, *argv)
    assert status == 64
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("text", ["", "x", "1 2 3\n", "JobID|Start\n", "[]", "{}", "; only\n", "\0" * 9,
                                  "submit,run,nodes\n1,1,1\n"])
def test_hopeless_files_are_one_line_errors(capsys, topology, tmp_path, text):
    trace = tmp_path / "trace"
    trace.write_text(text)
    status, out, errors = run(capsys, "--topology", topology, str(trace))
    assert status in (64, 65)
    assert out == ""
    assert errors.count("\n") == 1
    assert "trace" in errors
