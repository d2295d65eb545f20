"""Cluster snapshots from real and failing output of scontrol, and from JSON."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmdl.cluster import load, reader
from slurmdl.cluster.snapshot import ClusterSnapshot, Reservation
from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import slurm_conf

DATA = Path(__file__).parent / "data"
REAL = (DATA / "scontrol-22.05.8.txt").read_text()


def test_real_output() -> None:
    snapshot = reader.parse_snapshot(REAL)
    assert list(snapshot.names) == [f"n{i}" for i in range(1, 10)]
    n1, n2, n5, n9 = (snapshot.node_by_name[name] for name in ("n1", "n2", "n5", "n9"))
    assert (n1.cpus, n1.cpus_unallocated, n1.memory, n1.memory_unallocated) == (4, 2, 2000, 1500)
    assert n1.features == ("zoneA", "fast")
    assert n1.partitions == ("main", "all")
    assert not n1.responding
    assert n2.state == ("IDLE", "CLOUD", "DRAIN", "POWERED_DOWN")
    assert (n5.gres, n5.gres_used, n5.weight) == ({"gpu:a100": 2}, {"gpu:a100": 1}, 5)
    assert n9.features == ()
    assert snapshot.default_partition == "main"


def parse(text: str, kind: str = "nodes") -> dict[str, Any]:
    """Fields of the first record."""
    return vars(getattr(reader.parse_snapshot(text), kind)[0])


@pytest.mark.parametrize(("text", "expected"), [
    *((f"CPUTot=2 State={state} Reason=was State=IDLE before",
       {"state": tuple(states.split()), "responding": responding})
      for state, states, responding in (
        ("IDLE", "IDLE", True), ("DOWN*", "DOWN", False), ("IDLE*+DRAIN", "IDLE DRAIN", False),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE CLOUD POWERED_DOWN", True), ("MIXED#", "MIXED", True),
        ("IDLE+NOT_RESPONDING", "IDLE NOT_RESPONDING", False), ("ALLOCATED@", "ALLOCATED", True),
        ("", "UNKNOWN", True))),
    *((f"Gres={gres} State=IDLE", {"gres": expected}) for gres, expected in (
        ("(null)", {}), ("gpu:2", {"gpu": 2}), ("gpu:a100:4(S:0-1)", {"gpu:a100": 4}), ("tmp:1K", {"tmp": 1024}),
        ("gpu:a100:1(S:0),gpu:a100:1(S:1),craynetwork", {"gpu:a100": 2, "craynetwork": 1}),
        ("gpu:a100:2(IDX:0,2-3)", {"gpu:a100": 2}), ("lustre:no_consume:1", {"lustre": 1}),
        ("gpu:" + "9" * 40, {"gpu:" + "9" * 40: 1}), ("a:9999999T", {"a": 2 ** 40}))),
    ("CPUAlloc=1 CPUEfctv=6 CPUTot=8 RealMemory=8000 AllocMem=1000 State=MIXED MemSpecLimit=500",
     {"cpus": 6, "cpus_unallocated": 5, "memory": 7500, "memory_unallocated": 6500}),
    (f"CPUTot={'9' * 5000} RealMemory=-5 State=IDLE Weight=07", {"cpus": 2 ** 40, "memory": 0, "weight": 7}),
])
def test_fields_of_nodes(text: str, expected: dict[str, object]) -> None:
    fields = parse(f"NodeName=n1 {text}\n")
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize(("text", "config", "expected"), [
    ("DefMemPerNode=UNLIMITED", "DefMemPerNode    = UNLIMITED", {"memory_per_cpu": None, "memory_per_node": None}),
    ("DefMemPerNode=UNLIMITED", "DefMemPerCPU            = 100", {"memory_per_cpu": 100, "memory_per_node": None}),
    ("DefMemPerNode=2000", "DefMemPerCPU            = 100", {"memory_per_cpu": None, "memory_per_node": 2000}),
    ("DefMemPerCPU=500", "DefMemPerNode           = UNLIMITED", {"memory_per_cpu": 500, "memory_per_node": None}),
    ("OverSubscribe=EXCLUSIVE", "", {"oversubscribe": "EXCLUSIVE", "default": False, "priority": 1}),  # up to 25.11
    ("Exclusive=NODE GraceTime=0 OverSubscribe=NO", "", {"oversubscribe": "EXCLUSIVE"}),  # 26.05
    ("Exclusive=NO GraceTime=0 OverSubscribe=YES:4", "", {"oversubscribe": "YES:4"}),
    ("ExclusiveUser=NO OverSubscribe=FORCE:2", "", {"oversubscribe": "FORCE:2"}),
    ("Default=YES PriorityTier=7 Topology=t", "", {"default": True, "priority": 7, "topology": "t"}),
])
def test_fields_of_partitions(text: str, config: str, expected: dict[str, object]) -> None:
    fields = parse(f"PartitionName=main State=UP {text} MaxMemPerNode=UNLIMITED\nscontrol: show config\n{config}\n",
                   "partitions")
    assert {key: fields[key] for key in expected} == expected


def test_reservations() -> None:
    text = ("ReservationName=r1 StartTime=2026-11-21T15:57:41 EndTime=2026-11-21T16:57:41 Duration=01:00:00 "
            "Nodes=n[1-2] NodeCnt=2 Flags=SPEC_NODES Users=root State=ACTIVE BurstBuffer=(null)\n"
            "ReservationName=r2 StartTime=2026-11-21T16:57:41 Nodes=n3 NodeCnt=1 Flags=MAINT State=INACTIVE\n"
            "ReservationName=licences Nodes=(null) NodeCnt=0 Licenses=a:1 State=ACTIVE\n")
    assert reader.parse_snapshot(text).reservations == (
        Reservation("r1", ("n1", "n2"), True), Reservation("r2", ("n3",), False), Reservation("licences", (), True))
    with pytest.raises(InputError, match="65536"):
        reader.parse_snapshot(text.replace("n[1-2]", "n[1-1000000]"))


def test_partitions_name_their_topology() -> None:
    snapshot = reader.parse_snapshot((DATA / "scontrol-26.05.5.txt").read_text())
    partitions = (["blocks", "main"], ["flat"], ["none"])
    assert [*map(snapshot.topology_of, partitions)] == ["blocks", "flat", ""]
    assert snapshot.topology_of() == snapshot.topology_of(["main"])


def write_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "scontrol"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(("shell", "nodes", "zones", "error"), [
    (f"cat {DATA}/scontrol-22.05.8.txt", 9, 3, ""),
    (f"grep -v -e ^PartitionName -e ^SwitchName {DATA}/scontrol-22.05.8.txt\n"
     "echo 'slurm_load_partitions error: Access/permission denied' >&2\nexit 1", 9, 0, ""),
    ("echo NodeName=n1 State=IDLE; echo No reservations in the system", 1, 0, ""),
    ("echo 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1", 0, 0, "Unable to contact"),
    ("echo No nodes in the system", 0, 0, "scontrol: no node in its output"),
])
def test_one_query_of_nodes_and_zones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, nodes: int,
                                      zones: int, error: str) -> None:
    write_scontrol(tmp_path, monkeypatch, f"cat > {tmp_path}/stdin\n{shell}")
    if error:
        with pytest.raises(UnavailableError, match=error):
            load.query_cluster("auto", with_topology=True)
        return
    snapshot, output = load.query_cluster("auto", with_topology=True)
    assert (len(snapshot.nodes), len(output.records["SwitchName"]), output.has_zones) == (nodes, zones, zones > 0)
    parts = ("nodes", "partitions", "reservations", "config", "topoconf", "topology")
    assert (tmp_path / "stdin").read_text() == "".join(f"show {entity}\n" for entity in parts)


def test_missing_scontrol_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="scontrol"):
        load.query_cluster("auto")


def test_json_round_trip(tmp_path: Path) -> None:
    snapshot = reader.parse_snapshot(REAL)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(snapshot.to_json()))
    for loaded in (load.load_cluster_file(str(path)), ClusterSnapshot.from_json(json.loads(path.read_text())),
                  load.load_cluster_file(str(DATA / "scontrol-22.05.8.txt"))):
        assert (loaded.nodes, loaded.partitions, loaded.reservations) == (snapshot.nodes, snapshot.partitions, ())


@pytest.mark.parametrize("text", ["", "{", "{}", '{"nodes": [{"nmae": "n1"}]}', '{"nodes": []}', "nothing of use"])
def test_malformed_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load.load_cluster_file(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("data", "expected"), [
    ({"nodes": {}}, "nodes {...}: expected a list"), ({"nodes": [1]}, "nodes[0]: expected an object"),
    ([], "cluster JSON: expected an object"), ({}, "cluster JSON: nodes is missing"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"]}, {"name": "n2"}]}, "nodes[1]: state is missing"),
    ({"nodes": [{"nmae": "n1"}]}, "nodes[0]: unknown key 'nmae'; expected name, state, responding"),
    ({"nodes": [{"name": "n1", "state": "IDLE"}]}, "nodes[0]: state 'IDLE': expected a list"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"], "cpus": -1}]}, "nodes[0]: cpus -1: expected an integer, 0"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"], "memory": 1e300}]}, "memory 1e+300: expected"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"], "weight": 10 ** 30}]}, ": expected an integer"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"], "cpus": True}]}, "cpus True: expected"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"], "gres": {"gpu": "2"}}]}, "nodes[0]: gres: gpu '2': expected"),
    ({"nodes": [{"name": ["n1"], "state": ["IDLE"]}]}, "name [...]: expected a string"),
    ({"nodes": [{"name": "n1", "state": ["IDLE"]}] * 2}, "duplicate node n1"),
    ({"nodes": [], "partitions": [{"name": "a", "memory_per_cpu": "1"}]}, "[0]: memory_per_cpu '1': expected"),
    ({"nodes": [], "reservations": [{"name": "a", "nodes": [1]}]}, "reservations[0]: nodes[0] 1: expected"),
])
def test_json_with_invalid_field_is_rejected(data: object, expected: str) -> None:
    with pytest.raises(InputError) as error:
        ClusterSnapshot.from_json(data)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "expected", "names"), [
    (REAL[:REAL.index("NodeName=n2") + 100], "scontrol:3: 'NodeName=n2 .*: .* no State", ["n1"]),
    ("NodeName=n1 CPUTot=2 State=IDLE\nPartitionName=main\n", "scontrol:2: .*main': .* no State", ["n1"]),
    ("NodeName=n1 Arch=x86_64\nCPUTot=2\nState=IDLE\n", "scontrol:1: 'NodeName=n1 .*: .* no State", ["n1"]),
])
def test_incomplete_output_is_rejected_but_not_an_incomplete_file(
        tmp_path: Path, text: str, expected: str, names: list[str]) -> None:
    """Truncated text, or split lines: an error in the answer of a controller, a warning or nothing in a file."""
    with pytest.raises(InputError, match=expected):
        reader.parse_snapshot(text)
    path = tmp_path / "nodes.txt"
    path.write_text(text)
    assert list(load.load_cluster_file(str(path), lambda _: None).names) == names


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that records what it is asked, a slurm.conf, and a directory for kept answers."""
    write_scontrol(tmp_path, monkeypatch, f"cat >>{tmp_path}/stdin; cat {DATA}/scontrol-22.05.8.txt")
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nDefMemPerCPU=7\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def kept_file(directory: Path) -> Path:
    return directory / f"slurmdl-{os.geteuid()}/nodes"


