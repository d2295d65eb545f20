"""What is written reads as it was; `check` finds an error where and only where the reader refuses."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology import load, topology_conf, write
from slurmdl.topology.check import check_source
from slurmdl.topology.diff import diff_sets, diff_topologies
from slurmdl.topology.source import TopologySource
from slurmdl.topology.topology import Topology, TopologySet

bounded = settings(max_examples=80, deadline=None, derandomize=True)
SIDES = ("one", "other")

names = st.one_of(st.builds("{}{}".format, st.sampled_from(["n", "r1n", "", "a-"]), st.integers(0, 120)),
                  st.builds("{}{:03d}".format, st.sampled_from(["n", "x"]), st.integers(0, 1200)),
                  st.sampled_from(["login", "on", "007", "n1-ib", "1e3", "null", "y", "ä1", "n999999999999999999"]))


def dumped(topologies: TopologySet) -> object:
    """All that files hold."""
    return topologies.default, [{**t.to_json(), "source": "", "notes": ()} for t in topologies.topologies]


@st.composite
def contents(draw: st.DrawFn, name: str = "default") -> TopologySource:
    """A tree, blocks or rings, as lines of a topology.conf declare them, read back without a fault."""
    kind = draw(st.sampled_from(["SwitchName", "BlockName", "RingName"]))
    nodes = draw(st.lists(names, min_size=1, max_size=24, unique=True))
    count = draw(st.integers(1, 6))
    zones = draw(st.lists(names, min_size=count + 3, max_size=count + 3, unique=True))
    lines = []
    for i in range(count):
        here = nodes[i::count]
        speed = f" LinkSpeed={draw(st.integers(1, 10**6))}" if kind == "SwitchName" and draw(st.booleans()) else ""
        if here:
            lines.append(f"{kind}={zones[i]} Nodes={','.join(here)}{speed}")
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
        found = topology_conf.declare_topology_conf(str(path))
    return TopologySource(found.zones, found.kind, "x", name, (), found.block_sizes)


def reread(text: str, name: str) -> TopologySet:
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_text(text, encoding="utf-8")
        return load.load_topologies(str(path))


@bounded
@given(st.lists(names, max_size=30))
def test_hostlists(listed: list[str]) -> None:
    assert expand_hostlist(write.checked_hostlist(listed)) == listed


@bounded
@given(contents())
def test_a_written_topology_conf_reads_as_it_was(found: TopologySource) -> None:
    once = TopologySet.single(found.to_topology())
    again = reread(write.format_topology(once, None, "conf"), "topology.conf")
    assert dumped(again) == dumped(once)
    assert diff_topologies(once.get(), again.get(), SIDES) == []


@bounded
@given(contents("first"), contents("second"), st.sampled_from(["first", "second"]))
def test_a_written_topology_yaml_reads_as_it_was_without_speeds(first: TopologySource, second: TopologySource,
                                                               default: str) -> None:
    once = TopologySet((first.to_topology(), second.to_topology(), Topology.flat((), name="third")), default)
    again = reread(write.format_topology(once, None, "yaml"), "topology.yaml")
    for topology in once.topologies:
        topology.uplink_bandwidth.fill(float("nan"))
    assert dumped(again) == dumped(once)
    assert diff_sets(once, again, SIDES) == []
    third = reread(write.format_topology(again, None, "yaml"), "topology.yaml")
    assert dumped(third) == dumped(again)


@bounded
@given(contents(), contents())
def test_differences_are_none_only_where_the_zones_are_the_same(one: TopologySource, other: TopologySource) -> None:
    a, b = one.to_topology(), other.to_topology()
    same = (a.kind == b.kind and {z: a.parent[i] >= 0 and a.zones[a.parent[i]] for z, i in a.zone_index.items()}
            == {z: b.parent[i] >= 0 and b.zones[b.parent[i]] for z, i in b.zone_index.items()}
            and {n: a.path_of(n) for n in a.nodes} == {n: b.path_of(n) for n in b.nodes})
    found = diff_topologies(a, b, SIDES)
    assert not same or all("bit/s" in line or "order of blocks" in line for line in found)
    assert same or found
    assert len(found) == len(diff_topologies(b, a, SIDES))


LINES = st.sampled_from(["SwitchName=a Nodes=n[1-3]", "SwitchName=b Nodes=n[3-4]", "SwitchName=b Switches=a",
                         "SwitchName=c Switches=a,b", "SwitchName=d Switches=c,e", "SwitchName=e Switches=d",
                         "SwitchName=e", "SwitchName=f Switches=f", "SwitchName=g Nodes=n[2-1]", "Nodes=n1",
                         "SwitchName=h Nodes=n9 LinkSpeed=fast", "BlockName=p Nodes=n[1-2]",
                         "BlockName=q Nodes=n3", "BlockSizes=2,4", "BlockSizes=2,6", "RingName=r Nodes=n[1-20]"])


@bounded
@given(st.lists(LINES, min_size=1, max_size=7))
def test_check_finds_an_error_wherever_the_reader_refuses(lines: list[str]) -> None:
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "topology.conf")
        Path(path).write_text("\n".join(lines) + "\n")
        faults: list[InputError] = []
        try:
            source = topology_conf.declare_topology_conf(path, faults.append)
            found = check_source(source, [f"n{i}" for i in range(1, 6)])
        except InputError as fault:
            faults.append(fault)
            found = []
        try:
            load.load_topologies(path)
            refused = ""
        except InputError as fault:
            refused = str(fault)
        told = [str(fault) for fault in faults] + [finding.text for finding in found if finding.severity == "error"]
        assert bool(refused) <= bool(told)
        if told and not refused:  # what some releases of Slurm refuse, and slurmdl can read
            assert all("no zone has a node" in text or "ring of 20 nodes" in text for text in told)
