"""PySlurm as the reader, where it cannot be had in earnest: missing, of another release, hanging, failing.

What it reads from a real controller is held against scontrol by tests/cluster/test_pyslurm.py.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmdl.cluster import load, pyslurm_backend, scontrol_parser
from slurmdl.cluster.pyslurm_worker import version_mismatch_reason
from slurmdl.config import Config
from slurmdl.errors import UnavailableError
from slurmdl.launch import cluster_state
from slurmdl.slurm import process

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: a PySlurm whose controller has one node in one partition
WORKING = """
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
    default_memory_per_node=None, gres_types=[])))
"""
PARTITION = "PartitionName=main Default=YES OverSubscribe=NO PriorityTier=0 State=UP Topology=leaves"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the PySlurm that is found; beside it is a scontrol that shows one partition."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\necho {PARTITION}\n")
    (tmp_path / "scontrol").chmod(0o755)
    return lambda text: (tmp_path / "pyslurm.py").write_text(text) and None


def test_what_both_tell_is_one_snapshot(library: Callable[[str], None], tmp_path: Path) -> None:
    library(WORKING)
    found, zones = load.query_cluster("pyslurm")
    expected = scontrol_parser.parse_snapshot(
        "NodeName=n1 CPUAlloc=1 CPUEfctv=4 CPUTot=4 ActiveFeatures=a,b RealMemory=1000 State=MIXED+DRAIN Weight=0 "
        f"Partitions=main\n{PARTITION}\nReservationName=r Nodes=n[1-2] State=INACTIVE\nDefMemPerCPU = 100\n")
    assert found.to_json() == expected.to_json()
    assert (zones, (tmp_path / "asked").read_text()) == ("", "show partitions\n")


def test_generic_resources_and_zones_are_asked_of_scontrol(library: Callable[[str], None], tmp_path: Path) -> None:
    library(WORKING.replace("gres_types=[]", "gres_types=['gpu']"))
    load.query_cluster("pyslurm", with_topology=True)
    assert (tmp_path / "asked").read_text() == "show nodes\nshow partitions\nshow topoconf\nshow topology\n"


@pytest.mark.parametrize(("text", "says"), [
    ("import no_such_library", "No module named 'no_such_library'; valid: the PySlurm of the controller's release"),
    (WORKING.replace('"25.11.2"', '"25.5.0"'), "release 25.5.0 is not valid; valid: 25.11 and newer"),
    (WORKING.replace('"25.11.4"', '"26.05.5"'), "release 25.11.2 does not fit a controller of Slurm 26.05.5; "),
    ("raise RuntimeError('Unable to contact slurm controller')", "RuntimeError: Unable to contact slurm controller"),
    ("import sys; sys.stderr.write('fatal: no slurm.conf\\n'); sys.exit(1)", "fatal: no slurm.conf"),
    ("import os; os.kill(os.getpid(), 11)", "ended with status -11"),
    (WORKING.replace("weight=None", "heavy=None"), "AttributeError: .* has no attribute 'weight'"),
])
def test_a_pyslurm_that_cannot_be_used(library: Callable[[str], None], text: str, says: str) -> None:
    library(text)
    with pytest.raises(UnavailableError, match=f"^PySlurm: {says}") as caught:
        cluster_state.load_cluster_state(Config(cluster_backend="pyslurm"), "auto")
    assert "\n" not in str(caught.value)


def test_one_that_hangs(library: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    library("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(9)")
    monkeypatch.setattr(process, "ask", functools.partial(process.run_command, timeout=0.5))
    with pytest.raises(UnavailableError, match=r"^PySlurm: no answer within 0\.5 s$"):
        pyslurm_backend.fetch_with_pyslurm()


def test_without_scontrol_there_is_nothing(library: Callable[[str], None], tmp_path: Path) -> None:
    library(WORKING)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(UnavailableError, match="scontrol: Unable to contact"):
        pyslurm_backend.fetch_with_pyslurm()


@pytest.mark.parametrize(("own", "controller", "fits"), [
    ("25.11.2", "25.11.0-rc1", True), ("26.5.0", "26.05.5", True), ("25.11.2", "26.05.5", False),
    ("26.5.0", "25.11.4", False), ("24.11.0", "24.11.5", False), ("", "25.11.4", False), ("25.11.2", "", False),
])
def test_releases_that_fit(own: str, controller: str, fits: bool) -> None:
    assert (not version_mismatch_reason(own, controller)) == fits


def test_what_the_user_does_not_see() -> None:
    nodes = (("both", "IDLE", "main,hidden"), ("hid", "IDLE", "hidden"), ("none", "IDLE", ""), ("on", "IDLE", "main"))
    told = scontrol_parser.parse_snapshot("".join(f"NodeName={name} CPUTot={i} State={state} Partitions={partitions}\n"
                                  for i, (name, state, partitions) in enumerate(nodes))
                          + "PartitionName=main State=UP\nPartitionName=hidden State=UP\n")
    seen = scontrol_parser.parse_snapshot(
        "NodeName=both Gres=gpu:a100:1(S:0),gpu:a100:1(S:1),tmp:2K State=IDLE GresUsed=gpu:a100:1(IDX:0)\n"
        "NodeName=on Gres=gpu:a100:2 State=IDLE GresUsed=gpu:a100:0\nPartitionName=main State=UP Topology=leaves\n")
    found = pyslurm_backend._merge_snapshots(told, seen)
    assert [(node.name, node.cpus, node.partitions, node.gres) for node in found.nodes] == [
        ("both", 0, ("main",), {"gpu:a100": 2, "tmp": 2048}), ("none", 2, (), {}),
        ("on", 3, ("main",), {"gpu:a100": 2})]
    assert found.node_by_name["both"].gres_used == {"gpu:a100": 1}
    assert [(partition.name, partition.topology) for partition in found.partitions] == [("main", "leaves")]


def test_it_is_imported_in_a_process_of_its_own() -> None:
    importers = [path.name for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Import) and any(each.name == "pyslurm" for each in node.names)]
    assert importers == ["pyslurm_child.py"]
