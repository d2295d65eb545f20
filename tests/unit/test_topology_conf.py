"""topology.conf: valid and rejected input."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmdl.errors import InputError
from slurmdl.slurm.output import split_output
from slurmdl.topology import drawing, load, scontrol_topology, topology_conf
from slurmdl.topology.topology import Topology

DATA = Path(__file__).parent / "data"
EXAMPLE = Path(__file__).parents[2] / "topology" / "topology.conf"


def parsed(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "topology.conf"
    path.write_text(text)
    return topology_conf.declare_topology_conf(str(path)).to_topology()


def test_the_example() -> None:
    topology = topology_conf.declare_topology_conf(str(EXAMPLE)).to_topology()
    assert topology.zones == ("zoneA", "zoneB", "core")
    assert topology.level.tolist() == [0, 0, 1]
    assert topology.path_of("n3") == ("core", "zoneA")
    assert topology.path_of("n4") == ("core", "zoneB")
    assert topology.path_of("elsewhere") == ()


def test_lexical_rules(tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text("SwitchName=s2 Nodes=n[3-4]\n")
    topology = parsed(tmp_path, "\n".join([
        "# a comment",
        'switchname = s1 NODES="n1, n2" linkspeed=0x2710  # a comment',
        "Include more.conf",
        "SwitchName=top Swit\\",
        "ches=s1,s2 LinkSpeed=1",
        "SwitchName=s3 Nodes=a Nodes=n5", ""]))
    assert topology.zones == ("s1", "s2", "top", "s3")
    assert topology.nodes == ("n1", "n2", "n3", "n4", "n5")
    assert topology.parent.tolist() == [2, 2, -1, -1]
    assert topology.uplink_bandwidth.tolist()[0] == 1.25e9
    assert all(speed != speed for speed in topology.uplink_bandwidth.tolist()[1:])


def test_levels_of_uneven_tree_with_forward_reference(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "SwitchName=root Switches=mid,leaf0\nSwitchName=mid Switches=leaf[1-2]\n"
                                "SwitchName=leaf0 Nodes=a\nSwitchName=leaf1 Nodes=b\nSwitchName=leaf2 Nodes=c\n")
    assert topology.level.tolist() == [2, 1, 0, 0, 0]
    assert topology.path_of("b") == ("root", "mid", "leaf1")


def test_a_node_on_two_leaves_belongs_to_the_first(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "SwitchName=s1 Nodes=n1\nSwitchName=s2 Nodes=n[1-2]\n")
    assert topology.leaf_of("n1") == "s1"
    assert topology.leaf_of("n2") == "s2"


def test_several_roots_and_an_empty_leaf(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "SwitchName=s1 Nodes=a\nSwitchName=s2 Nodes=b\nSwitchName=s3\n")
    assert topology.parent.tolist() == [-1, -1, -1]
    assert topology.node_count.tolist() == [1, 1, 0]
    assert topology.notes == (f"{tmp_path}/topology.conf:3: s3 is empty; Slurm before 25.05 rejects it",)


def test_multiplying_includes_are_rejected(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.conf").write_text(f"Include {i + 1}.conf\n" * 2)
    (tmp_path / "20.conf").write_text("# the end\n")
    with pytest.raises(InputError, match="at most 1024 files"):
        parsed(tmp_path, "Include 0.conf\n")


def test_blocks(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n")
    assert (topology.kind, topology.zones, topology.level.tolist()) == ("block", ("b1", "b2", "b[1-2]"), [0, 0, 1])
    assert topology.block_sizes == (2, 4)


@pytest.mark.parametrize(("text", "line", "says"), [
    ("SwitchName=s1 Nodes=n1\nSwitchName=s1 Nodes=n2\n", 2, "declared twice"),
    ("SwitchName=top Switches=s1\n", 1, "not declared"),
    ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, "above itself"),
    ("SwitchName=a Switches=a\n", 1, "above itself"),
    ("SwitchName=s1 Nodes=n1\nSwitchName=s2 Nodes=n2 Switches=s1\n", 2, "both Nodes and Switches"),
    ("\n\nSwitchName=s1 Node=n1\n", 3, "expected one of SwitchName"),
    ("SwitchName=s1 Nodes=n1 fast\n", 1, "KEY=VALUE"),
    ("SwitchName=s1 Nodes=n[1-\n", 1, "bracket"),
    ("SwitchName=s1 Nodes=n[5-1]\n", 1, "low bound"),
    ("SwitchName=s1 Nodes=switch{x}\n", 1, "controller"),
    ("SwitchName=s1 Nodes=n1 LinkSpeed=fast\n", 1, "integer"),
    ("SwitchName=\"\" Nodes=n1\n", 1, "expected a name"),
    ("Nodes=n1\n", 1, "first key"),
    ("BlockName=b1\n", 1, "without Nodes"),
    ("BlockName=b1 Nodes=n1\nBlockSizes=some\n", 2, "numbers of nodes"),
    ("BlockName=b1 Nodes=n1 LinkSpeed=3\n", 1, "not valid for BlockName"),
    ("# a\nSwitchName=s1 \\\n  Nodes=n1 Bogus=2\n", 2, "unknown key"),
])
def test_rejected_line_names_file_line_and_text(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(tmp_path, text)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/topology.conf:{line}: ")
    assert says in message
    assert error.value.text
    assert "\n" not in message


@pytest.mark.parametrize(("text", "says"), [
    ("", "declares no zone"), ("# nothing\n", "declares no zone"),
    ("SwitchName=s1 Nodes=n1\nBlockName=b1 Nodes=n1\n", "SwitchName and BlockName; expected a tree, blocks or rings"),
    ("Include topology.conf\n", "includes itself"), ("Include missing.conf\n", "cannot be read"),
])
def test_rejected_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parsed(tmp_path, text)


def test_controller_output_equals_file(tmp_path: Path) -> None:
    output = split_output((DATA / "scontrol-22.05.8.txt").read_text())
    from_controller = scontrol_topology.read_topologies(output).get()
    from_file = parsed(tmp_path, "SwitchName=zoneA Nodes=n[1,3,5,7] LinkSpeed=10\n"
                                 "SwitchName=zoneB Nodes=n[2,4,6,8,9]\nSwitchName=core Switches=zoneA,zoneB\n")
    assert {**from_controller.to_json(), "source": ""} == {**from_file.to_json(), "source": ""}


def test_controller_output_without_zone_is_rejected() -> None:
    with pytest.raises(InputError, match="no zone"):
        scontrol_topology.read_topologies(split_output("scontrol: show topology\nscontrol: \n"))


def test_file_next_to_slurm_conf_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert load.load_slurm_topology_file() is None
    (tmp_path / "topology.conf").write_text("SwitchName=s1 Nodes=n1\n")
    topologies = load.load_slurm_topology_file()
    assert topologies is not None
    assert topologies.get().zones == ("s1",)
    (tmp_path / "topology.yaml").write_text("topology: new\ntree: {switches: [{switch: s2, nodes: n2}]}\n")
    topologies = load.load_slurm_topology_file()
    assert topologies is not None
    assert (topologies.default, topologies.get("new").zones) == ("new", ("s2",))


def test_json_round_trip(tmp_path: Path) -> None:
    topology = topology_conf.declare_topology_conf(str(EXAMPLE)).to_topology()
    restored = Topology.from_json(topology.to_json())
    assert restored.to_json() == topology.to_json()


def test_text_tree() -> None:
    topology = topology_conf.declare_topology_conf(str(EXAMPLE)).to_topology()
    assert drawing.format_tree(topology).splitlines()[1:] == [
        "core     8 nodes", "  zoneA  4 nodes  n[1,3,5,7]", "  zoneB  4 nodes  n[2,4,6,8]"]
