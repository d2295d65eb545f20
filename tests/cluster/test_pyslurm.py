"""PySlurm as the reader, beside scontrol, on a real controller: field by field the same, and how long each takes.

Slurm and PySlurm are those that `tools/build-pyslurm` puts into a root of another Debian.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from releases import RootCluster, root_of, skip_reason

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SUITE = "forky"
#: four nodes that run jobs, and others of every kind that has no slurmd: down, of the cloud, of the future, in
#: partitions that are hidden or of a group, and in none
LINES = """\
GresTypes=gpu,tmp,craynetwork
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=1000000
NodeName=n1 Port=17001 CPUs=4 RealMemory=4000 Gres=gpu:a100:2,tmp:2K Feature=zoneA,fast Weight=5
NodeName=n2 Port=17002 CPUs=4 RealMemory=4000 Gres=gpu:a100:1,gpu:h100:1 Feature=zoneA
NodeName=n3 Port=17003 CPUs=4 RealMemory=4000 MemSpecLimit=500 Feature=zoneB Weight=1000000
NodeName=n4 Port=17004 CPUs=4 RealMemory=4000
NodeName=d[1-2] Port=[17101-17102] CPUs=4 RealMemory=4000 Gres=gpu:2,craynetwork State=DOWN Reason=broken
NodeName=c[1-2] Port=[17201-17202] CPUs=8 RealMemory=8000 Feature=far State=CLOUD
NodeName=f1 Port=17301 CPUs=8 RealMemory=8000 State=FUTURE
NodeName=h1 Port=17401 CPUs=8 RealMemory=8000 State=UNKNOWN
NodeName=g1 Port=17402 CPUs=8 RealMemory=8000 State=UNKNOWN
NodeName=alone Port=17403 CPUs=8 RealMemory=8000 State=DRAIN
PartitionName=main Nodes=n[1-4],d[1-2],c[1-2],f1 Default=YES MaxTime=INFINITE State=UP
PartitionName=percpu Nodes=n[1-4] DefMemPerCPU=500 PriorityTier=10 OverSubscribe=YES:4 Topology=blocks
PartitionName=pernode Nodes=n[1-2],d1 DefMemPerNode=2000 OverSubscribe=EXCLUSIVE State=DRAIN Topology=flat
PartitionName=forced Nodes=n4 OverSubscribe=FORCE:2 State=INACTIVE PriorityTier=0
PartitionName=closed Nodes=n3,c2 State=DOWN
PartitionName=hidden Nodes=n1,h1 Hidden=YES
PartitionName=group Nodes=n2,g1 AllowGroups=root
""".replace("Port=", "NodeHostname=login NodeAddr={address} Port=")
GRES = """\
NodeName=n1 Name=gpu Type=a100 File=/etc/slurm/gpu[0-1]
NodeName=n1 Name=tmp Count=2K Flags=CountOnly
NodeName=n2 Name=gpu Type=a100 File=/etc/slurm/gpu0
NodeName=n2 Name=gpu Type=h100 File=/etc/slurm/gpu1
"""
TOPOLOGY = """\
- topology: leaves
  cluster_default: true
  tree:
    switches:
      - {switch: spine, children: "leaf[1-2]"}
      - {switch: leaf1, nodes: "n[1-2],d[1-2],h1,g1,alone"}
      - {switch: leaf2, nodes: "n[3-4],c[1-2],f1"}
- topology: blocks
  cluster_default: false
  block:
    block_sizes: [2]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
- topology: flat
  cluster_default: false
  flat: true
"""
#: eight nodes that run slurmd, and as many of a cloud as a test wants
MANY = """\
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=1000000
NodeName=n[1-8] Port=[17001-17008] CPUs=4 RealMemory=4000 Feature=zoneA
{cloud}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=n[1-4] MaxTime=INFINITE State=UP
""".replace("Port=", "NodeHostname=login NodeAddr={{address}} Port=")
CLOUD = "NodeName=c[1-{}] NodeAddr={{address}} CPUs=64 RealMemory=256000 Feature=zoneB,fast State=CLOUD"
BOTH = """\
import json
from slurmdl.cluster import read
found = [read.from_controller(backend, True) for backend in ("scontrol", "pyslurm")]
print(json.dumps([(snapshot.to_json(), zones) for snapshot, zones in found]))
"""
TIMED = """\
import json, sys, time
from slurmdl.cluster import read
seconds = {"scontrol": [], "pyslurm": []}
for i in range(int(sys.argv[1])):
    for backend in sorted(seconds, reverse=i % 2):
        began = time.perf_counter()
        snapshot = read.from_controller(backend)[0]
        seconds[backend].append(time.perf_counter() - began)
