"""topology.yaml of Slurm 25.05 and newer: valid and rejected input, and the controller's dump of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmdl.errors import InputError
from slurmdl.slurm.output import split_output
from slurmdl.topology import load, scontrol_topology
from slurmdl.topology.topology import TopologySet

TREE = "topology: t\ntree: {switches: [{switch: s1, nodes: 'n[1-2]'}]}\n"


def parsed(tmp_path: Path, text: str) -> TopologySet:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    return load.load_topology_file(str(path))


def test_several_topologies(tmp_path: Path) -> None:
    several = parsed(tmp_path, """\
# two fabrics and none
---
- topology: fabric
  tree:
    switches:
    - switch: top
      children: s[1-2]
    - {switch: s2, nodes: "n[09-10]"}
    - switch: s1
      nodes: n[07-08]
- topology: nvlink
  cluster_default: yes
  block:
    block_sizes: [2, 4]
    blocks: [{block: b1, nodes: "n[07-08]"}, {block: b2, nodes: "n[09-10]"}, {block: b3, nodes: "n[11-12]"}]
- topology: plain
  cluster_default: true
  flat: true
""")
    assert (several.names, several.default) == (("fabric", "nvlink", "plain"), "nvlink")
    fabric, nvlink, plain = several.topologies
    assert (fabric.kind, fabric.path_of("n10"), fabric.level.tolist()) == ("tree", ("top", "s2"), [1, 0, 0])
    assert (nvlink.kind, nvlink.block_sizes) == ("block", (2, 4))
    assert nvlink.zones == ("b1", "b2", "b3", "b[1-2]")
    assert (nvlink.path_of("n08"), nvlink.path_of("n11")) == (("b[1-2]", "b1"), ("b3",))
    assert (plain.kind, plain.zones, plain.notes) == ("flat", (), ())


def test_one_map_instead_of_a_list(tmp_path: Path) -> None:
    several = parsed(tmp_path, TREE)
    assert (several.names, several.get().nodes) == (("t",), ("n1", "n2"))


def test_every_scalar_is_a_string(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "topology: 0x10\ntree: {switches: [{switch: 0012, nodes: 'on,1e3,~'}, "
                                "{switch: yes, children: 0012}, {switch: null, nodes: }]}\n").get()
    assert (topology.name, topology.zones, topology.nodes) == ("0x10", ("0012", "yes", "null"), ("on", "1e3", "~"))


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on"])
def test_words_for_true(tmp_path: Path, word: str) -> None:
    assert parsed(tmp_path, f"- topology: a\n  flat: on\n- topology: b\n  cluster_default: {word}\n  flat: t\n"
                  ).default == "b"


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off"])
def test_words_for_false(tmp_path: Path, word: str) -> None:
    several = parsed(tmp_path, f"- topology: a\n  flat: on\n- topology: b\n  cluster_default: {word}\n"
                               f"  flat: {word}\n  tree: {{switches: [{{switch: s, nodes: n}}]}}\n")
    assert (several.default, several.get("b").kind) == ("a", "tree")


def test_unknown_fields_are_noted(tmp_path: Path) -> None:
    topology = parsed(tmp_path, "topology: t\nrail: 3\ntree:\n  switches:\n  - switch: s1\n    nodes: n1\n"
                                "    speed: 9\n").get()
    assert topology.nodes == ("n1",)
    assert [note.split(";")[0] for note in topology.notes] == [
        f"{tmp_path}/topology.yaml:2: unknown field 'rail' of a topology is ignored",
        f"{tmp_path}/topology.yaml:7: unknown field 'speed' of a switch is ignored"]


def test_empty_maps_of_unused_kinds(tmp_path: Path) -> None:
    text = TREE + "block: {block_sizes: [], blocks: []}\nring: {}\ntorus3d:\nflat: false\n"
    assert parsed(tmp_path, text).get().kind == "tree"


@pytest.mark.parametrize(("text", "nodes"), [
    ("ring: {rings: [{ring: r1, nodes: 'n[1-4]'}]}", ("n1", "n2", "n3", "n4")),
    ("torus3d: {toruses: [{torus: r1, dims: {x: 2, y: 1, z: 1}, nodes: 'n[1-2]'}]}", ("n1", "n2")),
    ("torus3d: {toruses: [{name: r1, regions: [{nodes: n1}, {nodes: n2}]}]}", ("n1", "n2")),
])
def test_rings_and_tori_are_one_zone_each(tmp_path: Path, text: str, nodes: tuple[str, ...]) -> None:
    topology = parsed(tmp_path, f"topology: t\n{text}\n").get()
    assert (topology.zones, topology.level.tolist(), topology.nodes) == (("r1",), [0], nodes)
    assert "one zone" in topology.notes[0]


@pytest.mark.parametrize(("text", "line", "expected"), [
    ("- &a\n  topology: t\n  flat: true\n- *a\n", 4, "aliases"),
    ("topology: t\ntree:\n  switches:\n  - switch: s1\n    nodes: [n1, n2]\n", 5, "hostlist as one string"),
    ("topology: t\ntree:\n  switches:\n  - switch: s1\n    nodes: {a: 1}\n", 5, "hostlist as one string"),
    ("topology: t\ntree:\n  switches:\n  - switch: s1\n    nodes: n[3-1]\n", 5, "low bound"),
    ("topology: t\ntree:\n  switches:\n  - nodes: n1\n", 4, "no name"),
    ("topology: t\ntree:\n  switches:\n  - switch: a\n    nodes: n1\n    children: b\n", 4, "both nodes and"),
    ("topology: t\ntree:\n  switches:\n  - switch: a\n    children: b\n", 4, "not declared"),
    ("topology: t\ntree:\n  switches:\n  - {switch: a, nodes: n}\n  - {switch: a, nodes: m}\n", 5, "twice"),
    ("topology: t\ntree:\n  switches:\n  - {switch: a, children: b}\n  - {switch: b, children: a}\n", 4,
     "above itself"),
    ("topology: t\ntree: {switch: a}\n", 2, "expected a list `switches`"),
    ("topology: t\ntree: {switches: {switch: a}}\n", 2, "expected a list"),
    ("topology: t\ntree: [a]\n", 2, "expected a map"),
    ("topology: t\n", 1, "exactly one of"),
    ("topology: t\nflat: true\ntree: {switches: [{switch: a, nodes: n}]}\n", 1, "tree and flat"),
    ("tree: {switches: []}\n", 1, "without a name"),
    ("topology: t\nflat: perhaps\n", 2, "expected one of y, yes"),
    ("- topology: t\n  flat: true\n- topology: t\n  flat: true\n", 3, "declared twice"),
    ("topology: t\nblock:\n  block_sizes: [4, 12]\n  blocks: [{block: b, nodes: 'n[1-4]'}]\n", 3, "power of two"),
    ("topology: t\nblock:\n  block_sizes: [x]\n  blocks: [{block: b, nodes: 'n[1-4]'}]\n", 3, "numbers of nodes"),
    ("topology: t\nblock:\n  block_sizes: [4]\n  blocks:\n  - {block: b, nodes: 'n[1-3]'}\n", 5, "at least 4"),
    ("? [a]\n: b\n", 1, "string as key"),
    ("topology: t\nflat: true\n---\ntopology: u\n", 4, "second document"),
    ("topology: t\n flat: true\n", 2, "is not YAML"),
    ("a: [1\n", 2, "is not YAML"),
    ("[" * 100, 1, "nested deeper"),
    ("just words\n", 1, "expected a map"),
])
def test_rejected_input_names_file_and_line(tmp_path: Path, text: str, line: int, expected: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(tmp_path, text)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/topology.yaml:{line}: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(("text", "expected"), [("", "declares no topology"), ("[]\n", "declares no topology"),
                                            ("# nothing\n", "declares no topology")])
def test_empty_file_is_rejected(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        parsed(tmp_path, text)


def test_too_many_names_in_total_are_rejected(tmp_path: Path) -> None:
    switches = "".join(f"  - {{switch: s{i}, nodes: 'a{i}x[0-65535]'}}\n" for i in range(5))
    with pytest.raises(InputError, match="more than 262144 names"):
        parsed(tmp_path, f"topology: t\ntree:\n  switches:\n{switches}")


def test_controller_dump() -> None:
    """The output of `show topoconf` between outputs of other commands."""
    dump = "---\n- topology: a\n  cluster_default: false\n  flat: true\n" + "".join(
        f"  {line}" if i else f"- {line}" for i, line in enumerate(TREE.splitlines(keepends=True)))
    topologies = scontrol_topology.read_topologies(split_output(
        f"scontrol: show topoconf\n{dump}scontrol: show topology\nSwitchName=x Nodes=n1\n"))
    assert (topologies.names, topologies.get("t").zones, topologies.topologies[0].source) == (
        ("a", "t"), ("s1",), "scontrol show topoconf")


def test_controller_dump_of_empty_kinds() -> None:
    """26.05.5 prints it with a topology.conf; `show topology` has the zones."""
    assert_one_topology_of_show_topology(
        "scontrol: show topoconf\n%YAML 1.1\n---\n- topology: default\n"
        "  cluster_default: false\n  block: {}\n  flat: {}\n  tree: {}\n...\n"
        "scontrol: show topology\nSwitchName=x Level=0 LinkSpeed=1 Nodes=n[1-2]\n")


def test_output_without_show_topoconf() -> None:
    assert_one_topology_of_show_topology("SwitchName=x Level=0 LinkSpeed=1 Nodes=n[1-2]\n")


def assert_one_topology_of_show_topology(output: str) -> None:
    topologies = scontrol_topology.read_topologies(split_output(output))
    topology = topologies.get()
    assert topologies.names == ("default",)
    assert (topology.nodes, topology.source) == (("n1", "n2"), "scontrol show topology")
