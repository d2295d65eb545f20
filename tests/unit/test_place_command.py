"""`slurmdl place` without a cluster: text, JSON and SVG as golden files, and errors of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from placing import cluster, job, node, two_level

from slurmdl.cli.main import main
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.mesh import DEFAULT_MODEL
from slurmdl.placement import explain
from slurmdl.placement.explain import (
    MAX_REPORTED_LINKS,
    decisive_step_scores,
    explain_placement,
    format_assumptions,
    format_score_report,
)
from slurmdl.placement.place import place_job
from slurmdl.placement.placement_svg import draw_placement
from slurmdl.placement.result import Cost, Placement, RankMap
from slurmdl.topology.drawing import draw_topology
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

ROOT = Path(__file__).parents[2]
FILES = ["--topology=topology/topology.conf", "--cluster=examples/cluster.json",
         "--link-scores=examples/link-scores.json"]

CASES = {
    "one-zone": ["-N", "3"],
    "two-zones-ps": ["-N", "6", "--dl-strategy=ps", "--dl-ps=2", "--no-requeue"],
    "tasks-per-node": ["-N2", "--ntasks-per-node=2", "--dl-strategy=gossip", "--dl-zone=zoneB"],
    "no-choice": ["-n", "6"],
    "not-free": ["-N", "8"],
    "groups": ["-N6", "--ntasks-per-node=1", "--dl-groups=a=2,b=4", "--dl-bytes=a=1G,b=2G,a:b=10M"],
    "mesh": ["-N6", "--ntasks-per-node=4", "--dl-mesh=dp=2,pp=3,tp=4", "--dl-bytes=dp=1G,pp=10M,tp=4G"],
}


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No user configuration, no cluster, and paths relative to the project directory."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURMDL_SUBMISSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("case", CASES)
def test_text(case: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert main(["place", *FILES, *CASES[case]]) == 0
    golden(f"place/{case}.txt", capsys.readouterr().out)


def test_number_of_ranks_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank needs 150 bytes of memory: 2 * 999,999 ranks need 300 MB."""
    assert main(["place", *FILES, "-N2", "--dl-launcher=auto:999999"]) == 0
    assert "choice     none: 1,999,998 ranks; expected at most 1048576\n" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["two-zones-ps", "no-choice"])
def test_json(case: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert main(["place", *FILES, "--json", *CASES[case]]) == 0
    out = capsys.readouterr().out
    json.loads(out)
    golden(f"place/{case}.json", out)


@pytest.mark.parametrize("case", ["two-zones-ps", "no-choice"])
def test_svg(case: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    path = tmp_path / "placement.svg"
    assert main(["place", *FILES, "--svg", str(path), *CASES[case]]) == 0
    svg = path.read_text()
    ElementTree.fromstring(svg)
    golden(f"place/{case}.svg", svg)


def test_script_directives_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH --nodes=2\n#DL --dl-zone=zoneB\nslurmdl srun true\n")
    assert main(["place", *FILES, "--json", str(script), "-e", "--epochs", "10", "json", "--strategy=ps"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["placement"]["nodes_per_zone"] == {"zoneB": 2}


@pytest.mark.parametrize(("argv", "status", "message"), [
    (["--topology"], 64, "--topology: expected a file"), (["--topology=missing", *FILES[1:]], 65, "cannot be read"),
    ([*FILES[:1], "--cluster=README"], 65, "README"), ([*FILES[:2], "--link-scores=missing"], 65, "missing"),
    ([*FILES, "--dl-zone=zoneC"], 64, "zoneA, zoneB, core"), ([*FILES, "--dl-rank0=last"], 64, "--dl-rank0"),
    ([*FILES, "--dl-speed=1"], 64, "--dl-speed"), ([*FILES, "-n", "6", "--dl-strict"], 75, "not certain"),
    ([*FILES, "-N2", "--svg=/nowhere/a.svg"], 64, "cannot be written"),
])
def test_bad_input(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *argv]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(("args", "message"), [
    (["README.md", "--svg", "{out}"], "--svg after README.md is an argument of the script; expected --svg before"),
    (["README.md", "a", "--json"], "--json after"), (["README.md", "--cluster=x"], "--cluster after"),
    (["--", "README.md", "--dl-zone=zoneB"], "--dl-zone after"), (["README.md", "--explian"], "--explain before"),
    (["README.md", "--dl-strateg=ps"], "--dl-strategy before"),
    (["--explian", "README.md"], "--explian: unknown option; expected --explain"),
    (["--tpology=x", "README.md"], "--tpology=x: unknown option; expected --topology"),
])
def test_option_without_effect_is_an_error(
        args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *FILES, "-N3", *(arg.format(out=tmp_path / "out") for arg in args)]) == 64
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "out").exists()


def test_512_nodes_are_folded(golden: Callable[[str, str], None]) -> None:
    leaves = [[f"n{z * 32 + i:04d}" for i in range(32)] for z in range(32)]
    topology = two_level(*leaves)
    nodes = cluster(*(node(name, "IDLE" if i % 3 else "DOWN") for i, name in enumerate(sorted(topology.nodes))))
    request = JobRequest(nodes=(512, 512), ntasks_per_node=2, options=DlOptions(strategy="ps", ps=16))
    placement = place_job(request, nodes, topology, LinkScores())
    text = explain_placement(placement, topology, nodes, LinkScores(), DlOptions())
    assert len(text.splitlines()) < 40
    golden("place/512-nodes.txt", text + "\n")
    svg = draw_placement(placement, topology, nodes)
    ElementTree.fromstring(svg)
    golden("place/512-nodes.svg", svg)


def test_names_of_files_are_text_in_pictures() -> None:
    """XML has no control characters."""
    topology = two_level(["n\x1b1", "n<2"], ["n3", "n4"])
    nodes = cluster(*(node(name, "IDLE") for name in topology.nodes))
    placement = place_job(JobRequest(nodes=(2, 2)), nodes, topology, LinkScores())
    for svg in (draw_placement(placement, topology, nodes), draw_topology(topology)):
        texts = [element.text or "" for element in ElementTree.fromstring(svg).iter()]
        assert any(r"n\x1b1" in text for text in texts) and any("n<2" in text for text in texts)


def test_result_is_the_same_in_every_process() -> None:
    argv = ["place", *FILES, *CASES["two-zones-ps"]]
    program = "import sys; from slurmdl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    runs = {subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60,
                           env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONHASHSEED": seed},
                           cwd=ROOT, check=True).stdout for seed in ("1", "2")}
    assert len(runs) == 1


