"""`slurmdl topology` without a cluster: trees, SVG, findings, differences, conversions, features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slurmdl.cli.main import main
from slurmdl.topology import check, drawing, load
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import Topology

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


@pytest.mark.parametrize(("lines", "expected"), [(60, 54), (55, 54), (54, 11), (24, 11), (8, 7), (5, 4), (2, 4)])
def test_show_folds_no_more_than_needed(lines: int, expected: int) -> None:
    groups = load.load_topology("groups.conf")
    assert len(drawing.format_tree(groups, height=lines).splitlines()) == expected
    assert max(map(len, drawing.format_tree(groups, height=lines).splitlines())) <= 80
    data = {**groups.to_json(), "nodes": [*groups.nodes, "lost"], "leaf": [*groups.leaf.tolist(), -1]}
    assert drawing.format_tree(Topology.from_json(data)).splitlines()[-1] == "without a zone: 1 node  lost"
    assert [len(drawing.format_tree(tree_topology((n, n))).splitlines()) for n in (22, 23)] == [23, 2]  # of 24


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


@pytest.mark.parametrize(("name", "limits"), [("named", (15, 20_000)), ("dots", (14, 15)), ("counts", (4, 14))])
def test_svg(name: str, limits: tuple[int, ...], golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zones and nodes with names, as dots, and as counts of nodes; zones of uneven size, and nodes without one."""
    for limit, value in zip(("MAX_NAMED_NODES", "MAX_DOTS"), limits, strict=True):
        monkeypatch.setattr(drawing, limit, value)
    source = {**load.load_topology("odd.conf").to_json(), "name": "odd", "source": "a file with a name " * 9}
    source["nodes"], source["leaf"] = [*source["nodes"], "lost&found", "lost"], [*source["leaf"], -1, -1]
    source["zones"][0] = "a root whose name is longer than 24 characters"
    svg = drawing.draw_topology(Topology.from_json(source))
    ElementTree.fromstring(svg)
    golden(f"topology/{name}.svg", svg)


def test_svg_of_files(golden: Golden) -> None:
    topology("show", "topology.conf", "--svg=out.svg")
    golden("topology/example.svg", Path("out.svg").read_text())
    ElementTree.fromstring(drawing.draw_topology(load.load_topology("two.yaml", "none")))
    drawn = load.load_topology("leaves.conf")
    root = ElementTree.fromstring(drawing.draw_topology(drawn))
    titles = {(element.text or "").split(",")[0] for element in root.iter("{http://www.w3.org/2000/svg}title")}
    assert titles == {*drawn.nodes, *drawn.zones}
    assert 0.5 < float(root.attrib["width"]) / float(root.attrib["height"]) < 4


@pytest.mark.parametrize(("args", "status"), [
    (["bad.conf"], 65), (["bad.yaml"], 65), (["deep.conf"], 65), (["odd.conf"], 0), (["two.yaml"], 0),
    (["two.yaml", "--name=racks"], 0), (["missing.conf"], 65)])
def test_check(args: list[str], status: int, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    topology("check", *args, "--offline", status=status)
    golden(f"topology/check-{'-'.join(args).replace('--name=', '')}.txt", capsys.readouterr().out)


LEAVES = "".join(f"SwitchName={name} Nodes=n[{name}1-{name}2]\n" for name in "123")


@pytest.mark.parametrize(("text", "findings"), [
    (f"SwitchName={'a' * 64} Nodes=n[1-2]\n", []),
    ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-6]\nSwitchName=c Nodes=n[7-14]\nSwitchName=t Switches=a,b,"
     "c\n", []),
    ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[3-6]\nSwitchName=c Nodes=n[7-15]\nSwitchName=t Switches=a,b,c\n",
     ["note 0 a: one node only", "note 0 a,c: size far from the median, 4 nodes"]),
    (LEAVES.replace("\n", " LinkSpeed=10000\n") + "SwitchName=t Switches=1,2,3 LinkSpeed=5\n",
     ["warning 4 : LinkSpeed of 1 zone (5) is not used", "note 1 : LinkSpeed of 3 zones: ignored"]),
    (LEAVES + "SwitchName=m Switches=1,2\nSwitchName=t Switches=m,3\n",
     ["note 0 3: 1 level below the root, most leaves 2"]),
    ("".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(21)) + "SwitchName=s21 Nodes=n[1-2]\n", []),
    ("".join(f"SwitchName=s{i} Switches=s{i + 1},x{i}\nSwitchName=x{i} Nodes=x[{i}1-{i}2]\n" for i in range(22))
     + "SwitchName=s22 Nodes=n[1-2]\n", ["error 1 : Slurm does not find the level of 's0' in 21 passes"]),
    ("RingName=r Nodes=n[1-17]\n", ["error 1 : ring of 17 nodes; expected at most 16", "note 0 each ring"]),
    ("RingName=r Nodes=n[1-16]\n", ["note 0 each ring is one zone"]),
    ("SwitchName=a\nSwitchName=b Switches=a\n", ["error 0 x.conf: no zone has a node", "warning 0 x.conf:1: a is"]),
    (LEAVES + "SwitchName=t Switches=1,a\nSwitchName=u Switches=2,3,x,y\n",
     ["error 4 : a below 't' is not declared", "error 5 : x,y below 'u' are not declared",
      "warning 0 x.conf: no switch reaches all nodes; no job can span the roots t,u"]),
    ("BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n[5-7]\n",
     ["error 2 : block 'b' has 3 nodes; expected at least 4"]),
])
def test_findings(text: str, findings: list[str]) -> None:
    Path("x.conf").write_text(text)
    declared = load.load_declarations("x.conf", pytest.fail)[0]
    found = [f"{each.severity} {each.line} " + re.sub(r"^x\.conf:\d+: '.*?'(?=: )", "", each.text)
             for each in check.sort_findings(check.check_declarations(declared))]
    assert [text[:len(expected)] for text, expected in zip(found, findings, strict=True)] == findings


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


