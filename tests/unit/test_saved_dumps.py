"""Saved text of scontrol and sinfo as --topology and --cluster, of large systems, and with faulty lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_dumps import PARTITIONS, STATES, format_node, format_show_topology, format_sinfo

from slurmdl.cli.main import main
from slurmdl.cluster import load as cluster_load
from slurmdl.cluster import reader
from slurmdl.cluster.reader import parse_sinfo_state
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import InputError
from slurmdl.topology import load
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import Topology

NODES = 4000
TREE = tree_topology([1, 8, 200, NODES])  # n0001 to n4000
SHOWN = format_show_topology(TREE)
SINFO_N_L = """\
Thu Nov 26 19:49:12 2026
NODELIST   NODES PARTITION       STATE CPUS    S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE REASON
n1             1     main*       mixed 2       2:1:1   4000        0      1    zoneA none
n1             1       all       mixed 2       2:1:1   4000        0      1    zoneA none
n1             1       all       mixed 2       2:1:1   4000        0      1    zoneA none
n2             1     main*        idle 2       2:1:1   4000        0      7    zoneB none
n3             1     main*    drained* 2       2:1:1   4000        0      1    zoneB bad disk = 3 State=I
"""


@pytest.fixture(autouse=True)
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none" / "slurm.conf"))


def read_topology(text: str, name: str = "dump.txt") -> tuple[Topology, list[str]]:
    Path(name).write_text(text)
    warnings: list[str] = []
    return load.load_topology_file(name, warnings.append).get(), warnings


def read_cluster(text: str) -> tuple[ClusterSnapshot, list[str]]:
    Path("nodes.txt").write_text(text)
    warnings: list[str] = []
    return cluster_load.load_cluster_file("nodes.txt", warnings.append), warnings


def test_large_tree_with_login_nodes_in_the_root_switch() -> None:
    text = SHOWN.replace(f"Nodes=n[0001-{NODES}] Sw", f"Nodes=login[1-4],n[0001-{NODES}] Sw")
    assert "login" in text
    topology, warnings = read_topology(f"$ scontrol show topology\n{text}")
    assert warnings == []
    assert (topology.zones, topology.nodes) == (TREE.zones, TREE.nodes)
    assert topology.parent.tolist() == TREE.parent.tolist()
    assert topology.notes == ("4 nodes below no leaf switch, thus in no zone: login[1-4]",)


@pytest.mark.parametrize("one_line", [True, False])
@pytest.mark.parametrize("details", [True, False])
def test_large_dump_of_nodes(one_line: bool, details: bool) -> None:
    """With a prompt, CRLF line ends, and a last record that is cut off after its state."""
    records = "".join(format_node(number, one_line, details) for number in range(1, NODES + 1))
    text = ("$ scontrol show nodes\n" + records + format_node(NODES + 1, one_line, details)).replace("\n", "\r\n")
    snapshot, warnings = read_cluster(text[:text.rindex("ThreadsPerCore")])
    assert len(snapshot.names) == NODES
    used = [STATES[i % len(STATES)][1] for i in range(NODES)]
    assert snapshot.cpus_unallocated.tolist() == [128 - cpus for cpus in used]
    assert {profile.responding for profile in snapshot.profiles if "DOWN" in profile.state} == {False}
    line = 2 + NODES * (1 if one_line else format_node(1, False, details).count("\n")) \
        + (not one_line) * sum("DRAIN" in STATES[i % len(STATES)][0] for i in range(NODES))
    assert [warning for warning in warnings if "GresUsed" not in warning] == [
        next(warning for warning in warnings if warning.startswith(f"nodes.txt:{line}: 'NodeName=n{NODES + 1} ")
             and warning.endswith("the record is cut off; skipped"))]


def test_used_gpus_without_details_and_without_tres() -> None:
    """Without -d, GPUs of nodes in use count as used if Slurm does not count them in AllocTRES."""
    snapshot, warnings = read_cluster("".join(format_node(i, True, False, counts_gres=False) for i in (1, 2, 3)))
    assert [dict(node.gres_used) for node in snapshot.nodes] == [{"gpu:a100": n} for n in (0, 4, 4)]
    assert len(warnings) == 1
    assert warnings[0].startswith("nodes.txt: 3 nodes without GresUsed (scontrol without -d), or the same in CfgTRES")
    draining = format_node(2, True, False, counts_gres=False).replace("State=MIXED", "State=MIXED+DRAIN")
    assert read_cluster(draining)[0].nodes[0].gres_used == {"gpu:a100": 4}
    warnings = read_cluster("".join(format_node(i, True, False) for i in (1, 2, 3)))[1]
    assert warnings == ["nodes.txt: 3 nodes without GresUsed (scontrol without -d); used generic resources are those "
                        "of AllocTRES"]
    mixed = "gpu:a100:4,gpu:h100:2"
    snapshot, warnings = read_cluster(format_node(1, True, False, mixed) + format_node(2, True, False, mixed))
    assert [list(node.gres_used.values()) for node in snapshot.nodes] == [[0, 0], [4, 2]]
    assert [warning.partition(" without")[0] for warning in warnings] == ["nodes.txt: 1 node"] * 2


@pytest.mark.parametrize("name", ["dump.txt", "topology.conf", "topology.yaml", "topology.json", "dump"])
def test_content_decides_not_the_name(name: str) -> None:
    for text in (SHOWN, format_node(1, False) + PARTITIONS + SHOWN, SINFO_N_L + SHOWN):
        assert read_topology(text, name)[0].zones == TREE.zones
    yaml = "- topology: t\n  cluster_default: true\n  tree:\n    switches:\n    - switch: s1\n      nodes: n[1-2]\n"
    assert read_topology(yaml, name)[0].zones == ("s1",)
    assert read_topology(json.dumps(TREE.to_json()), name)[0].nodes == TREE.nodes


def test_topology_conf_is_still_strict() -> None:
    """A line of topology.conf with an unknown key is an error, and so is Level in the file next to slurm.conf."""
    with pytest.raises(InputError, match="unknown key 'Level'"):
        read_topology("SwitchName=s1 Nodes=n1 Level=0\n")
    Path("none").mkdir()
    Path("none/topology.conf").write_text(SHOWN)
    with pytest.raises(InputError, match="unknown key 'Level'"):
        load.load_slurm_topology_file()


@pytest.mark.parametrize(("text", "zones", "expected"), [
    ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-\n", ("s1",),
     ["dump.txt:2: 'SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-': hostlist"]),
    ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1\nwhat?\nSwitchName=r Level=1 LinkSpeed=1 Nodes=n1 Switches=s1,s2\n",
     ("s1", "r"), ["dump.txt:2: 'what?': not understood; skipped",
                   "dump.txt:3: 'SwitchName=r Level=1 LinkSpeed=1 Nodes=n1 Switches=s1,s2': 1 zone below 'r' not"]),
    ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1\nSwitchName=r Level=1 LinkSpeed=1 Nodes=n1,n2\n", ("s1",),
     ["dump.txt:2: 'SwitchName=r Level=1 LinkSpeed=1 Nodes=n1,n2': Level=1 without Switches"]),
    ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n2\n", ("s1",),
     ["dump.txt:2: 'SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n2': zone 's1' is also in line 1"]),
    (2 * "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1\n", ("s1",), []),
    ("BlockName=b1 BlockIndex=0 Nodes=n[1-2]\nBlockName=b2 BlockIndex=1 Nodes=n[3-4]\n", ("b1", "b2"), []),
    ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1\n" + "x y\n" * 9, ("s1",), ["dump.txt:2: "] + ["dump.txt:"] * 4
     + ["dump.txt: 4 more lines not understood"]),
])
def test_lines_that_are_not_understood(text: str, zones: tuple[str, ...], expected: list[str]) -> None:
    topology, warnings = read_topology(text)
    assert topology.zones == zones
    assert len(warnings) == len(expected), warnings
    assert all(warning.startswith(begin) for warning, begin in zip(warnings, expected, strict=True)), warnings


@pytest.mark.parametrize(("read", "text", "expected"), [
    (read_cluster, "NodeName=n1 State=IDLE\n" + "KEY=VALUE\n" * 10_000, "'KEY=VALUE': not understood"),
    (read_cluster, "NODELIST STATE\n" + "n[1-65536] idle\n" * 17, "nodes.txt:18: 'n[1-65536] idle': hostlist"),
    (read_topology, "".join(f"SwitchName=s{i} Level={i} LinkSpeed=1 Switches=s{i - 1}\n" for i in range(1, 100)),
     "more than 63 levels"),
    (read_topology, "SwitchName=s Level=0 LinkSpeed=1 Nodes=n1\n" + "".join(
        f"SwitchName=r{i} Level=1 LinkSpeed=1 Nodes=m[1-65536] Switches=s\n" for i in range(17)), "more than 262144"),
])
def test_numbers_of_names_fields_and_levels_are_bounded(
        read: Callable[[str], tuple[object, list[str]]], text: str, expected: str) -> None:
    """So that a file without sense cannot take minutes."""
    try:
        messages = read(text)[1]
    except InputError as error:
        messages = [str(error)]
    assert any(expected in message for message in messages), messages


def test_faulty_parts_of_a_cluster_dump() -> None:
    text = ("Defaulted container slurmctld\nNodeName=n1 CPUTot=2 State=IDLE CfgTRES=cpu=2\nNodeName=n2 CPUTot=2\n"
            "PartitionName=main\nReservationName=r Nodes=n[1- State=ACTIVE\nNodeName=n3 State=IDLE CfgTRES=cpu=2\n")
    snapshot, warnings = read_cluster(text)
    assert (snapshot.names, snapshot.partitions, snapshot.reservations) == (("n1", "n3"), (), ())
    assert [warning.split(" ")[0] for warning in warnings] == [f"nodes.txt:{line}:" for line in (1, 3, 4, 5)]
    with pytest.raises(InputError, match="the record has no State"):
        reader.parse_snapshot(text)  # live output must be complete
    Path("nodes.txt").write_bytes(b"NodeName=n1 State=IDLE Reason=d\xe9faut\n")
    warnings.clear()
    assert cluster_load.load_cluster_file("nodes.txt", warnings.append).names == ("n1",)
    assert warnings == ["nodes.txt:1: not UTF-8 text; the bytes that are not are replaced"]


@pytest.mark.parametrize("text", ["nothing of use\n", "n1 idle\nn2 mix\n", format_node(1, True)[:40],
                                  "PARTITION AVAIL NODES(A/I/O/T) NODELIST\nmain* up 2/4/0/6 n1\n"])
def test_file_of_which_nothing_is_understood(text: str) -> None:
    with pytest.raises(InputError, match=r"nodes\.txt: has no node; expected JSON .* show nodes.* sinfo"):
        read_cluster(text)
    with pytest.raises(InputError, match=r"dump\.txt: has no topology; expected topology\.conf, .* show topology"):
        read_topology(text)


def test_sinfo_in_its_forms() -> None:
    snapshot, warnings = read_cluster(SINFO_N_L)
    n1, n2, n3 = snapshot.nodes
    assert (n1.state, n1.cpus, n1.cpus_unallocated, n1.partitions) == (("MIXED",), 2, 0, ("main", "all"))
    assert (n2.state, n2.cpus_unallocated, n2.memory_unallocated, n2.weight) == (("IDLE",), 2, 4000, 7)
    assert (n3.state, n3.responding) == (("IDLE", "DRAIN"), False)
    assert [(p.name, p.default) for p in snapshot.partitions] == [("main", True), ("all", False)]
    assert warnings == ["nodes.txt:2: table of sinfo: free CPUs of 1 mixed node not known, none is assumed; features "
                        "are cut off and not used"]
    snapshot, warnings = read_cluster(SINFO_N_L.replace("  4000 ", "206393 "))
    assert snapshot.memory.tolist() == [206393] * 3
    assert "MEMORY with 6 digits is used as printed, but may lack digits" in warnings[0]
    # by partition, with an empty column and an empty partition
    snapshot, _ = read_cluster(
        "PARTITION AVAIL  TIMELIMIT   JOB_SIZE ROOT OVERSUBS     GROUPS  NODES       STATE RESERVATION NODELIST\n"
        "main*        up   infinite 1-infinite   no       NO        all      2       idle~             n[2,4]\n"
        "main*        up   infinite 1-infinite   no       NO        all      1       maint           r n1\n"
        "old       inact   infinite 1-infinite   no       NO        all      0         n/a             \n")
    assert {node.name: node.state for node in snapshot.nodes} == {
        "n2": ("IDLE", "POWERED_DOWN"), "n4": ("IDLE", "POWERED_DOWN"), "n1": ("IDLE", "MAINTENANCE")}


@pytest.mark.parametrize("separator", ["|", ",", " "])
def test_sinfo_with_own_columns(separator: str) -> None:
    """CPUs are sums over the nodes of a row."""
    rows = ("HOSTNAMES", "STATECOMPLETE", "CPUS(A/I/O/T)", "MEMORY", "ALLOCMEM", "GRES", "GRES_USED"), \
        ("n1", "mixed+planned", "3/5/0/8", "1000", "400", "gpu:a100:4(S:0)", "gpu:a100:1(IDX:0)"), \
        ("n[2,4]", "idle", "0/16/0/16", "1000", "0", "(null)", "(null)"), \
        ("n[5-6]", "alloc", "12/4/0/16", "1000", "0", "(null)", "(null)"), \
        ("n[7-8]", "mix", "4/12/0/16", "1000", "0", "(null)", "(null)")
    snapshot, warnings = read_cluster("".join(separator.join(row) + "\n" for row in rows))
    n1, n2, n4, *others = snapshot.nodes
    assert (n1.state, n1.cpus, n1.cpus_unallocated, n1.memory_unallocated) == (("MIXED", "PLANNED"), 8, 5, 600)
    assert (dict(n1.gres), dict(n1.gres_used)) == ({"gpu:a100": 4}, {"gpu:a100": 1})
    assert (n2.cpus, n4.cpus_unallocated, n4.name) == (8, 8, "n4")
    assert [(node.cpus, node.cpus_unallocated, node.memory_unallocated) for node in others] == [(8, 0, 0)] * 4
    assert warnings == ["nodes.txt:1: table of sinfo: free CPUs of 2 mixed nodes not known, none is assumed; no "
                        "column PARTITION, partitions are not known"]


def test_sinfo_states_replace_those_of_scontrol() -> None:
    nodes = "".join(format_node(i, False) for i in range(1, 6))
    table = format_sinfo([("n0001", "drain*"), ("n0002", "idle"), ("n0003", "mix"), ("n0009", "idle")], (10, -8),
                         ("NODELIST", "STATE"))
    for text in (nodes + table, table + nodes):
        merged = {node.name: node for node in read_cluster(text)[0].nodes}
        assert (merged["n0001"].state, merged["n0001"].responding) == (("IDLE", "DRAIN"), False)
        assert (merged["n0002"].cpus_unallocated, dict(merged["n0002"].gres_used)) == (128, {})
        assert (merged["n0003"].cpus_unallocated, merged["n0003"].cpus) == (0, 128)
        assert merged["n0004"] == read_cluster(nodes)[0].node_by_name["n0004"]
        assert merged["n0009"].state == ("IDLE",)
    kept = read_cluster(nodes + "NODELIST STATE\nn0002 mix\n")[0].node_by_name["n0002"]
    assert (kept.cpus_unallocated, dict(kept.gres_used)) == (96, {"gpu:a100": 1})  # agrees with mixed
    busy = read_cluster(nodes + "NODELIST STATE CPUS\nn0001 mix 128\nn7 drng 4\n")[0].node_by_name
    assert busy["n0001"].cpus_unallocated == busy["n7"].cpus_unallocated == 0


@pytest.mark.parametrize(("text", "expected"), [
    ("idle", (("IDLE",), True)), ("alloc+", (("ALLOCATED", "COMPLETING"), True)),
    ("down$", (("DOWN", "MAINTENANCE"), True)),
    ("mix-", (("MIXED", "PLANNED"), True)), ("drng@", (("ALLOCATED", "DRAIN", "REBOOT_REQUESTED"), True)),
    ("DRAIN+IDLE*", (("IDLE", "DRAIN"), False)), ("idle+not_responding", (("IDLE",), False)),
    ("comp*", (("ALLOCATED", "COMPLETING"), False)),
    ("powered_dow", (("UNKNOWN", "POWERED_DOWN"), True)), ("alloca", (("ALLOCATED",), True)), ("busy", None),
    ("", None), ("ß", None)])
def test_sinfo_states(text: str, expected: object) -> None:
    assert parse_sinfo_state(text) == expected


@pytest.mark.parametrize("arguments", [
    ["place", "-N2", "--topology=all.txt", "--cluster=all.txt"], ["topology", "show", "all.txt"],
    ["topology", "check", "all.txt", "--cluster=all.txt", "--strict"], ["topology", "diff", "all.txt", "all.txt"],
    ["topology", "convert", "all.txt", "--format=yaml"], ["topology", "features", "all.txt", "--cluster=all.txt"],
    ["place", "-N2", "--topology=all.txt", "--cluster=sinfo.txt"]])
def test_commands_read_one_file_with_everything(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [f"n{i:04d}" for i in range(1, 9)]
    shown = "".join(f"SwitchName=s{i} Level=0 LinkSpeed=1 Nodes=n[{4 * i + 1:04d}-{4 * i + 4:04d}]\n" for i in (0, 1))
    Path("all.txt").write_text("$ scontrol -d show nodes\n" + "".join(format_node(i, False) for i in range(1, 9))
                               + f"$ scontrol show partitions\n{PARTITIONS}$ scontrol show topology\n{shown}"
                               "SwitchName=r Level=1 LinkSpeed=1 Nodes=n[0001-0008] Switches=s[0-1]\n$ sinfo -N\n"
                               + format_sinfo([("n0001", "idle")], (10, 8), ("NODELIST", "STATE")))
    Path("sinfo.txt").write_text(format_sinfo([(name, "idle") for name in nodes], (10, 8), ("NODELIST", "STATE")))
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "not understood" not in output.err
    assert output.out
