"""Topology files: written ones are read back, arbitrary text is a topology or an InputError of one line.

`check` reports an error if the reader rejects a file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import MAX_NAMES, expand_hostlist
from slurmdl.slurm.output import split_output
from slurmdl.topology import load, scontrol_topology, topology_conf, write
from slurmdl.topology.check import check_declarations, diff_sets, diff_topologies
from slurmdl.topology.source import ZoneDeclarations
from slurmdl.topology.topology import Topology, TopologySet

bounded = settings(max_examples=80, deadline=None, derandomize=True)
SIDES = ("one", "other")

names = st.one_of(st.builds("{}{}".format, st.sampled_from(["n", "r1n", "", "a-"]), st.integers(0, 120)),
                  st.builds("{}{:03d}".format, st.sampled_from(["n", "x"]), st.integers(0, 1200)),
                  st.sampled_from(["login", "on", "007", "n1-ib", "1e3", "null", "y", "ä1", "n999999999999999999"]))


def contents_without_source(topologies: TopologySet) -> object:
    """Return the content that topology files preserve: everything except source and notes."""
    return topologies.default, [{**t.to_json(), "source": "", "notes": ()} for t in topologies.topologies]


@st.composite
def topology_sources(draw: st.DrawFn, name: str = "default") -> ZoneDeclarations:
    """A tree, blocks or rings, parsed from a generated topology.conf."""
    kind = draw(st.sampled_from(["SwitchName", "BlockName", "RingName"]))
    nodes = draw(st.lists(names, min_size=1, max_size=24, unique=True))
    count = draw(st.integers(1, 6))
    zones = draw(st.lists(names, min_size=count + 3, max_size=count + 3, unique=True))
    lines = []
    for i in range(count):
        zone_nodes = nodes[i::count]
        speed = f" LinkSpeed={draw(st.integers(1, 10**6))}" if kind == "SwitchName" and draw(st.booleans()) else ""
        if zone_nodes:
            lines.append(f"{kind}={zones[i]} Nodes={','.join(zone_nodes)}{speed}")
    if kind == "SwitchName":
        lower, upper = zones[:len(lines) // 2], zones[len(lines) // 2:len(lines)]
        if lower:
            lines += [f"SwitchName={zones[-1]} Switches={','.join(lower)}",
                      f"SwitchName={zones[-2]} Switches={','.join([*upper, zones[-1]])}"]
    if kind == "BlockName":
        smallest = min(len(nodes[i::count]) for i in range(len(lines)))
        lines.append(f"BlockSizes={smallest},{4 * smallest}")
    lines = draw(st.permutations(lines)) if kind == "SwitchName" else lines
    with TemporaryDirectory() as directory:
        path = Path(directory) / "topology.conf"
        path.write_text("\n".join(lines) + "\n")
        source = topology_conf.parse_topology_conf(str(path))
    return ZoneDeclarations(source.zones, source.kind, "x", name, (), source.block_sizes)


def reread(text: str, name: str) -> TopologySet:
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_text(text, encoding="utf-8")
        return load.load_topologies(str(path))


@bounded
@given(st.lists(names, max_size=30))
def test_hostlist_round_trip(listed: list[str]) -> None:
    assert expand_hostlist(write.checked_hostlist(listed)) == listed


@bounded
@given(topology_sources("first"), topology_sources("second"), st.sampled_from(["first", "second"]))
def test_files_round_trip(first: ZoneDeclarations, second: ZoneDeclarations, default: str) -> None:
    """topology.conf holds one topology, topology.yaml no speeds."""
    written = TopologySet((first.to_topology(), second.to_topology(), Topology.flat((), name="third")), default)
    one = TopologySet.single(dataclasses.replace(first, name="default").to_topology())
    for format_name in ("json", "conf", "yaml", "yaml"):
        expected = one if format_name == "conf" else written
        if format_name == "yaml":
            for topology in written.topologies:
                topology.uplink_bandwidth.fill(float("nan"))
        parsed = reread(write.format_topology(expected, None, format_name), f"topology.{format_name}")
        assert contents_without_source(parsed) == contents_without_source(expected)
        assert diff_sets(expected, parsed, SIDES) == []
        written = parsed if format_name == "yaml" else written


@bounded
@given(topology_sources(), topology_sources())
def test_diff_is_empty_only_if_zones_are_equal(source_a: ZoneDeclarations, source_b: ZoneDeclarations) -> None:
    a, b = source_a.to_topology(), source_b.to_topology()
    same = (a.kind == b.kind and {z: a.parent[i] >= 0 and a.zones[a.parent[i]] for z, i in a.zone_index.items()}
            == {z: b.parent[i] >= 0 and b.zones[b.parent[i]] for z, i in b.zone_index.items()}
            and {n: a.path_of(n) for n in a.nodes} == {n: b.path_of(n) for n in b.nodes})
    differences = diff_topologies(a, b, SIDES)
    assert not same or all("bit/s" in line or "order of blocks" in line for line in differences)
    assert same or differences
    assert len(differences) == len(diff_topologies(b, a, SIDES))


LINES = st.sampled_from(["SwitchName=a Nodes=n[1-3]", "SwitchName=b Nodes=n[3-4]", "SwitchName=b Switches=a",
                         "SwitchName=c Switches=a,b", "SwitchName=d Switches=c,e", "SwitchName=e Switches=d",
                         "SwitchName=e", "SwitchName=f Switches=f", "SwitchName=g Nodes=n[2-1]", "Nodes=n1",
                         "SwitchName=h Nodes=n9 LinkSpeed=fast", "BlockName=p Nodes=n[1-2]",
                         "BlockName=q Nodes=n3", "BlockSizes=2,4", "BlockSizes=2,6", "RingName=r Nodes=n[1-20]"])


@bounded
@given(st.lists(LINES, min_size=1, max_size=7))
def test_check_reports_an_error_if_the_reader_rejects_the_file(lines: list[str]) -> None:
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "topology.conf")
        Path(path).write_text("\n".join(lines) + "\n")
        errors: list[InputError] = []
        try:
            source = topology_conf.parse_topology_conf(path, errors.append)
            findings = check_declarations(source, [f"n{i}" for i in range(1, 6)])
        except InputError as error:
            errors.append(error)
            findings = []
        try:
            load.load_topologies(path)
            reader_error = ""
        except InputError as error:
            reader_error = str(error)
        check_errors = [*map(str, errors), *(finding.text for finding in findings if finding.severity == "error")]
        assert bool(reader_error) <= bool(check_errors)
        if check_errors and not reader_error:  # rejected by some Slurm releases, accepted by slurmdl
            assert all("no zone has a node" in text or "ring of 20 nodes" in text for text in check_errors)


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


@settings(bounded, max_examples=600)
@given(texts, st.sampled_from(["topology.conf", "topology.yaml", "topology.json"]))
def test_any_file_is_a_topology_or_an_input_error(text: bytes, name: str) -> None:
    _read(text, name)


@settings(bounded, max_examples=150)
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
        hosts = expand_hostlist(text)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert len(hosts) <= MAX_NAMES
    assert all(hosts)
    if len(hosts) < 1000 and re.fullmatch(r"[\w.,-]*", ",".join(hosts)):
        assert expand_hostlist(write.checked_hostlist(hosts)) == hosts