print(json.dumps([len(snapshot.names), seconds]))
"""


class PySlurmCluster(RootCluster):
    """A cluster on which slurmdl and PySlurm can be imported."""

    def __init__(self, here: Path, nodes: int, **lines: Any) -> None:
        done = subprocess.run([ROOT / "tools/build-pyslurm", SUITE], check=True, timeout=1500, stdout=subprocess.PIPE,
                              text=True)
        super().__init__(root_of(SUITE), here, nodes, None, **lines)
        shutil.copytree(ROOT / "slurmdl", self.shared / "python/slurmdl")
        self._env = {"PYTHONPATH": f"{self.shared}/python:{done.stdout.strip()}"}

    def python(self, code: str, *words: str, as_root: bool = False, status: int = 0) -> str:
        done = self.run(["python3", "-c", code, *words], as_root=as_root, env=self._env, timeout=300)
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    def root(self, *argv: str) -> None:
        done = self.run(argv, as_root=True)
        assert done.returncode == 0, done.stderr

    def snapshot(self, as_root: bool = False) -> dict[str, Any]:
        """What both readers give, the same; while states change, after another look."""
        for _ in range(5):
            scontrol, pyslurm = json.loads(self.python(BOTH, as_root=as_root))
            if scontrol == pyslurm:
                break
            time.sleep(1)
        apart = [(own, other) for key, records in scontrol[0].items()
                 for own, other in itertools.zip_longest(pyslurm[0][key], records) if own != other]
        assert not [(own, other) if None in (own, other) else
                    {key: (own[key], other[key]) for key in ("name", *own) if own[key] != other[key]}
                    for own, other in apart]
        assert pyslurm[1] == scontrol[1] != ""
        return dict(pyslurm[0])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := skip_reason(SUITE, "pyslurm"):
        pytest.skip(why)
    return tmp_path_factory.mktemp("pyslurm")


@pytest.fixture(scope="module")
def cluster(here: Path) -> Iterator[PySlurmCluster]:
    files = {"gres.conf": GRES, "topology.yaml": TOPOLOGY, "gpu0": "", "gpu1": ""}
    cluster = PySlurmCluster(here / "host", 4, lines=LINES, files=files)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def rested(cluster: PySlurmCluster) -> Iterator[PySlurmCluster]:
    """The same with no job, all nodes of it idle again."""
    yield cluster
    cluster.cancel_all()
    cluster.run(["scontrol", "update", "NodeName=n2,n4", "State=RESUME"], as_root=True)


def nodes(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in snapshot["nodes"]}


def names(records: Sequence[dict[str, Any]]) -> list[str]:
    return [record["name"] for record in records]


def test_a_cluster_at_rest(rested: PySlurmCluster) -> None:
    seen = rested.snapshot()
    assert names(seen["nodes"]) == ["alone", "c1", "c2", "d1", "d2", "n1", "n2", "n3", "n4"]
    assert names(seen["partitions"]) == ["main", "percpu", "pernode", "forced", "closed"]
    found = nodes(seen)
    assert (found["n1"]["gres"], found["n1"]["features"]) == ({"gpu:a100": 2, "tmp": 2048}, ["zoneA", "fast"])
    assert found["n1"]["partitions"] == ["main", "percpu", "pernode"]
    assert found["n2"]["gres"] == {"gpu:a100": 1, "gpu:h100": 1}
    assert (found["n3"]["memory"], found["n3"]["weight"]) == (3500, 1000000)
    assert (found["d1"]["state"], found["alone"]["partitions"]) == (["DOWN"], [])
    percpu, pernode = seen["partitions"][1:3]
    assert (percpu["memory_per_cpu"], percpu["topology"], percpu["priority"]) == (500, "blocks", 10)
    assert (pernode["memory_per_node"], pernode["topology"], pernode["state"]) == (2000, "flat", "DRAIN")
    assert [each["oversubscribe"] for each in seen["partitions"]] == ["NO", "YES:4", "EXCLUSIVE", "FORCE:2", "NO"]
    assert [each["memory_per_cpu"] for each in seen["partitions"]] == [100, 500, None, 100, 100]


def test_root_sees_what_is_hidden(rested: PySlurmCluster) -> None:
    seen = rested.snapshot(as_root=True)
    assert {"hidden", "group"} <= set(names(seen["partitions"]))
    assert {"h1", "g1"} <= set(names(seen["nodes"]))
    assert nodes(seen)["n1"]["partitions"] == ["main", "percpu", "pernode", "hidden"]


def test_jobs_and_reservations(rested: PySlurmCluster) -> None:
    for options in (["-w", "n1", "--gres=gpu:a100:1,tmp:100", "-n1", "--mem=1000"], ["-w", "n2", "--gres=gpu:2"],
                    ["-w", "n3", "-n4", "--mem=300"]):
        job = rested.submit(["sbatch", *options, "--wrap=sleep 300"])
        rested.wait_for(job, {"RUNNING"})
    rested.root("scontrol", "update", "NodeName=n2,n4", "State=DRAIN", "Reason=was State=IDLE before")
    rested.root("scontrol", "create", "reservation", "ReservationName=now", "Users=root", "StartTime=now",
                "Duration=60", "Nodes=n[3-4]", "Flags=IGNORE_JOBS")
    rested.root("scontrol", "create", "reservation", "ReservationName=later", "Users=root", "StartTime=now+2hours",
                "Duration=60", "Nodes=n1,d[1-2]", "Flags=IGNORE_JOBS,MAINT")
    try:
        seen = rested.snapshot()
        found = nodes(seen)
        assert (found["n1"]["state"], found["n1"]["cpus_unallocated"], found["n1"]["memory_unallocated"]) == (["MIXED"], 3, 3000)
        assert found["n1"]["gres_used"] == {"gpu:a100": 1, "tmp": 100}
        assert sum(found["n2"]["gres_used"].values()) == 2
        assert "DRAIN" in found["n2"]["state"] and "DRAIN" in found["n4"]["state"]
        assert found["n3"]["cpus_unallocated"] == 0 and found["n3"]["state"][0] == "ALLOCATED"
        assert [(held["name"], held["nodes"], held["active"]) for held in seen["reservations"]] == [
            ("now", ["n3", "n4"], True), ("later", ["d1", "d2", "n1"], False)]
    finally:
        rested.root("scontrol", "delete", "ReservationName=now")
        rested.root("scontrol", "delete", "ReservationName=later")


def test_a_controller_that_hangs_costs_as_much_as_with_scontrol(rested: PySlurmCluster) -> None:
    code = "import sys; from slurmdl.cluster import read; read.from_controller(sys.argv[1])"
    signal = ["sh", "-c", 'kill -"$0" "$(cat /run/slurmctld.pid)"']
    rested.root(*signal, "STOP")
    try:
        for backend, name in (("pyslurm", "PySlurm"), ("scontrol", "scontrol")):
            began = time.monotonic()
            said = rested.python(code, backend, status=1)
            assert f"UnavailableError: {name}: no answer within 5 s" in said
            assert time.monotonic() - began < 8
    finally:
        rested.root(*signal, "CONT")
    rested.snapshot()


def test_slurm_conf_that_is_not_there(rested: PySlurmCluster) -> None:
    said = rested.python("import os; os.environ['SLURM_CONF'] = '/nowhere'; from slurmdl.cluster import read; "
                         "read.from_controller('pyslurm')", status=1)
    assert "UnavailableError: PySlurm: " in said


@pytest.mark.parametrize(("count", "repeats"), [(8, 21), (10_000, 11)])
def test_time(here: Path, count: int, repeats: int) -> None:
    """What docs/admin.md says of both: pytest -s prints it."""
    lines = MANY.format(cloud=CLOUD.format(count - 8) if count > 8 else "")
    cluster = PySlurmCluster(here / f"nodes{count}", 8, lines=lines)
    try:
        found, seconds = json.loads(cluster.python(TIMED, str(repeats)))
    finally:
        cluster.down()
    assert found == count
    median = {backend: 1e3 * statistics.median(each) for backend, each in seconds.items()}
    for backend, each in seconds.items():
        print(f"{count} nodes, {backend}: median {median[backend]:.0f} ms of {repeats}, "
              f"{1e3 * min(each):.0f} to {1e3 * max(each):.0f}")
