"""Blocks: sizes, aggregates of neighbors, and the controller's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmdl.errors import InputError
from slurmdl.slurm.output import split_output
from slurmdl.topology import scontrol_topology, topology_conf
from slurmdl.topology.topology import Topology


def parsed(tmp_path: Path, blocks: int, sizes: str = "", nodes: int = 4) -> Topology:
    lines = [f"BlockName=b{i} Nodes=n[{i * nodes}-{i * nodes + nodes - 1}]" for i in range(1, blocks + 1)]
    path = tmp_path / "topology.conf"
    path.write_text("\n".join([*lines, f"BlockSizes={sizes}" if sizes else "", ""]))
    return topology_conf.declare_topology_conf(str(path)).to_topology()


@pytest.mark.parametrize(("blocks", "sizes", "aggregates"), [
    (1, "4,8", []),
    (2, "4", []),
    (2, "4,8", ["b[1-2]"]),
    (3, "4,8", ["b[1-2]"]),                    # no aggregate with b3 alone
    (4, "4,16", ["b[1-4]"]),
    (5, "4,16", ["b[1-4]"]),
    (6, "4,16", ["b[1-4]", "b[5-6]"]),         # the last aggregate may be incomplete
    (6, "4,8,16", ["b[1-2]", "b[3-4]", "b[5-6]", "b[1-4]"]),  # b[5-6] exists already
    (7, "4,8,16", ["b[1-2]", "b[3-4]", "b[5-6]", "b[1-4]", "b[5-7]"]),
    (3, "4,16,8", ["b[1-2]", "b[1-3]"]),
    (2, '"2, 4"', ["b[1-2]"]),                   # a block may be larger than the base size
    (5, "", ["b[1-2]", "b[3-4]", "b[1-4]", "b[1-5]"]),
])
def test_aggregates_of_neighbors(tmp_path: Path, blocks: int, sizes: str, aggregates: list[str]) -> None:
    topology = parsed(tmp_path, blocks, sizes)
    assert list(topology.zones[blocks:]) == aggregates
    assert topology.level[:blocks].tolist() == [0] * blocks
    for name in aggregates:
        zone = topology.zone_index[name]
        assert topology.node_count[zone] % 4 == 0
        assert topology.level[zone] > 0


def test_aggregates_follow_line_order(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("BlockName=b3 Nodes=c\nBlockName=b1 Nodes=a\nBlockName=b2 Nodes=b\nBlockSizes=1,2\n")
    assert topology_conf.declare_topology_conf(str(path)).to_topology().path_of("c") == ("b[3,1]", "b3")


@pytest.mark.parametrize("sizes", ["4,12", "4,6", "8,4", "4,131073", f"1,{2**16}"])
def test_block_sizes_not_power_of_two_apart_are_rejected(tmp_path: Path, sizes: str) -> None:
    with pytest.raises(InputError, match="power of two") as error:
        parsed(tmp_path, 2, sizes)
    assert error.value.line == 3


def test_undersized_block_is_rejected_but_empty_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text('BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=""\nBlockName=b3 Nodes=n3\nBlockSizes=2\n')
    with pytest.raises(InputError, match="'b3' has 1 node; expected at least 2, as in BlockSizes") as error:
        topology_conf.declare_topology_conf(str(path)).to_topology()
    assert error.value.line == 3
    path.write_text('BlockName=b1 Nodes=""\nBlockName=b2 Nodes=n[1-2]\nBlockName=b3 Nodes=n3\n')
    with pytest.raises(InputError, match="at least 2, as in the first block"):
        topology_conf.declare_topology_conf(str(path)).to_topology()


def test_controller_output_equals_file(tmp_path: Path) -> None:
    from_file = parsed(tmp_path, 4, "4,8")
    from_controller = scontrol_topology.read_topologies(split_output("".join(
        [f"BlockName=b{i} BlockIndex={i - 1} Nodes=n[{i * 4}-{i * 4 + 3}] BlockSize=4\n" for i in range(1, 5)]
        + ["AggregatedBlock=b[1-2] BlockIndex=4 Nodes=n[4-11] BlockSize=8\n",
           "AggregatedBlock=b[3-4] BlockIndex=5 Nodes=n[12-19] BlockSize=8\n"]))).get()
    assert {**from_controller.to_json(), "source": ""} == {**from_file.to_json(), "source": ""}


def test_each_ring_is_one_zone(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("RingName=r0 Nodes=n[1-4]\nRingName=r1 Nodes=n[5-8]\n")
    topology = topology_conf.declare_topology_conf(str(path)).to_topology()
    assert (topology.kind, topology.zones, topology.level.tolist()) == ("ring", ("r0", "r1"), [0, 0])
    assert "each ring is one zone" in topology.notes[0]
