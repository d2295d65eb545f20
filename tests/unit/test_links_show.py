"""Table of link scores."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from placing import two_level

from slurmdl.cli.main import main
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScore, LinkScores

SIX = two_level(("n1", "n2"), ("n3", "n4"), ("n5", "n6"))
SCORES = LinkScores(nodes={"n1": LinkScore(1.25e9, 4e-5), "n2": LinkScore(1.25e8, 4e-5), "n5": LinkScore(loss=0.02)},
                    zones={"z2": LinkScore(1e8)}, inter_leaf={"z0|z1": LinkScore(6.25e8, 8e-5)}, time=1e9)


def test_rows_are_sorted_by_slowdown() -> None:
    rows = capacity.link_rows(SCORES, SIX)
    assert [(row.kind, row.name) for row in rows] == [
        ("node", "n5"), ("zone", "z2"), ("node", "n2"), ("inter_leaf", "z0|z1"), ("node", "n1")]
    assert [row.zone for row in rows] == ["z2", "root", "z0", "", "z0"]
    # a MB at a tenth of 1.25e9 bytes/s, and 2 x 20 us
    assert rows[2].slowdown == pytest.approx((8e-3 + 4e-5) / (8e-4 + 4e-5), rel=1e-3)
    assert rows[-1].slowdown == 1.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "topology.conf").write_text("SwitchName=z0 Nodes=n[1-2]\nSwitchName=z1 Nodes=n[3-4]\n"
                                            "SwitchName=z2 Nodes=n[5-6]\nSwitchName=root Switches=z0,z1,z2\n")
    (tmp_path / "scores.json").write_text(LinkScores(SCORES.nodes, SCORES.zones, inter_leaf=SCORES.inter_leaf,
                                                     time=time.time()).to_text())
    (tmp_path / "scores.json").chmod(0o644)
    return tmp_path


def show(site: Path, *args: str) -> int:
    return main(["links", "show", f"--link-scores={site}/scores.json", f"--topology={site}/topology.conf", *args])


def test_show_prints_the_table(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(site) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "3 of 6 nodes (50.0%) with a link score younger than 15 min" in output.out
    assert output.out.index("n5 ") < output.out.index("z2    ") < output.out.index("n1 ")
    assert "2.00%" in output.out and "1 Gbit/s" in output.out


def test_show_json_lists_links_and_coverage(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(site, "--json") == 0
    matrix = json.loads(capsys.readouterr().out)
    assert [link["name"] for link in matrix["links"]] == ["n5", "z2", "n2", "z0|z1", "n1"]
    assert (matrix["nodes"], matrix["nodes_with_score"]) == (6, 3)


def test_show_of_missing_file_fails_with_one_line(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "scores.json").unlink()
    assert show(site) == 65
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "No such file" in output.err


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0 s"), (59.4, "59 s"), (200, "3 min"), (7200, "2 h"),
                                               (2e5, "2 d")])
def test_format_age_uses_the_largest_unit(seconds: float, expected: str) -> None:
    assert capacity.format_age(seconds) == expected
