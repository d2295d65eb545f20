"""PySlurm backend with fake PySlurm modules: missing, of another release, hanging, failing.

tests/cluster/test_pyslurm.py compares it with scontrol on a real controller.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmdl.cluster import load, reader
from slurmdl.cluster.pyslurm_worker import version_mismatch_reason
from slurmdl.config import Config
from slurmdl.errors import UnavailableError
from slurmdl.launch import cluster_state
from slurmdl.slurm import process

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: a PySlurm module with one node in two partitions
WORKING_PYSLURM = """
from types import SimpleNamespace as Thing
__version__ = "25.11.2"
print("noise")
def collection(*things):
    return Thing(load=lambda: {thing.name: thing for thing in things})
Nodes = collection(Thing(name="n1", allocated_cpus=1, effective_cpus=4, total_cpus=4, active_features=["a", "b"],
    real_memory=1000, allocated_memory=0, state="MIXED+DRAIN", memory_reserved_for_system=None, weight=None,
    partitions=["main", "hidden"]))
Partitions = collection(*(Thing(name=name, is_default=name == "main", oversubscribe="NO", priority_tier=None,
    state="UP", default_memory_per_cpu=None, default_memory_per_node="UNLIMITED") for name in ("main", "hidden")))
Reservations = collection(Thing(name="r", nodes="n[1-2]", is_active=False))
slurmctld = Thing(Config=Thing(load=lambda: Thing(version="25.11.4", default_memory_per_cpu=100,
    default_memory_per_node=None, gres_types=[], cluster_name="c")))
"""
PARTITION = "PartitionName=main Default=YES OverSubscribe=NO PriorityTier=0 State=UP Topology=leaves"


@pytest.fixture
def write_pyslurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write a fake pyslurm module, and an scontrol in PATH that shows one partition."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat > {tmp_path}/queries\necho {PARTITION}\n")
    (tmp_path / "scontrol").chmod(0o755)
    return lambda text: (tmp_path / "pyslurm.py").write_text(text) and None


def test_snapshot_merges_pyslurm_and_scontrol(write_pyslurm: Callable[[str], None], tmp_path: Path) -> None:
    write_pyslurm(WORKING_PYSLURM)
    snapshot, output = load.query_cluster("pyslurm")
    expected = reader.parse_snapshot(
        "NodeName=n1 CPUAlloc=1 CPUEfctv=4 CPUTot=4 ActiveFeatures=a,b RealMemory=1000 State=MIXED+DRAIN Weight=0 "
        f"Partitions=main\n{PARTITION}\nReservationName=r Nodes=n[1-2] State=INACTIVE\nDefMemPerCPU = 100\n"
        "ClusterName = c\n")
    assert snapshot.to_json() == expected.to_json()
    assert (output.has_zones, (tmp_path / "queries").read_text()) == (False, "show partitions\n")
    write_pyslurm(WORKING_PYSLURM.replace("gres_types=[]", "gres_types=['gpu']"))
    load.query_cluster("pyslurm", with_topology=True)
    assert (tmp_path / "queries").read_text() == "show nodes\nshow partitions\nshow topoconf\nshow topology\n"


@pytest.mark.parametrize(("text", "expected"), [
    ("import no_such_library", "No module named 'no_such_library'; expected the PySlurm of the controller's release"),
    (WORKING_PYSLURM.replace('"25.11.2"', '"25.5.0"'), "release 25.5.0: too old; expected 25.11 or newer"),
    (WORKING_PYSLURM.replace('"25.11.4"', '"26.05.5"'), "release 25.11.2 does not fit a controller of Slurm 26.05.5"),
    ("raise RuntimeError('Unable to contact slurm controller')", "RuntimeError: Unable to contact slurm controller"),
    ("import sys; sys.stderr.write('fatal: no slurm.conf\\n'); sys.exit(1)", "fatal: no slurm.conf"),
    ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
    (WORKING_PYSLURM.replace("weight=None", "heavy=None"), "AttributeError: .* has no attribute 'weight'"),
])
def test_unusable_pyslurm_is_reported(write_pyslurm: Callable[[str], None], text: str, expected: str) -> None:
    write_pyslurm(text)
    with pytest.raises(UnavailableError, match=f"^PySlurm: {expected}") as error:
        cluster_state.load_cluster_state(Config(cluster_backend="pyslurm"), "auto")
    assert "\n" not in str(error.value)


def test_hanging_pyslurm_and_failing_scontrol(write_pyslurm: Callable[[str], None], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    write_pyslurm(WORKING_PYSLURM)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(UnavailableError, match="scontrol: Unable to contact"):
        load._fetch_with_pyslurm()
    write_pyslurm("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(9)")
    monkeypatch.setattr(process, "run_command", functools.partial(process.run_command, timeout=0.5))
    with pytest.raises(UnavailableError, match=r"^PySlurm: no answer within 0\.5 s$"):
        load._fetch_with_pyslurm()


@pytest.mark.parametrize(("pyslurm", "controller", "matches"), [
    ("25.11.2", "25.11.0-rc1", True), ("26.5.0", "26.05.5", True), ("25.11.2", "26.05.5", False),
    ("26.5.0", "25.11.4", False), ("24.11.0", "24.11.5", False), ("", "25.11.4", False), ("25.11.2", "", False),
])
def test_version_match(pyslurm: str, controller: str, matches: bool) -> None:
    assert (not version_mismatch_reason(pyslurm, controller)) == matches


def test_hidden_partitions_and_nodes_are_removed() -> None:
    nodes = (("both", "IDLE", "main,hidden"), ("hid", "IDLE", "hidden"), ("none", "IDLE", ""), ("on", "IDLE", "main"))
    all_nodes = reader.parse_snapshot(
        "".join(f"NodeName={name} CPUTot={i} State={state} Partitions={partitions}\n"
                for i, (name, state, partitions) in enumerate(nodes))
        + "PartitionName=main State=UP\nPartitionName=hidden State=UP\n")
    visible = reader.parse_snapshot(
        "NodeName=both Gres=gpu:a100:1(S:0),gpu:a100:1(S:1),tmp:2K State=IDLE GresUsed=gpu:a100:1(IDX:0)\n"
        "NodeName=on Gres=gpu:a100:2 State=IDLE GresUsed=gpu:a100:0\nPartitionName=main State=UP Topology=leaves\n")
    merged = load._merge_snapshots(all_nodes, visible)
    assert [(node.name, node.cpus, node.partitions, node.gres) for node in merged.nodes] == [
        ("both", 0, ("main",), {"gpu:a100": 2, "tmp": 2048}), ("none", 2, (), {}),
        ("on", 3, ("main",), {"gpu:a100": 2})]
    assert merged.node_by_name["both"].gres_used == {"gpu:a100": 1}
    assert [(partition.name, partition.topology) for partition in merged.partitions] == [("main", "leaves")]


def test_pyslurm_is_imported_only_by_worker() -> None:
    importers = [path.name for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Import) and any(each.name == "pyslurm" for each in node.names)]
    assert importers == ["pyslurm_worker.py"]
