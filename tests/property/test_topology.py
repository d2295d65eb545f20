"""Topology readers with arbitrary text: a valid topology or an InputError of one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.slurm.output import split_output
from slurmdl.topology import load, scontrol_topology, write
from slurmdl.topology.topology import TopologySet

bounded = settings(max_examples=150, deadline=None, derandomize=True)


def _read(text: bytes, name: str) -> None:
    """Read a file; the result is valid, or an InputError of one line is raised."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(text)
        try:
            topologies = load.load_topology_file(str(path))
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            assert directory in str(error)  # the file or one of its includes
            return
    assert TopologySet.from_json(topologies.to_json()).to_json() == topologies.to_json()


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
                        ["zones", "parent", "level", "uplink_bandwidth", "nodes", "leaf", "kind", "name",
                         "notes", "block_sizes", "topologies", "default"]), inner, max_size=12)), max_leaves=25))
def test_any_json_is_a_topology_or_an_input_error(data: object) -> None:
    _read(json.dumps(data).encode(), "topology.json")


@settings(bounded, max_examples=400)
@given(texts)
def test_any_controller_output_is_a_topology_or_an_input_error(text: bytes) -> None:
    try:
        topologies = scontrol_topology.read_topologies(split_output(text.decode(errors="replace")))
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert topologies.topologies


@settings(bounded, max_examples=400)
@given(st.one_of(st.text(max_size=40), st.text("n0123456789[]-, {", max_size=25)))
def test_any_hostlist_is_names_or_an_input_error(text: str) -> None:
    try:
        hosts = hostlist.expand_hostlist(text)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert len(hosts) <= hostlist.MAX_NAMES
    assert all(hosts)
    if len(hosts) < 1000 and re.fullmatch(r"[\w.,-]*", ",".join(hosts)):
        assert hostlist.expand_hostlist(write.checked_hostlist(hosts)) == hosts
