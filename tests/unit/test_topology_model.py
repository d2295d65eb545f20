"""The canonical form: node order, sums, paths and the graph, compared with plain loops."""

from __future__ import annotations

import sys
from dataclasses import replace

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.errors import InputError, UnavailableError
from slurmdl.topology import write
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import MAX_LEVELS, Topology, TopologySet


@st.composite
def forests(draw: st.DrawFn) -> Topology:
    """Uneven forests in random line order, with empty leaves and nodes without a zone."""
    count = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]  # zone 0 is a root
    numbered = iter(range(100))
    zones = []
    for i in range(count):
        children = tuple(f"z{j}" for j in range(count) if parents[j] == i)
        nodes = () if children else tuple(f"n{next(numbered)}" for _ in range(draw(st.integers(0, 3))))
        zones.append(ZoneDecl(f"z{i}", children, nodes))
    built = build_topology(draw(st.permutations(zones)), kind="tree", source="drawn")
    zoneless = draw(st.integers(0, 2))
    return Topology(built.zones, built.parent, built.level, built.uplink_bandwidth,
                    (*built.nodes, *(f"zoneless{i}" for i in range(zoneless))),
                    np.append(built.leaf, np.full(zoneless, -1, np.int32)))


@given(forests())
def test_order_sums_ancestors_and_graph_match_paths(topology: Topology) -> None:
    values = np.arange(1, len(topology.nodes) + 1)
    assert sorted(topology.node_order.tolist()) == list(range(len(topology.nodes)))
    for i, zone in enumerate(topology.zones):
        members = topology.indices_below(i).tolist()
        assert {topology.nodes[node] for node in members} == {
            node for node in topology.nodes if zone in topology.path_of(node)}
        assert topology.sum_below(values)[i] == sum(values[node] for node in members)
        assert topology.node_count[i] == len(members)
        assert topology.level[i] or members == sorted(members)
    above = topology.ancestors(np.append(np.arange(len(topology.nodes)), -1))
    graph = topology.to_networkx()
    assert networkx.is_forest(graph)
    for node, zones in zip((*topology.nodes, "unknown"), above.tolist(), strict=True):
        path = topology.path_of(node)
        assert tuple(topology.zones[zone] for zone in reversed(zones) if zone >= 0) == path
        assert topology.leaf_of(node) == (path[-1] if path else "")
        if node != "unknown":
            assert {name for _, name in networkx.ancestors(graph, ("node", node))} == set(path)
    assert Topology.from_json(topology.to_json()).to_json() == topology.to_json()


def test_flat_topology_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = Topology.flat(["n1", "n2"])
    assert flat.ancestors(np.array([0, -1])).shape == (2, 0)
    assert flat.sum_below(np.array([1, 1])).tolist() == []
    assert sorted(flat.to_networkx()) == [("node", "n1"), ("node", "n2")]
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(UnavailableError, match=r"networkx.*pip install 'slurmdl\[graph\]'$"):
        flat.to_networkx()


def test_graphml_has_all_zones_nodes_and_links() -> None:
    """A zone and a node may share a name."""
    topology = build_topology([ZoneDecl("x", nodes=("x", "n&2"), link_speed=8000), ZoneDecl("top", ("x",))],
                              kind="tree", source="")
    graph = networkx.parse_graphml(write.format_topology(TopologySet.single(topology), None, "graphml"))
    assert set(graph.edges) == {("zone:top", "zone:x"), ("zone:x", "node:x"), ("zone:x", "node:n&2")}
    assert graph.nodes["zone:x"] == {"level": 0, "uplink_bandwidth": 1e9} and graph.nodes["zone:top"] == {"level": 1}
    blocks = TopologySet.single(replace(topology, kind="block", block_sizes=(2,)))
    assert [loss.partition(":")[0] for loss in write.conversion_losses(blocks, None, "graphml")] == [
        "BlockSizes of default"]


def test_levels_are_bounded() -> None:
    chain = [ZoneDecl("z0", nodes=("n",)), *(ZoneDecl(f"z{i}", (f"z{i - 1}",)) for i in range(1, MAX_LEVELS))]
    assert len(build_topology(chain, kind="tree", source="").path_of("n")) == MAX_LEVELS
    with pytest.raises(InputError, match="levels of zones"):
        build_topology([*chain, ZoneDecl("top", (chain[-1].name,))], kind="tree", source="")


@pytest.mark.parametrize(("link_speed", "speed"), [
    (None, None), (0, None), (1, None), (2, None), (999, None), (1000, 1.25e8), (100_000, 1.25e10),
    (9_999_999, 1.249999875e12), (10_000_000, None), (0xFFFFFFFF, None)])
def test_implausible_link_speed_is_not_used(link_speed: int | None, speed: float | None) -> None:
    """Slurm leaves the unit open, so small numbers are not used as bandwidth, and a note names them."""
    topology = build_topology([ZoneDecl("x", nodes=("n1",), link_speed=link_speed)], kind="tree", source="")
    assert topology.to_json()["uplink_bandwidth"] == [speed]
    notes = [] if speed or link_speed in (None, 0, 1) else [f"LinkSpeed of 1 zone ({link_speed:,}) is not used"]
    assert [note.partition(";")[0] for note in topology.notes] == notes


def test_implausible_speed_is_lost_in_topology_conf() -> None:
    slow = build_topology([ZoneDecl("x", nodes=("n1",))], kind="tree", source="")
    slow = Topology.from_json({**slow.to_json(), "uplink_bandwidth": [6.25e6]})
    assert "LinkSpeed" not in write.format_topology_conf(slow)
    assert [loss.partition(":")[0] for loss in write.conversion_losses(TopologySet.single(slow), None, "conf")] == [
        "speeds of 1 zone of default"]
