"""The example clusters in topology/ and their generator."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from slurmdl.cli.main import main
from slurmdl.errors import UsageError
from slurmdl.topology import example, load

FOLDER = Path(__file__).parents[2] / "topology"
COMMAND_PREFIX = "# made by: slurmdl topology example "


@pytest.mark.parametrize("path", [path for path in sorted(FOLDER.glob("*.conf")) if COMMAND_PREFIX in path.read_text()],
                         ids=lambda path: path.name)
def test_example_files_equal_generator_output(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, _, body = path.read_text().partition(COMMAND_PREFIX)
    arguments, _, body = body.partition("\n")
    assert head.startswith("# ")
    assert main(["topology", "example", *shlex.split(arguments)]) == 0
    assert capsys.readouterr().out == body


@pytest.mark.parametrize(("name", "zones", "nodes"), [
    ("topology.conf", [2, 1], 8), ("three-level.conf", [16, 4, 1], 256), ("blocks.conf", [40, 10], 720),
    ("leonardo.conf", [394, 23, 1], 4992), ("jupiter.conf", [368, 25, 1], 5888),
    ("10000-nodes.conf", [500, 1], 10_000),
])
def test_example_file_shapes(name: str, zones: list[int], nodes: int) -> None:
    topology = load.load_topology(str(FOLDER / name))
    assert np.bincount(topology.level).tolist() == zones
    assert (len(topology.nodes), len(set(topology.nodes))) == (nodes, nodes)
    assert topology.notes == ()
    leaves = topology.node_count[topology.level == 0]
    assert leaves.sum() == nodes
    assert leaves.max() - leaves.min() <= 1


def test_example_file_of_two_topologies() -> None:
    several = load.load_topologies(str(FOLDER / "multiple-topologies.yaml"))
    assert (several.names, several.default) == (("fabric", "nvlink"), "fabric")
    fabric, nvlink = several.topologies
    assert fabric.nodes == nvlink.nodes
    assert (fabric.path_of("n10"), nvlink.path_of("n10")) == (("core", "leaf1"), ("b[1-2]", "b2"))


def test_uneven_shape_is_split_evenly() -> None:
    topology = example.tree_topology(example.parse_shape("2x3x7"))
    assert topology.zones == ("leaf1", "leaf2", "leaf3", "group1", "group2")
    assert topology.node_count.tolist() == [3, 2, 2, 5, 2]
    assert topology.path_of("n6") == ("group2", "leaf3")


@pytest.mark.parametrize("file_format", ["conf", "yaml", "json"])
def test_every_format_has_the_same_content(file_format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = {}
    for shape in (["1x2x5x40"], ["6x24", "--blocks", "4,8"]):
        assert main(["topology", "example", *shape, "--format", file_format]) == 0
        path = tmp_path / f"topology.{file_format}"
        path.write_text(capsys.readouterr().out)
        loaded[shape[0]] = {**load.load_topology(str(path)).to_json(), "source": ""}
    assert loaded["1x2x5x40"] == {**example.tree_topology((1, 2, 5, 40)).to_json(), "source": ""}
    assert loaded["6x24"] == {**example.block_topology((6, 24), (4, 8)).to_json(), "source": ""}


@pytest.mark.parametrize(("arguments", "message"), [
    (["8"], "zones per level"), (["axb"], "zones per level"), (["2x"], "zones per level"), (["0x3"], "from 1 upward"),
    (["3x2x8"], "the one before"), (["1x999999"], "at most"), (["x".join(["1"] * 70)], "levels"),
    (["2x3x8", "--blocks", "4"], "BLOCKSxNODES"), (["2x8", "--blocks", "4,x"], "numbers of nodes"),
    (["2x8", "--blocks", "4,12"], "power of two"), (["2x8", "--blocks", "²"], "numbers of nodes"),
])
def test_invalid_shape_is_rejected(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "example", *arguments]) == UsageError.exit_status
    assert message in capsys.readouterr().err
