"""`slurmdl topology` without a cluster: trees, SVG, findings, differences, conversions, features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slurmdl.cli.main import main
from slurmdl.topology import load
from slurmdl.topology.drawing import MAX_DOTS, draw_topology, svg_document
from slurmdl.topology.topology import Topology
from slurmdl.topology.write import checked_hostlist

ROOT = Path(__file__).parents[2]
Golden = Callable[[str, str], None]

FILES = {
    "leaves.conf": "".join(f"SwitchName=zone{i:03d} Nodes=n[{i * 20:05d}-{i * 20 + 19:05d}]\n" for i in range(500))
                   + "SwitchName=root Switches=zone[000-499]\n",
    "groups.conf": "".join(f"SwitchName=leaf{i:02d} Nodes=n[{i * 4}-{i * 4 + 3 - (i > 40)}] LinkSpeed=200000\n"
                           for i in range(48))
                   + "".join(f"SwitchName=group{i} Switches=leaf[{i * 12:02d}-{i * 12 + 11:02d}]\n" for i in range(4))
                   + "SwitchName=root Switches=group[0-3]\n",
    "odd.conf": "SwitchName=root Switches=mid,s0\nSwitchName=mid Switches=s[1-2]\nSwitchName=s0 Nodes=a[1-9]\n"
                "SwitchName=s1 Nodes=b\nSwitchName=s2\nSwitchName=alone Nodes=c[1-3]\n",
    "two.yaml": "- topology: wires\n  tree:\n    switches:\n    - switch: s1\n      nodes: n[1-2]\n"
                "    - {switch: top, children: s1}\n"
                "- topology: racks\n  cluster_default: yes\n  block:\n    block_sizes: [2, 4]\n    blocks:\n"
                "    - {block: b1, nodes: 'n[1-2]'}\n    - {block: b2, nodes: 'n[3-4]'}\n"
                "- topology: none\n  flat: true\n",
    "bad.conf": "SwitchName=s1 Nodes=n[1-3] LinkSpeed=100\nSwitchName=s1 Nodes=n4\nSwitchName=s2 Node=x\n"
                "SwitchName=s3 \\\n  Nodes=n[3-40]\nSwitchName=top Switches=s1,s[8-9]\nSwitchName=a Switches=b\n"
                "SwitchName=b Switches=a,s3\nSwitchName=self Switches=self\nSwitchName=above Switches=a\n"
                "SwitchName=q Nodes=n[5-1]\nSwitchName=both Nodes=n7 Switches=s1\n"
                f"SwitchName={'long' * 17} Nodes=n50\n",
    "warned.conf": "SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n[4-6],x9\nSwitchName=s3 Nodes=n7\n"
                   "SwitchName=left Switches=s[1-2]\nSwitchName=right Switches=s[2-3]\n",
    "bad.yaml": "- topology: t\n  tree:\n    switches:\n    - switch: s1\n      nodes: [n1, n2]\n"
                "    - {switch: s2, nodes: 'n[2-1]'}\n    - {switch: s3, nodes: n3, speed: 7}\n"
                "- topology: t\n  block: {blocks: []}\n- topology: u\n",
    "deep.conf": "".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(23)) + "SwitchName=s23 Nodes=n[1-2]\n",
    "slurm.conf": "ClusterName=x\nNodeName=DEFAULT CPUs=2 Features=fast\ninclude nodes.conf\n"
                  "PartitionName=main Nodes=ALL\n",
    "nodes.conf": 'NodeName=n[1-4] \\\n  NodeAddr=10.0.0.[1-4] Port=[7001-7004] Reason="a b=c" # four\n'
                  "nodename=n[5,7] feature=zoneA,big Gres=gpu:2\nNodeName=n6,n8 Features=zoneB\nNodeName=login\n",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide the files above and the examples in the current directory, no cluster, a default terminal."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for path in (ROOT / "topology/topology.conf", ROOT / "examples/cluster.json"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "elsewhere" / "slurm.conf"))
    monkeypatch.setenv("PATH", "")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def topology(*args: str, status: int = 0) -> None:
    assert main(["topology", *args]) == status


@pytest.mark.parametrize("file", ["topology.conf", "leaves.conf", "groups.conf", "odd.conf", "two.yaml"])
def test_show(file: str, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("show", file)
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    golden(f"topology/show-{file}.txt", out)


def test_documentation_shows_output_of_show(capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    topology("show", "topology/leonardo.conf")
    assert capsys.readouterr().out in Path("docs/topology.md").read_text()


@pytest.mark.parametrize(("lines", "expected"), [(60, 54), (24, 11), (8, 7), (5, 4)])
def test_show_folds_no_more_than_needed(lines: int, expected: int, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", str(lines))
    topology("show", "groups.conf")
    assert len(capsys.readouterr().out.splitlines()) == expected


def test_show_all_neither_truncates_nor_folds(capsys: pytest.CaptureFixture[str]) -> None:
    topology("show", "leaves.conf", "--all")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 502
    assert out[2].split() == ["zone000", "20", "nodes", "n[00000-00019]"]


def test_show_one_of_several_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    topology("show", "two.yaml", "--json", "--name=wires")
    assert Topology.from_json(json.loads(capsys.readouterr().out)).zones == ("s1", "top")
    topology("show", "two.yaml", "--json")
    (Path("all.json")).write_text(capsys.readouterr().out)
    topology("diff", "two.yaml", "all.json")


def test_svg_of_example(golden: Golden) -> None:
    topology("show", "topology.conf", "--svg=out.svg")
    svg = Path("out.svg").read_text()
    ElementTree.fromstring(svg)
    golden("topology/example.svg", svg)


@pytest.mark.parametrize(("file", "names"), [("leaves.conf", 10_000), ("odd.conf", 13)])
def test_svg_has_title_of_every_zone_and_node(file: str, names: int) -> None:
    drawn = load.load_topology(file)
    root = ElementTree.fromstring(draw_topology(drawn))
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert set(drawn.nodes) <= set(titles)
    assert len(set(drawn.nodes)) == names
    assert {title.split(",")[0] for title in titles} >= set(drawn.zones)
    assert 0.5 < float(root.attrib["width"]) / float(root.attrib["height"]) < 4


def test_svg_long_heading_wraps_and_moves_elements() -> None:
    short, long = (ElementTree.fromstring(svg_document(heading, 480, 200, ['<rect id="below"/>']))
                   for heading in ("one line", "no choice: " + "a reason that is too long for a line, " * 4))
    name = "{http://www.w3.org/2000/svg}"
    lines = [element.text or "" for element in long.iter(f"{name}text")]
    assert len(lines) > 2 and all(len(line) * 9.5 <= 480 - 36 for line in lines)
    added = 20 * (len(lines) - 1)
    assert float(long.attrib["height"]) == float(short.attrib["height"]) + added
    moved = next(iter(long.iter(f"{name}g")))
    assert moved.attrib["transform"] == f"translate(0 {added})" and moved[0].attrib["id"] == "below"
    assert next(iter(short.iter(f"{name}g")), None) is None


def test_svg_shows_node_without_zone() -> None:
    flat = load.load_topology("two.yaml", "none")
    data = {**load.load_topology("topology.conf").to_json(), "nodes": ["n1", "lost"], "leaf": [0, -1]}
    assert "no zone" in draw_topology(Topology.from_json(data))
    assert "lost" in draw_topology(Topology.from_json(data))
    ElementTree.fromstring(draw_topology(flat))


def test_svg_of_many_nodes_shows_node_counts() -> None:
    count = MAX_DOTS + 1
    Path("many.conf").write_text(f"SwitchName=s1 Nodes=n[1-{count}]\n")
    assert f">{count:,} nodes<" in draw_topology(load.load_topology("many.conf"))


@pytest.mark.parametrize(("args", "status"), [
    (["bad.conf"], 65), (["bad.yaml"], 65), (["deep.conf"], 65), (["odd.conf"], 0), (["two.yaml"], 0),
    (["two.yaml", "--name=racks"], 0), (["missing.conf"], 65)])
def test_check(args: list[str], status: int, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("check", *args, "--offline", status=status)
    golden(f"topology/check-{'-'.join(args).replace('--name=', '')}.txt", capsys.readouterr().out)


def test_check_against_the_nodes_of_the_cluster(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("check", "topology.conf", "--cluster=cluster.json", "--strict")
    assert capsys.readouterr().out == "0 errors, 0 warnings, 0 notes in 3 zones\n"
    topology("check", "warned.conf", "--cluster=cluster.json")
    golden("topology/check-warned.conf.txt", capsys.readouterr().out)
    topology("check", "warned.conf", "--cluster=cluster.json", "--strict", status=65)


def test_check_against_other_cluster_stays_short(capsys: pytest.CaptureFixture[str]) -> None:
    topology("check", "leaves.conf", "--cluster=cluster.json")
    out = capsys.readouterr().out
    assert "leaves.conf:20: 'SwitchName=zone019 Nodes=n[00380-00399]': n[00380-00399]: unknown" in out
    assert "warning: n[00400-09999]: 9,600 nodes of further zones, unknown to the cluster\n" in out
    assert len(out.splitlines()) == 23


def test_check_reports_missing_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    topology("check", "topology.conf")
    assert "not compared with the cluster (scontrol: No such file" in capsys.readouterr().out


def test_diff_of_two_files(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("diff", "topology.conf", "topology.conf")
    assert capsys.readouterr().out == "0 differences between topology.conf and topology.conf\n"
    Path("other.conf").write_text("SwitchName=zoneA Nodes=n[1,3,5]\nSwitchName=zoneC Nodes=n[2,4,6-7,9]\n"
                                  "SwitchName=core Switches=zoneA,mid\nSwitchName=mid Switches=zoneC\n")
    topology("diff", "topology.conf", "other.conf", status=1)
    golden("topology/diff.txt", capsys.readouterr().out)


def test_diff_of_blocks_and_of_several_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.conf").write_text("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n")
    Path("b.conf").write_text("BlockName=b2 Nodes=n[3-4]\nBlockName=b1 Nodes=n[1-2]\nBlockSizes=2\n")
    topology("diff", "a.conf", "b.conf", status=1)
    assert capsys.readouterr().out.startswith("order of blocks: number 1 is b1 in a.conf, b2 in b.conf\n")
    Path("one.yaml").write_text(FILES["two.yaml"].replace("wires", "cables").replace("n[3-4]", "n[3,5]"))
    topology("diff", "two.yaml", "one.yaml", status=1)
    out = capsys.readouterr().out
    assert "topology wires: only in two.yaml\ntopology cables: only in one.yaml\n" in out
    assert "racks: node n4: only in two.yaml\n" in out
    topology("diff", "topology.conf", "two.yaml", status=1)
    assert "topology default: only in topology.conf\n" in capsys.readouterr().out


def test_diff_of_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.conf").write_text("SwitchName=s1 Nodes=n1 LinkSpeed=50000\nSwitchName=s2 Nodes=n2\n")
    Path("b.conf").write_text("SwitchName=s1 Nodes=n1 LinkSpeed=100000\nSwitchName=s2 Nodes=n2 LinkSpeed=7\n")
    topology("diff", "a.conf", "b.conf", status=1)
    assert capsys.readouterr().out.splitlines() == [
        "zone s1: 50 Gbit/s in a.conf, 100 Gbit/s in b.conf", "1 difference between a.conf and b.conf"]


@pytest.mark.parametrize(("args", "golden_name"), [
    (["groups.conf", "--format=conf"], "groups.conf"), (["odd.conf", "--format=yaml"], "odd.yaml"),
    (["two.yaml", "--format=yaml"], "two.yaml"), (["two.yaml", "--format=conf"], "two.conf")])
def test_convert(args: list[str], golden_name: str, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("convert", *args)
    text, losses = capsys.readouterr()
    golden(f"topology/convert-{golden_name}", text)
    golden(f"topology/convert-{golden_name}.lost.txt", losses)
    Path(golden_name).write_text(text)
    before, after = load.load_topology(args[0]), load.load_topology(golden_name)
    assert {**before.to_json(), "source": "", "name": "", "notes": 0} == \
        {**after.to_json(), "source": "", "name": "", "notes": 0}


def test_convert_rejects_unrepresentable_topology(capsys: pytest.CaptureFixture[str]) -> None:
    topology("convert", "two.yaml", "--name=none", "--format=conf", status=65)
    assert "flat: not valid in a topology.conf; expected tree, block, ring" in capsys.readouterr().err
    data = {**load.load_topology("topology.conf").to_json(), "zones": ["a b", "zoneB", "core"]}
    Path("odd.json").write_text(json.dumps(data))
    topology("convert", "odd.json", "--format=yaml", "--output=out.yaml", status=65)
    assert "'a b': not valid in a hostlist" in capsys.readouterr().err
    assert not Path("out.yaml").exists()


@pytest.mark.parametrize(("names", "expected"), [
    ("n1 n2 n3", "n[1-3]"), ("n3 n1 n2", "n[3,1-2]"), ("n1 n1", "n[1,1]"), ("n9 n10", "n[9-10]"),
    ("n09 n10 n11", "n[09-11]"), ("n08 n9 n10", "n[08,9-10]"), ("a1 b1 a2", "a1,b1,a2"),
    ("n1-ib n2-ib", "n1-ib,n2-ib"),
    ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"), ("login", "login"), ("007 008", "[007-008]"), ("", "")])
def test_hostlists_keep_order_and_repeats(names: str, expected: str) -> None:
    assert checked_hostlist(names.split()) == expected


def test_features_in_the_lines_of_slurm_conf(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("features", "topology.conf", "--slurm-conf=slurm.conf")
    golden("topology/features.conf", capsys.readouterr().out)


def test_features_of_all_levels_and_without_slurm_conf(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = json.loads(Path("cluster.json").read_text())
    cluster["nodes"][0]["features"] = ["big"]
    Path("cluster.json").write_text(json.dumps(cluster))
    topology("features", "topology.conf", "--cluster=cluster.json", "--all-levels")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "NodeName=n1 Features=big,zoneA,core", "NodeName=n[3,5,7] Features=zoneA,core",
        "NodeName=n[2,4,6,8] Features=zoneB,core"]
    topology("features", "topology.conf", "--cluster=cluster.json", "--scontrol")
    assert capsys.readouterr().out.splitlines()[0] == "scontrol update NodeName=n1 AvailableFeatures=big,zoneA"


@pytest.mark.parametrize(("args", "status", "expected"), [
    (["show", "missing"], 65, "cannot be read"),
    (["show", "two.yaml", "--name=three"], 65, "expected one of wires, racks, none"),
    (["show", "topology.conf", "--svg=/nowhere/a.svg"], 64, "cannot be written"), (["show"], 69, "scontrol"),
    (["diff"], 64, "expected FILE"), (["diff", "topology.conf"], 69, "scontrol"),
    (["diff", "bad.conf"], 65, "bad.conf:3"),
    (["convert", "topology.conf"], 64, "--format"), (["convert", "topology.conf", "--format=xml"], 64, "conf"),
    (["features", "topology.conf"], 69, "scontrol"),
    (["features", "topology.conf", "--slurm-conf=x"], 65, "x: cannot"),
    (["check", "two.yaml", "--name=three", "--offline"], 64, "expected one of wires, racks, none"),
    (["check", "topology.conf", "--cluster=missing"], 65, "missing: cannot be read"), (["lint"], 64, "valid"),
])
def test_invalid_input_is_rejected(args: list[str], status: int, expected: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    topology(*args, status=status)
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_features_reject_lists_of_different_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    Path("slurm.conf").write_text("# nodes\nNodeName=n[1-4] NodeAddr=10.0.0.[1-3]\n")
    topology("features", "topology.conf", "--slurm-conf=slurm.conf", status=65)
    assert "slurm.conf:2: 'NodeName=n[1-4] NodeAddr=10.0.0.[1-3]': NodeAddr has 3 values for 4 nodes" in \
        capsys.readouterr().err


def test_features_reject_invalid_zone_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.conf").write_text("SwitchName=a&b Nodes=n1\n")
    topology("features", "odd.conf", "--slurm-conf=slurm.conf", status=65)
    assert "'a&b': not a valid feature" in capsys.readouterr().err