def test_young_answer_is_used_again(controller: Path) -> None:
    first = load.ClusterQuery("auto", True, 15.0)
    first.keep()
    assert not kept_file(controller).exists() and first.answer
    first.keep()
    again = load.ClusterQuery("scontrol", True, 15.0)
    assert 0 < again.age_s < 15 and first.age_s == 0
    assert again.answer[0].to_json() == first.answer[0].to_json() and again.answer[1].has_zones
    assert (controller / "stdin").read_text().count("show nodes") == 1
    assert load.ClusterQuery("auto", True, 0.0).age_s == load.ClusterQuery("auto", False, 15.0).age_s == 0
    assert stat.S_IMODE(kept_file(controller).parent.stat().st_mode) == 0o700
    first.forget()
    assert load.ClusterQuery("auto", True, 15.0).age_s == 0


def age(directory: Path, age_s: float) -> None:
    header, _, text = kept_file(directory).read_text().partition("\n")
    key, _ = json.loads(header)
    kept_file(directory).write_text(f"{json.dumps([key, time.time() - age_s])}\n{text}")


@pytest.mark.parametrize(("change", "reason"), [
    (lambda d: age(d, 20), "too old"),
    (lambda d: age(d, -20), "in the future"),
    (lambda d: (d / "slurm.conf").write_text("ClusterName=other\n"), "another configuration"),
    (lambda d: kept_file(d).write_text("{}"), "no header"),
    (lambda d: kept_file(d).write_text("[1, 2]\n"), "another key"),
    (lambda d: kept_file(d).write_text("[" * 100_000), "hostile header"),
    (lambda d: kept_file(d).write_bytes(b"\xff\n"), "not UTF-8"),
    (lambda d: kept_file(d).chmod(0o666), "others may write the file"),
    (lambda d: kept_file(d).parent.chmod(0o777), "others may write the directory"),
    (lambda d: kept_file(d).rename(d / "x") and kept_file(d).symlink_to(d / "x"), "a symbolic link"),
    (lambda d: os.chown(kept_file(d), 12345, -1) if os.geteuid() == 0 else kept_file(d).unlink(), "of another user"),
    (lambda d: os.chown(kept_file(d).parent, 12345, -1) if os.geteuid() == 0 else kept_file(d).unlink(),
     "in the directory of another user"),
])
def test_answer_is_not_used_if(controller: Path, change: Callable[[Path], object], reason: str) -> None:
    query = load.ClusterQuery("auto", False, 15.0)
    assert query.answer
    query.keep()
    change(controller)
    assert load.ClusterQuery("auto", False, 15.0).age_s == 0, reason