B12, B21 = ("".join(f"BlockName=b{i} Nodes=n[{i}1-{i}2]\n" for i in order) + "BlockSizes=2\n"
            for order in ("12", "21"))


@pytest.mark.parametrize(("left", "right", "lines"), [
    (FILES["odd.conf"], FILES["odd.conf"], []),
    (B12, B21, ["order of blocks: number 1 is b1 in left, b2 in right"]),
    (B12, "BlockName=b1 Nodes=n[11-12]\n", ["zone b2: only in left", "nodes n[21-22] (2): only in left"]),
    (B12, "SwitchName=b1 Nodes=n[11-12]\nSwitchName=b2 Nodes=n[21-22]\n", ["kind: block in left, tree in right"]),
    ("SwitchName=s1 Nodes=n1 LinkSpeed=50000\nSwitchName=s2 Nodes=n2\n",
     "SwitchName=s1 Nodes=n1 LinkSpeed=100000\nSwitchName=s2 Nodes=n2 LinkSpeed=7\n",
     ["zone s1: 50 Gbit/s in left, 100 Gbit/s in right"]),
    (FILES["two.yaml"], FILES["two.yaml"].replace("wires", "cables").replace("n[3-4]", "n[3,5]"),
     ["topology wires: only in left", "topology cables: only in right", "racks: node n4: only in left",
      "racks: node n5: only in right"]),
    (FILES["two.yaml"], FILES["two.yaml"].replace("  cluster_default: yes\n", ""),
     ["default topology: racks in left, wires in right"]),
])
def test_diff(left: str, right: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("left", left), ("right", right)):
        Path(name).write_text(text)
    topology("diff", "left", "right", status=int(bool(lines)))
    assert capsys.readouterr().out.splitlines() == [
        *lines, f"{len(lines)} difference{'s' * (len(lines) != 1)} between left and right"]


def test_diff_of_examples(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("other.conf").write_text("SwitchName=zoneA Nodes=n[1,3,5]\nSwitchName=zoneC Nodes=n[2,4,6-7,9]\n"
                                  "SwitchName=core Switches=zoneA,mid\nSwitchName=mid Switches=zoneC\n")
    topology("diff", "topology.conf", "other.conf", status=1)
    golden("topology/diff.txt", capsys.readouterr().out)
    topology("diff", "topology.conf", "two.yaml", status=1)
    assert "topology default: only in topology.conf\n" in capsys.readouterr().out


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


def test_features_reject_lists_of_different_lengths_and_invalid_names(capsys: pytest.CaptureFixture[str]) -> None:
    Path("slurm.conf").write_text("# nodes\nNodeName=n[1-4] NodeAddr=10.0.0.[1-3]\n")
    topology("features", "topology.conf", "--slurm-conf=slurm.conf", status=65)
    assert "slurm.conf:2: 'NodeName=n[1-4] NodeAddr=10.0.0.[1-3]': NodeAddr has 3 values for 4 nodes" in \
        capsys.readouterr().err
    Path("odd.conf").write_text("SwitchName=a&b Nodes=n1\n")
    topology("features", "odd.conf", "--slurm-conf=slurm.conf", status=65)
    assert "'a&b': not a valid feature" in capsys.readouterr().err
