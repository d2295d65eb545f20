"""Topology output of several Slurm releases and the files that they read: both give the same zones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurmdl.cluster import reader
from slurmdl.slurm.output import split_output
from slurmdl.topology import load, topology_conf
from slurmdl.topology.scontrol_topology import read_topologies
from slurmdl.topology.topology import Topology

DATA = Path(__file__).parent / "data"


def scontrol_output(name: str) -> str:
    return (DATA / f"scontrol-{name}.txt").read_text()


def zones(topology: Topology) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """Return by zone name: level, parent zone, and nodes at any depth."""
    return {name: (int(topology.level[i]), topology.zones[topology.parent[i]] if topology.parent[i] >= 0 else "",
                   tuple(topology.nodes[j] for j in topology.indices_below(i)))
            for i, name in enumerate(topology.zones)}


@pytest.mark.parametrize("kind", ["tree", "block"])
def test_24_11(kind: str) -> None:
    from_file = topology_conf.declare_topology_conf(str(DATA / f"topology-24.11.5-{kind}.conf")).to_topology()
    from_controller = read_topologies(split_output(scontrol_output(f"24.11.5-{kind}"))).get()
    assert from_file.kind == from_controller.kind == kind
    assert zones(from_file) == zones(from_controller)


def test_24_11_speed() -> None:
    from_controller = read_topologies(split_output(scontrol_output("24.11.5-tree"))).get()
    assert np.isnan(from_controller.uplink_bandwidth).all()  # 10 is not plausible, 1 is Slurm's default
    assert [note for note in from_controller.notes if note.startswith("LinkSpeed of 1 zone (10) is not used")]


def test_aggregates_equal_slurm_list() -> None:
    """The reader derives aggregates from BlockSizes; the controller's list is the oracle."""
    from_file = zones(topology_conf.declare_topology_conf(str(DATA / "topology-24.11.5-block.conf")).to_topology())
    assert from_file["b[1-2]"] == (1, "b[1-4]", ("n1", "n2", "n3", "n4"))
    assert from_file["b[3-4]"] == (1, "b[1-4]", ("n5", "n6", "n7", "n8", "n9"))
    assert from_file["b[1-4]"] == (2, "", tuple(f"n{i}" for i in range(1, 10)))


@pytest.mark.parametrize(("name", "kinds", "default"), [
    ("26.05.5", {"leaves": "tree", "blocks": "block", "flat": "flat"}, "leaves"),
    ("26.05.5-ring", {"rings": "ring", "cube": "torus3d", "flat": "flat"}, "rings"),
])
def test_26_05(name: str, kinds: dict[str, str], default: str) -> None:
    from_file = load.load_topology_file(str(DATA / f"topology-{name}.yaml"))
    from_controller = read_topologies(split_output(scontrol_output(name)))
    for topologies in (from_file, from_controller):
        assert {topology.name: topology.kind for topology in topologies.topologies} == kinds
        assert topologies.default == default
    for left, right in zip(from_file.topologies, from_controller.topologies, strict=True):
        assert zones(left) == zones(right)
    assert all(zones(topology) for topology in from_controller.topologies if topology.kind != "flat")


def test_26_05_lists_one_topology_by_name() -> None:
    blocks = read_topologies(split_output(scontrol_output("26.05.5-blocks"))).get()
    assert zones(blocks) == zones(read_topologies(split_output(scontrol_output("26.05.5"))).get("blocks"))


def test_26_05_lists_a_torus() -> None:
    torus = read_topologies(split_output(scontrol_output("26.05.5-torus"))).get()
    assert torus.kind == "torus3d"
    assert zones(torus) == zones(read_topologies(split_output(scontrol_output("26.05.5-ring"))).get("cube"))


def test_26_05_without_topoconf() -> None:
    """`show topology` lists the default topology; it is used if `show topoconf` fails."""
    text = scontrol_output("26.05.5")
    assert zones(read_topologies(split_output(text[text.index("show topology"):])).get()) == zones(
        read_topologies(split_output(text)).get())


def test_partitions_name_their_topology() -> None:
    snapshot = reader.parse_snapshot(scontrol_output("26.05.5"))
    assert snapshot.topology_of(["blocks"]) == "blocks"
    assert snapshot.topology_of(["flat"]) == "flat"
    topologies = read_topologies(split_output(scontrol_output("26.05.5")))
    assert topologies.get(snapshot.topology_of(["main"])).name == "leaves"
    assert [len(reader.parse_snapshot(scontrol_output(name)).nodes)
            for name in ("24.11.5-tree", "24.11.5-block", "26.05.5")] == [10] * 3
