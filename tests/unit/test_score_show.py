"""The table and the heat map, as they are printed and drawn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from placing import two_level

from slurmdl.cli.main import main
from slurmdl.links import heatmap, link_table
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.topology.topology import Topology

SIX = two_level(("n1", "n2"), ("n3", "n4"), ("n5", "n6"))
SCORES = LinkScores(nodes={"n1": LinkScore(1.25e9, 4e-5), "n2": LinkScore(1.25e8, 4e-5), "n5": LinkScore(loss=0.02)},
                    zones={"z2": LinkScore(1e8)}, inter_leaf={"z0|z1": LinkScore(6.25e8, 8e-5)}, time=1e9)


def test_rows_begin_with_the_worst_and_an_unmeasured_link_is_usual() -> None:
    rows = link_table.link_rows(SCORES, SIX)
    assert [(row.kind, row.name) for row in rows] == [
        ("node", "n5"), ("zone", "z2"), ("node", "n2"), ("inter_leaf", "z0|z1"), ("node", "n1")]
    assert [row.zone for row in rows] == ["z2", "root", "z0", "", "z0"]
    # a MB at a tenth of 1.25e9 bytes/s, and 2 x 20 us
    assert rows[2].slowdown == pytest.approx((8e-3 + 4e-5) / (8e-4 + 4e-5), rel=1e-3)
    assert rows[-1].slowdown == 1.0


def test_heat_of_the_ways_and_inside_the_zones() -> None:
    found = heatmap.build_heatmap(SCORES, SIX)
    assert found.zones == ("z0", "z1", "z2")
    assert found.slowdowns[0, 1] == found.slowdowns[1, 0] == pytest.approx(2, rel=0.1)
    assert found.slowdowns[0, 2] == found.slowdowns[1, 2] > 10  # by the uplink of z2
    assert found.slowdowns[0, 0] > 9 and np.isnan(found.slowdowns[1, 1]) and found.slowdowns[2, 2] > 5
    assert heatmap.heatmap_text(found).splitlines()[1:] == ["z0  9 2 9", "z1  2 · 9", "z2  9 9 9"]


def test_without_a_topology_the_ways_name_the_zones() -> None:
    found = heatmap.build_heatmap(SCORES, Topology.flat(()))
    assert found.zones == ("z0", "z1") and found.slowdowns[0, 1] == pytest.approx(2, rel=0.1)
    assert heatmap.build_heatmap(LinkScores(), Topology.flat(())).zones == ()


def test_of_many_zones_the_worst_are_shown() -> None:
    many = two_level(*([f"n{i}"] for i in range(120)))
    found = heatmap.build_heatmap(LinkScores(nodes={"n77": LinkScore(1e6)}), many)
    assert "z77" in heatmap.heatmap_text(found) and f"the worst {heatmap.MAX_TEXT_ZONES} of 120" in heatmap.heatmap_text(found)
    assert len(heatmap.heatmap_text(found).splitlines()) == heatmap.MAX_TEXT_ZONES + 1
    picture = heatmap.heatmap_svg(found)
    ElementTree.fromstring(picture)
    assert "inside z77, worst node" in picture and f"the worst {heatmap.MAX_SVG_ZONES} of 120" in picture


def test_the_picture(golden: object) -> None:
    picture = heatmap.heatmap_svg(heatmap.build_heatmap(SCORES, SIX))
    ElementTree.fromstring(picture)
    golden("scores/heat.svg", picture)  # type: ignore[operator]


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


def show(site: Path, *words: str) -> int:
    return main(["links", "show", "--link-scores", str(site / "scores.json"), "--topology", str(site / "topology.conf"),
                 *words])


def test_show(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(site, "--svg", str(site / "heat.svg")) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "3 of 6 nodes (50.0%) have a link score younger than 15 min" in told.out
    assert told.out.index("n5 ") < told.out.index("z2    ") < told.out.index("n1 ")
    assert "2.00%" in told.out and "1 Gbit/s" in told.out and "z0  9 2 9" in told.out
    ElementTree.parse(site / "heat.svg")


def test_show_as_json(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(site, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [link["name"] for link in found["links"]] == ["n5", "z2", "n2", "z0|z1", "n1"]
    assert (found["nodes"], found["nodes_with_score"]) == (6, 3)


def test_show_of_a_file_that_is_not_there(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "scores.json").unlink()
    assert show(site) == 65
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "No such file" in told.err


@pytest.mark.parametrize(("seconds", "says"), [(0, "0 s"), (59.4, "59 s"), (200, "3 min"), (7200, "2 h"),
                                               (2e5, "2 d")])
def test_ages_as_people_say_them(seconds: float, says: str) -> None:
    assert link_table.format_age(seconds) == says
