"""What other releases of Slurm say of their topology, and the files that they read: the same zones from both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurmdl.cluster import scontrol_parser as cluster
from slurmdl.topology import scontrol_topology, topology_conf, topology_yaml
from slurmdl.topology.topology import Topology

DATA = Path(__file__).parent / "data"


def told(name: str) -> str:
    return (DATA / f"scontrol-{name}.txt").read_text()


def zones(topology: Topology) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """Zone -> its level, the zone above it and the nodes below it, in no order."""
    return {name: (int(topology.level[i]), topology.zones[topology.parent[i]] if topology.parent[i] >= 0 else "",
                   tuple(topology.nodes[j] for j in topology.indices_below(i)))
            for i, name in enumerate(topology.zones)}


@pytest.mark.parametrize("kind", ["tree", "block"])
def test_24_11(kind: str) -> None:
    filed = topology_conf.parse_topology_conf(str(DATA / f"topology-24.11.5-{kind}.conf"))
    said = scontrol_topology.parse_show_topology(told(f"24.11.5-{kind}"))
    assert filed.kind == said.kind == kind
    assert zones(filed) == zones(said)


def test_24_11_speed() -> None:
    said = scontrol_topology.parse_show_topology(told("24.11.5-tree"))
    assert np.isnan(said.uplink_bandwidth).all()  # 10 is not plausible, and 1 is Slurm's default
    assert [note for note in said.notes if note.startswith("LinkSpeed of 1 zone (10) is not used")]


def test_aggregates_are_those_that_slurm_lists() -> None:
    """The reader makes the aggregates from BlockSizes; the controller's own list of them is the oracle."""
    filed = zones(topology_conf.parse_topology_conf(str(DATA / "topology-24.11.5-block.conf")))
    assert filed["b[1-2]"] == (1, "b[1-4]", ("n1", "n2", "n3", "n4"))
    assert filed["b[3-4]"] == (1, "b[1-4]", ("n5", "n6", "n7", "n8", "n9"))
    assert filed["b[1-4]"] == (2, "", tuple(f"n{i}" for i in range(1, 10)))


@pytest.mark.parametrize(("name", "kinds", "default"), [
    ("26.05.5", {"leaves": "tree", "blocks": "block", "flat": "flat"}, "leaves"),
    ("26.05.5-ring", {"rings": "ring", "cube": "torus3d", "flat": "flat"}, "rings"),
])
def test_26_05(name: str, kinds: dict[str, str], default: str) -> None:
    filed = topology_yaml.load_topology_yaml(str(DATA / f"topology-{name}.yaml"))
    said = scontrol_topology.parse_scontrol_topologies(told(name))
    for found in (filed, said):
        assert {topology.name: topology.kind for topology in found.topologies} == kinds
        assert found.default == default
    for one, other in zip(filed.topologies, said.topologies, strict=True):
        assert zones(one) == zones(other)
    assert all(zones(topology) for topology in said.topologies if topology.kind != "flat")


def test_26_05_lists_one_topology_by_name() -> None:
    blocks = scontrol_topology.parse_show_topology(told("26.05.5-blocks"))
    assert zones(blocks) == zones(scontrol_topology.parse_scontrol_topologies(told("26.05.5")).get("blocks"))


def test_26_05_lists_a_torus() -> None:
    torus = scontrol_topology.parse_show_topology(told("26.05.5-torus"))
    assert torus.kind == "torus3d"
    assert zones(torus) == zones(scontrol_topology.parse_scontrol_topologies(told("26.05.5-ring")).get("cube"))


def test_26_05_without_topoconf() -> None:
    """`show topology` lists the default; it is what is read where `show topoconf` fails."""
    text = told("26.05.5")
    assert zones(scontrol_topology.parse_show_topology(text[text.index("show topology"):])) == zones(
        scontrol_topology.parse_scontrol_topologies(text).get())


def test_partitions_name_their_topology() -> None:
    snapshot = cluster.parse_snapshot(told("26.05.5"))
    assert snapshot.topology_of(["blocks"]) == "blocks"
    assert snapshot.topology_of(["flat"]) == "flat"
    assert scontrol_topology.parse_scontrol_topologies(told("26.05.5")).get(snapshot.topology_of(["main"])).name == "leaves"
    assert [len(cluster.parse_snapshot(told(name)).nodes)
                for name in ("24.11.5-tree", "24.11.5-block", "26.05.5")] == [10] * 3
