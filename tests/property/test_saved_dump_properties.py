"""Saved text of Slurm: what is written in its forms is read back, whatever surrounds it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_dumps import PARTITIONS, STATES, format_node, format_show_topology, format_sinfo
from test_topology_files import topology_sources

from slurmdl.cluster import load as cluster_load
from slurmdl.errors import InputError
from slurmdl.slurm.output import split_output
from slurmdl.topology import load, scontrol_topology
from slurmdl.topology.source import ZoneDeclarations
from slurmdl.topology.topology import Topology

bounded = settings(max_examples=60, deadline=None, derandomize=True)
NOISE = ("", "$ scontrol show topology", "[root@login ~]# scontrol show nodes", "scontrol: show topology",
         "No reservations in the system", "# saved on Monday", "user@login:~$ ")


def zones_by_name(topology: Topology) -> dict[str, object]:
    """Content of a topology that `show topology` prints: parents, nodes and link speeds of the zones."""
    return {name: (int(topology.level[i]), topology.zones[topology.parent[i]] if topology.parent[i] >= 0 else "",
                   tuple(topology.nodes[j] for j in topology.indices_below(i)),
                   float(np.nan_to_num(topology.uplink_bandwidth[i]))) for i, name in enumerate(topology.zones)}


def write(directory: str, text: str) -> str:
    path = Path(directory) / "dump"
    path.write_text(text, newline="")
    return str(path)


@st.composite
def surrounded(draw: st.DrawFn, text: str) -> str:
    """The text with prompts and other output between its lines, indented, or with CRLF line ends."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(0, 4))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(NOISE)))
    margin, end = draw(st.sampled_from(["", "  ", "\t"])), draw(st.sampled_from(["\n", "\r\n"]))
    return draw(st.sampled_from(["", "\ufeff"])) + "".join(f"{margin}{line}{end}" for line in lines)


@bounded
@given(st.data(), topology_sources())
def test_topology_round_trip(data: st.DataObject, source: ZoneDeclarations) -> None:
    written = source.to_topology()
    text = data.draw(surrounded(format_show_topology(written)))
    warnings: list[str] = []
    with TemporaryDirectory() as directory:
        path = write(directory, text)
        parsed = load.load_topology_file(path, warnings.append).get()
        declared = load.load_declarations(path, warnings.append, warnings.append)[0].to_topology()
    live = scontrol_topology.read_topologies(split_output(format_show_topology(written))).get()
    assert warnings == []
    assert parsed.kind == declared.kind == live.kind == written.kind
    assert zones_by_name(parsed) == zones_by_name(declared) == zones_by_name(live) == zones_by_name(written)
    assert set(parsed.block_sizes) <= set(written.block_sizes)


@bounded
@given(st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True), st.booleans())
def test_nodes_round_trip(data: st.DataObject, numbers: list[int], one_line: bool) -> None:
    """Both forms, with and without -d, give the same nodes."""
    snapshots, warnings = [], []
    with TemporaryDirectory() as directory:
        for details in (True, False):
            text = "".join(format_node(number, one_line, details) for number in numbers) + PARTITIONS
            # noise only between records: a line without indentation inside of one ends it
            text = data.draw(st.sampled_from(["", "$ scontrol -d show nodes\n", "\ufeff"])) + text
            text = text.replace("\n", data.draw(st.sampled_from(["\n", "\r\n"])))
            snapshots.append(cluster_load.load_cluster_file(write(directory, text), warnings.append))
    assert snapshots[0].to_json() == snapshots[1].to_json()
    for node, number in zip(snapshots[0].nodes, numbers, strict=True):
        state, used, gpus = STATES[(number - 1) % len(STATES)]
        assert (node.name, node.cpus_unallocated) == (f"n{number:04d}", 128 - used)
        assert node.state == tuple(part.rstrip("*~#") for part in state.split("+"))
        assert node.responding == ("*" not in state)
        assert (dict(node.gres), dict(node.gres_used)) == ({"gpu:a100": 4}, {"gpu:a100": gpus})
    assert len(warnings) == 1
    assert "AllocTRES" in warnings[0]


@bounded
@given(st.lists(st.sampled_from(["idle", "mix", "alloc", "drain*", "down~", "idle+cloud+powered_down", "MIXED"]),
                min_size=1, max_size=9), st.sampled_from([(12, 20), (-30, -28)]))
def test_sinfo_round_trip(states: list[str], widths: tuple[int, int]) -> None:
    """Left- and right-justified columns; the file also has nodes in lines before and after the table."""
    table = format_sinfo([(f"n{i:04d}", state) for i, state in enumerate(states, 1)], widths, ("NODELIST", "STATE"))
    first = {"mix": "MIXED", "alloc": "ALLOCATED", "drain*": "IDLE", "down~": "DOWN", "MIXED": "MIXED"}
    for text in (table, format_node(1, False) + table, table + format_node(1, False),
                 format_node(1, True) + table + PARTITIONS):
        with TemporaryDirectory() as directory:
            snapshot = cluster_load.load_cluster_file(write(directory, text), lambda _: None)
        assert list(snapshot.names) == [f"n{i:04d}" for i in range(1, len(states) + 1)]
        for node, state in zip(snapshot.nodes, states, strict=True):
            assert node.state[0] == first.get(state, "IDLE")
            assert node.responding == ("*" not in state)


@settings(bounded, max_examples=200)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(
    ["SwitchName=s Level=0 LinkSpeed=1 Nodes=n[1-3]", "SwitchName=t Level=1 LinkSpeed=1 Switches=s,u", "BlockName=b",
     "NodeName=n1 CPUTot=4 State=IDLE", "   State=DOWN", "NODELIST STATE", "n[1-2] idle", "n[ mix", "- topology: x",
     "  tree:", "ReservationName=r State=ACTIVE Nodes=n[", "PARTITION NODES STATE NODELIST", "a 1 idle n9"])),
    max_size=8))
def test_any_text_is_read_or_an_input_error(lines: list[str]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "dump"
        path.write_text("\n".join(lines), errors="replace")
        for reader in (cluster_load.load_cluster_file, load.load_topology_file):
            warnings: list[str] = []
            try:
                reader(str(path), warnings.append)
            except InputError as error:
                warnings.append(str(error))
            assert all(len(warning.splitlines()) == 1 and str(path) in warning for warning in warnings)