def test_seed_chooses_among_equal_nodes_only(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {}
    for seed in range(8):
        assert main(["place", *FILES, "--json", f"--seed={seed}", "-N2"]) == 0
        placement = json.loads(capsys.readouterr().out)["placement"]
        seconds[tuple(placement["nodes"])] = placement["rank_map"]["cost"]["seconds"]
    assert len(seconds) > 1 and len(set(seconds.values())) == 1


def test_implausible_link_speed_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LinkSpeed=2 for both leaves: a note names it, and the prediction ignores it."""
    plain = (ROOT / "topology/topology.conf").read_text()
    lines = {}
    for name, text in (("plain", plain), ("odd", plain.replace("Nodes=", "LinkSpeed=2 Nodes="))):
        (tmp_path / f"{name}.conf").write_text(text)
        assert main(["place", f"--topology={tmp_path}/{name}.conf", "--cluster=examples/cluster.json", "-N6"]) == 0
        lines[name] = capsys.readouterr().out.splitlines()
    (note,) = (line for line in lines["odd"] if line not in lines["plain"])
    assert note.startswith("note       LinkSpeed of 2 zones (2) is not used")
    assert "Mbit/s" in note and "link_defaults.zone_bandwidth in slurmdl.yaml" in note
    assert [line for line in lines["odd"] if not line.startswith("note")] == lines["plain"]


LINKS = LinkScores(
    nodes={"n1": LinkScore(1e8, age=60.0, samples=4), "n3": LinkScore(loss=0.05, age=7200.0), "n4": LinkScore(1.2e9)},
    zones={"z1": LinkScore(1e8)}, inter_leaf={"z0|z1": LinkScore(1e8), "z1|z2": LinkScore(1e8)})
SIX = two_level(["n1", "n2"], ["n3", "n4"], ["n5", "n6"])


def test_report_of_link_scores() -> None:
    ranks = RankMap(("n2", "n4"), ("worker",) * 2, Cost(1.0, 1, 1, "z1"))
    decisive = decisive_step_scores(ranks, ["n2", "n3"], SIX, LINKS)
    assert {link.name: link.use for link in decisive} == {
        "n3": "left out", "z1": "used, the busiest link", "z0|z1": "used", "z1|z2": "left out"}
    assert decisive_step_scores(None, [], SIX, LinkScores(nodes=LINKS.nodes)) == []
    head, *lines = format_score_report(decisive, LINKS)
    assert head == "scores     of 3 nodes, 1 zones, 2 inter-leaf paths, 0 s to 2 h old"
    assert any(line.startswith("  n3     left out: slowdown ") and line.endswith(", 5.00% loss, 2 h old, samples: 1")
               for line in lines) and len(lines) == 4
    many = [*format_score_report(decisive[:1] * 14, LINKS)]
    assert len(many) == 1 + MAX_REPORTED_LINKS + 1 and many[-1] == "  and 2 more"


@pytest.mark.parametrize(("options", "scores", "declared", "text"), [
    (DlOptions(), LinkScores(), "", "model 100 MB (default), links 10 Gbit/s (default), uplinks 1/2 of their nodes"),
    (DlOptions(bytes="400M"), LINKS, "",
     "model 400 MB, links 10 Gbit/s (default), uplinks 1/2 of their nodes, or as measured"),
    (DlOptions(comm_pattern="base-2"), LinkScores(default_node_bandwidth=1e9, default_rails=2), "z0",
     "model 100 MB (default), links 8 Gbit/s on 2 rails, uplinks by LinkSpeed or 1/2 of their nodes"),
    (DlOptions(comm_pattern="f.npz"), LinkScores(default_leaf_bandwidth=1e9, default_zone_bandwidth=(1e9, 2e9)), "",
     "traffic of f.npz, links 10 Gbit/s (default), 8 Gbit/s inside a leaf zone, uplinks 8 Gbit/s/16 Gbit/s"),
    (DlOptions(groups="a=1,b=1"), LinkScores(), "z0 z1", "groups a=1,b=1, model 100 MB (default), links 10 Gbit/s "
     "(default), uplinks by LinkSpeed"),
    (DlOptions(groups="a=1,b=1", bytes="a=1G", mesh="b:dp=2"), LinkScores(), "z0 z1",
     "groups a=1,b=1, a=1G and the meshes, links 10 Gbit/s (default), uplinks by LinkSpeed"),
    (DlOptions(mesh="dp=2"), LinkScores(), "z0 z1",
     f"mesh dp=2, {DEFAULT_MODEL} (default), links 10 Gbit/s (default), uplinks by LinkSpeed"),
    (DlOptions(mesh="dp=2", bytes="dp=1G"), LinkScores(), "z0 z1",
     "mesh dp=2, dp=1G, links 10 Gbit/s (default), uplinks by LinkSpeed"),
])
def test_assumptions(options: DlOptions, scores: LinkScores, declared: str, text: str) -> None:
    leaves = [ZoneDecl(zone, nodes=(f"{zone}n",), link_speed=8000 if zone in declared else None)
              for zone in ("z0", "z1")]
    topology = build_topology([*leaves, ZoneDecl("r", children=("z0", "z1"))], kind="tree", source="")
    assert format_assumptions(options, topology, scores) == text
    flat = format_assumptions(options, Topology.flat(["a"]), scores)
    assert flat == text.partition(", uplinks")[0] + ", or as measured" * text.endswith("measured")


def test_long_names_and_many_ranks_in_pictures() -> None:
    topology = two_level(["node-with-a-long-name", "b"], ["c", "d"])
    topology = replace(topology, zones=("a-zone-with-a-name-that-is-long", *topology.zones[1:]))
    snapshot = cluster(*(node(name, cpus=64, cpus_unallocated=64) for name in sorted(topology.nodes)))
    svg = draw_placement(place_job(job(4, ntasks_per_node=13), snapshot, topology, LinkScores()), topology, snapshot)
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    assert {"node-wit…", "ranks 0-12", "13-25", "a-zone-with-a-name-that-is-long"} <= {*texts}
    alternating = Placement(("b", "c"), RankMap(("b", "c") * 6, ("worker",) * 12, Cost(1.0, 0, 0)))
    assert {"0,2,4,6,8…", "1,3,5,7,9…"} <= {element.text for element in ElementTree.fromstring(
        draw_placement(alternating, topology, snapshot)).iter()}
    widths = {float(element.get("width", 0)) for element in ElementTree.fromstring(svg).iter()}
    assert 9 * len("a-zone-with-a-name-that-is-long") + 24 in widths, "the zone is as wide as its name"


@pytest.mark.parametrize(("nodes", "lines"), [
    ("n1 n3 n4" + " n5" * 14, [
        "0            worker  z0 x1", "1-2          worker  z1 x2", "3-16         worker  z2 x14"]),
    (" ".join(["n1", "n3"] * 9), ["0-17         worker  z0 x9 + z1 x9"]),
    ("n2 x", [" 0  worker  n2  z0", " 1  worker  x  no zone"])])
def test_lines_of_ranks(nodes: str, lines: list[str]) -> None:
    ranks = RankMap(tuple(nodes.split()), ("worker",) * len(nodes.split()), Cost(1.0, 0, 0))
    assert [line[2:] for line in explain._rank_lines(ranks, SIX)] == lines