def test_answer_is_kept_only_in_a_directory_of_this_user(controller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = load.ClusterQuery("auto", False, 15.0)
    assert query.answer
    (controller / "other").mkdir()
    kept_file(controller).parent.symlink_to(controller / "other")
    if os.geteuid() == 0:
        os.chown(kept_file(controller).parent, 12345, -1, follow_symlinks=False)
        query.keep()
        assert not list((controller / "other").iterdir())
    kept_file(controller).parent.unlink()
    kept_file(controller).parent.mkdir()
    kept_file(controller).parent.chmod(0o777)
    query.keep()
    assert not kept_file(controller).exists()
    kept_file(controller).parent.chmod(0o700)
    monkeypatch.setattr(load, "_MAX_KEPT_CHARS", 100)
    query.keep()
    assert not kept_file(controller).exists()
    (controller / "slurm.conf").unlink()
    query = load.ClusterQuery("auto", False, 15.0)
    assert query.answer
    query.keep()
    assert not kept_file(controller).exists(), "the cluster is unknown"


def test_defaults_in_slurm_conf_save_a_query(controller: Path) -> None:
    snapshot = load.query_cluster("auto")[0]
    assert (controller / "stdin").read_text() == "show nodes\nshow partitions\nshow reservations\n"
    assert snapshot.name == "c"
    (controller / "slurm.conf").write_text("Include other.conf\n")
    assert load.query_cluster("auto")[0].name != "c"
    assert "show config" in (controller / "stdin").read_text()


@pytest.mark.parametrize(("text", "expected"), [
    ("ClusterName=a\n", {"ClusterName": "a"}),
    ("clustername = a # b\nDEFMEMPERCPU=5 X=1\n", {"ClusterName": "a", "DefMemPerCPU": "5"}),
    ('ClusterName="a"\nDefMemPerNode=UNLIMITED\n', {"ClusterName": "a", "DefMemPerNode": "UNLIMITED"}),
    ("X=1 ClusterName=a\nPartitionName=p DefMemPerCPU=9 \\\n DefMemPerNode=8\n", {"ClusterName": "a"}),
    ("#ClusterName=b\nClusterName=a\nDefMemPerCPUx=1\n", {"ClusterName": "a"}),
    ("ClusterName=a\nClusterName=b\n", {"ClusterName": "b"}),
    ("DefMemPerCPU=5\n", None), ("ClusterName=a\n include b.conf\n", None), ("ClusterName=A\n", None), ("", None),
])
def test_defaults_in_slurm_conf(controller: Path, text: str, expected: dict[str, str] | None) -> None:
    (controller / "slurm.conf").write_text(text)
    assert slurm_conf.read_cluster_defaults() == expected
