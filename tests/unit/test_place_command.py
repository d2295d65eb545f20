"""`slurmdl place` away from a cluster: its texts, JSON and pictures as golden files, and what bad input gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from placing import cluster, node, two_level

from slurmdl.cli.main import main
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.explain import explain_placement
from slurmdl.placement.place import place_job
from slurmdl.placement.placement_svg import draw_placement

ROOT = Path(__file__).parents[2]
FILES = ["--topology=topology/topology.conf", "--cluster=examples/cluster.json", "--link-scores=examples/link-scores.json"]

CASES = {
    "one-zone": ["-N", "3"],
    "two-zones-ps": ["-N", "6", "--dl-strategy=ps", "--dl-ps=2", "--no-requeue"],
    "tasks-per-node": ["-N2", "--ntasks-per-node=2", "--dl-strategy=gossip", "--dl-zone=zoneB"],
    "no-choice": ["-n", "6"],
    "not-free": ["-N", "8"],
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the user, no cluster, and paths as a user in the project's directory types them."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURMDL_SUBMISSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("case", CASES)
def test_text(case: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert main(["place", *FILES, *CASES[case]]) == 0
    golden(f"place/{case}.txt", capsys.readouterr().out)


@pytest.mark.parametrize("case", ["two-zones-ps", "no-choice"])
def test_json(case: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert main(["place", *FILES, "--json", *CASES[case]]) == 0
    out = capsys.readouterr().out
    json.loads(out)
    golden(f"place/{case}.json", out)


@pytest.mark.parametrize(("case", "says"), [
    ("two-zones-ps", "3.33 s, proven optimal; this choice takes 1 times as long"), ("one-zone", "110 ms, proven optimal"),
    ("no-choice", "none: the node count is not certain"), ("not-free", "none: "),
])
def test_the_exact_optimum_beside_it(case: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *FILES, "--exact", *CASES[case]]) == 0
    assert f"exact      {says}" in capsys.readouterr().out
    assert main(["place", *FILES, "--exact", "--json", *CASES[case]]) == 0
    found = json.loads(capsys.readouterr().out)["exact"]
    assert found.get("proven") or found["reason"] in says or says.removeprefix("none: ") in found["reason"]


@pytest.mark.parametrize("case", ["two-zones-ps", "no-choice"])
def test_picture(case: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    path = tmp_path / "picture.svg"
    assert main(["place", *FILES, "--svg", str(path), *CASES[case]]) == 0
    picture = path.read_text()
    ElementTree.fromstring(picture)
    golden(f"place/{case}.svg", picture)


def test_the_script_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH --nodes=2\n#DL --dl-zone=zoneB\nslurmdl srun true\n")
    assert main(["place", *FILES, "--json", str(script), "-e", "--epochs", "10", "json", "--strategy=ps"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placement"]["nodes_per_zone"] == {"zoneB": 2}


@pytest.mark.parametrize(("argv", "status", "says"), [
    (["--topology"], 64, "needs a file"), (["--topology=missing", *FILES[1:]], 65, "cannot be read"),
    ([*FILES[:1], "--cluster=README"], 65, "README"), ([*FILES[:2], "--link-scores=missing"], 65, "missing"),
    ([*FILES, "--dl-zone=zoneC"], 64, "valid: zoneA, zoneB, core"), ([*FILES, "--dl-place=tight"], 64, "valid: "),
    ([*FILES, "--dl-speed=1"], 64, "valid: "), ([*FILES, "-n", "6", "--dl-strict"], 75, "not certain"),
    ([*FILES, "-N2", "--svg=/nowhere/a.svg"], 64, "cannot be written"),
])
def test_bad_input(argv: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *argv]) == status
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(("words", "says"), [
    (["README.md", "--svg", "{out}"], "--svg behind README.md is an argument of the script; valid: --svg before"),
    (["README.md", "a", "--json"], "--json behind"), (["README.md", "--cluster=x"], "--cluster behind"),
    (["--", "README.md", "--dl-zone=zoneB"], "--dl-zone behind"), (["README.md", "--explian"], "--explain before"),
    (["README.md", "--dl-strateg=ps"], "--dl-strategy before"),
    (["--explian", "README.md"], "unknown option --explian; valid: --explain"),
    (["--tpology=x", "README.md"], "unknown option --tpology=x; valid: --topology"),
])
def test_an_option_that_would_have_no_effect_is_refused(
        words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *FILES, "-N3", *(word.format(out=tmp_path / "out") for word in words)]) == 64
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "out").exists()


def test_512_nodes_are_folded(golden: Callable[[str, str], None]) -> None:
    leaves = [[f"n{z * 32 + i:04d}" for i in range(32)] for z in range(32)]
    topology = two_level(*leaves)
    nodes = cluster(*(node(name, "IDLE" if i % 3 else "DOWN") for i, name in enumerate(sorted(topology.nodes))))
    request = JobRequest(nodes=(512, 512), ntasks_per_node=2, dl=DlOptions(strategy="ps", ps=16))
    found = place_job(request, nodes, topology, LinkScores())
    text = explain_placement(found, topology, nodes, LinkScores(), DlOptions())
    assert len(text.splitlines()) < 40
    golden("place/512-nodes.txt", text + "\n")
    picture = draw_placement(found, topology, nodes)
    ElementTree.fromstring(picture)
    golden("place/512-nodes.svg", picture)


def test_the_same_in_every_process() -> None:
    words = ["place", *FILES, *CASES["two-zones-ps"]]
    program = "import sys; from slurmdl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    runs = {subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60,
                           env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONHASHSEED": seed},
                           cwd=ROOT, check=True).stdout for seed in ("1", "2")}
    assert len(runs) == 1


def test_a_seed_chooses_among_equal_nodes_only(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for seed in range(8):
        assert main(["place", *FILES, "--json", f"--seed={seed}", "-N2"]) == 0
        placement = json.loads(capsys.readouterr().out)["placement"]
        found[tuple(placement["nodes"])] = placement["rank_map"]["cost"]["seconds"]
    assert len(found) > 1 and len(set(found.values())) == 1


def test_a_link_speed_of_another_unit_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LinkSpeed=2 for both leaves: the prediction is the one without it, and a line says why."""
    plain = (ROOT / "topology/topology.conf").read_text()
    told = {}
    for name, text in (("plain", plain), ("odd", plain.replace("Nodes=", "LinkSpeed=2 Nodes="))):
        (tmp_path / f"{name}.conf").write_text(text)
        assert main(["place", f"--topology={tmp_path}/{name}.conf", "--cluster=examples/cluster.json", "-N6"]) == 0
        told[name] = capsys.readouterr().out.splitlines()
    assert [line for line in told["odd"] if line not in told["plain"]] == [
        "note       LinkSpeed of 2 zones (2) is not used: it is taken for Mbit/s; plausible: 1,000 to 9,999,999, or "
        "links.zone in slurmdl.yaml"]
    assert [line for line in told["odd"] if not line.startswith("note")] == told["plain"]
