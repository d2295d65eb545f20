"""The canonical topology against naive sums and paths, and readers against arbitrary text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.topology import load, scontrol_topology, write
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology, TopologySet

bounded = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def forests(draw: st.DrawFn) -> Topology:
    """Zones in any order, of uneven depth, with several roots, empty leaves, and nodes without a zone."""
    count = draw(st.integers(1, 12))
    parents = [draw(st.integers(i + 1, count + 1)) for i in range(count)]  # of zone i; beyond the last: a root
    children: dict[int, list[str]] = {}
    for i, parent in enumerate(parents):
        if parent < count:
            children.setdefault(parent, []).append(f"z{i}")
    leaves = [i for i in range(count) if i not in children]
    places = draw(st.lists(st.sampled_from(leaves), max_size=20))
    zones = [ZoneDecl(f"z{i}", tuple(children.get(i, ())),
                      tuple(f"n{j}" for j, place in enumerate(places) if place == i)) for i in range(count)]
    made = build_topology(draw(st.permutations(zones)), kind="tree", source="drawn")
    alone = draw(st.integers(0, 2))
    return Topology(made.zones, made.parent, made.level, made.uplink_bandwidth, (*made.nodes, *(f"x{i}" for i in range(alone))),
                    np.append(made.leaf, np.full(alone, -1)).astype(np.int32))


@bounded
@given(forests())
def test_lowest_common_zone_is_the_last_that_two_paths_share(topology: Topology) -> None:
    count = len(topology.nodes)
    one, other = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(count)))
    found = topology.lowest_common_zone(one, other)
    for a, b, zone in zip(one.tolist(), other.tolist(), found.tolist(), strict=True):
        shared = [p for p, q in zip(topology.path_of(topology.nodes[a]), topology.path_of(topology.nodes[b]), strict=False)
                  if p == q]
        assert (topology.zones[zone] if zone >= 0 else None) == (shared[-1] if shared else None)


@bounded
@given(forests(), st.data())
def test_sums_and_members_are_those_of_the_paths(topology: Topology, data: st.DataObject) -> None:
    values = np.array([data.draw(st.integers(0, 9)) for _ in topology.nodes], np.int64)
    sums = topology.sum_below(values)
    for i, zone in enumerate(topology.zones):
        inside = [j for j, node in enumerate(topology.nodes) if zone in topology.path_of(node)]
        assert sorted(topology.indices_below(i).tolist()) == inside
        assert topology.node_count[i] == len(inside)
        assert sums[i] == sum(values[inside])
        assert np.flatnonzero(topology.mask_below(i)).tolist() == inside


@bounded
@given(forests())
def test_json_and_back(topology: Topology) -> None:
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))).to_json() == topology.to_json()


def _read(text: bytes, name: str) -> None:
    """Read a file; it ends in topologies that are whole, or in an InputError of one line."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(text)
        try:
            found = load.load_topology_file(str(path))
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            assert directory in str(error)  # the file, or one that it includes
            return
    assert TopologySet.from_json(found.to_json()).to_json() == found.to_json()


texts = st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode),
                  st.lists(st.sampled_from(
                      ["SwitchName=", "s1", "s2", " ", "Nodes=", "n[1-3]", "Switches=", "\n", "\\", "#", '"', "=",
                       ",", "Include ", "- ", "topology: t", "\n  ", "tree:", "switches:", "- switch: s1",
                       "nodes: n1", "{", "}", "[", "]", ": ", "&a ", "*a", "flat: true", '"zones": ', "BlockName=",
                       "BlockSizes=1,2"]),
                      max_size=40).map(lambda words: "".join(words).encode()))
names = st.sampled_from(["topology.conf", "topology.yaml", "topology.json"])


@settings(bounded, max_examples=600)
@given(texts, names)
def test_any_file_is_a_topology_or_an_input_error(text: bytes, name: str) -> None:
    _read(text, name)


@bounded
@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(
                        ["zones", "parent", "level", "uplink_bandwidth", "nodes", "leaf", "kind", "name", "notes", "block_sizes",
                         "topologies", "default"]), inner, max_size=12)), max_leaves=25))
def test_any_json_is_a_topology_or_an_input_error(data: object) -> None:
    _read(json.dumps(data).encode(), "topology.json")


@settings(bounded, max_examples=400)
@given(texts)
def test_any_answer_of_the_controller_is_a_topology_or_an_input_error(text: bytes) -> None:
    try:
        found = scontrol_topology.parse_scontrol_topologies(text.decode(errors="replace"))
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert found.topologies


@settings(bounded, max_examples=400)
@given(st.one_of(st.text(max_size=40), st.text("n0123456789[]-, {", max_size=25)))
def test_any_hostlist_is_names_or_an_input_error(text: str) -> None:
    try:
        found = hostlist.expand_hostlist(text)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert len(found) <= hostlist.MAX_NAMES
    assert all(found)
    if len(found) < 1000 and re.fullmatch(r"[\w.,-]*", ",".join(found)):
        assert hostlist.expand_hostlist(write.checked_hostlist(found)) == found
