"""Properties of the node parser: snapshots of many lines compared with a parser of one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slurmdl.cluster import reader
from slurmdl.cluster.snapshot import ClusterSnapshot

KEYS = ("CPUAlloc", "CPUEfctv", "CPUTot", "ActiveFeatures", "Gres", "GresUsed", "RealMemory", "AllocMem",
        "MemSpecLimit", "State", "Weight", "Partitions", "OS", "Reason", "Comment", "Extra", "XState")
RECORDED = [line for name in ("22.05.8", "24.11.5-tree", "26.05.5")
            for line in (Path(__file__).parents[1] / f"unit/data/scontrol-{name}.txt").read_text().splitlines()
            if line.startswith("NodeName=")]

values = st.one_of(
    st.sampled_from(["", "(null)", "N/A", "0", "8", "64", "007", "9" * 30, "IDLE", "DOWN*+DRAIN", "MIXED#", "a,b",
                     "gpu:a100:4(S:0-1)", "gpu:2K", "broken State=IDLE", "x  CPUTot=9 Weight=7", "\tState=IDLE"]),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12))


@st.composite
def node_lines(draw: st.DrawFn) -> str:
    """A line with a state; other keys in any order and number; values may contain blanks and keys."""
    pairs = draw(st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=20))
    gaps = st.sampled_from([" ", "  "])
    words = [f"{draw(gaps)}{key}={value}" for key, value in [*pairs, ("State", "IDLE")]]
    return f"NodeName=n{draw(st.integers(1, 9))}" + "".join(words)


def first_value(line: str, key: str) -> str:
    """Return the first value of a key, or "" if the line lacks it."""
    pairs = [(match[1], match[2]) for match in re.finditer(r"(?:^| )(\w+)=([^ ]*)", line)]
    return next((value for name, value in pairs if name == key), "")


@given(st.lists(st.one_of(node_lines(), st.sampled_from(RECORDED)), max_size=6))
def test_node_is_parsed_from_its_first_line(drawn: list[str]) -> None:
    snapshot = reader.parse_snapshot("".join(f"{line}\n" for line in drawn))
    first_lines = {first_value(line, "NodeName"): line for line in reversed(drawn)}
    assert set(snapshot.names) == set(first_lines)
    for node in snapshot.nodes:
        line = first_lines[node.name]
        assert reader.parse_snapshot(line).nodes == (node,)
        count = {key: min(2 ** 40, int(match[0])) if (match := re.match("[0-9]{1,15}", first_value(line, key))) else 0
                 for key in KEYS}
        cpus = count["CPUEfctv"] or count["CPUTot"]
        memory = max(0, count["RealMemory"] - count["MemSpecLimit"])
        assert (node.cpus, node.cpus_unallocated) == (cpus, max(0, cpus - count["CPUAlloc"]))
        assert (node.memory, node.memory_unallocated) == (memory, max(0, memory - count["AllocMem"]))
        assert node.weight == count["Weight"]
        states = [part.rstrip("*~#!%$@+^-") for part in first_value(line, "State").split("+") if part]
        assert list(node.state) == (states or ["UNKNOWN"])
        for key, names in (("ActiveFeatures", node.features), ("Partitions", node.partitions)):
            assert list(names) == [word for word in first_value(line, key).split(",")
                                   if word not in ("", "(null)", "N/A", "n/a")]


@given(st.lists(node_lines(), max_size=6))
def test_snapshot_json_round_trip(drawn: list[str]) -> None:
    snapshot = reader.parse_snapshot("\n".join(drawn))
    reread = ClusterSnapshot.from_json(json.loads(json.dumps(snapshot.to_json())))
    assert reread.nodes == snapshot.nodes
    assert ClusterSnapshot.from_nodes(snapshot.nodes).nodes == snapshot.nodes
