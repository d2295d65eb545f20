"""Compare PySlurm with scontrol on a real controller: their snapshots are equal; print the time of each.

`tools/build-pyslurm` installs Slurm and PySlurm in the root directory of another Debian.
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
from releases import RootCluster, skip_reason

from benchmarks.chroot_host import root_of

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SUITE = "forky"
#: four nodes that run jobs, and nodes without slurmd: down, cloud, future, in hidden, group or no partitions
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
#: eight nodes with slurmd, and any number of cloud nodes
MANY_NODES = """\
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=1000000
NodeName=n[1-8] Port=[17001-17008] CPUs=4 RealMemory=4000 Feature=zoneA
{cloud}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=n[1-4] MaxTime=INFINITE State=UP
""".replace("Port=", "NodeHostname=login NodeAddr={{address}} Port=")
CLOUD_NODES = "NodeName=c[1-{}] NodeAddr={{address}} CPUs=64 RealMemory=256000 Feature=zoneB,fast State=CLOUD"
COMPARE_BACKENDS = """\
import json
from slurmdl.cluster import load
snapshots = [load.query_cluster(backend, True) for backend in ("scontrol", "pyslurm")]
print(json.dumps([(snapshot.to_json(), [output.yaml.strip(), *(line for _, line in output.records["SwitchName"])])
                  for snapshot, output in snapshots]))
"""
TIME_BACKENDS = """\
import json, sys, time
from slurmdl.cluster import load
seconds = {"scontrol": [], "pyslurm": []}
for i in range(int(sys.argv[1])):
    for backend in sorted(seconds, reverse=i % 2):
        start = time.perf_counter()
        snapshot = load.query_cluster(backend)[0]
        seconds[backend].append(time.perf_counter() - start)
print(json.dumps([len(snapshot.names), seconds]))
"""


class PySlurmCluster(RootCluster):
    """A cluster with slurmdl and PySlurm."""

    def __init__(self, directory: Path, nodes: int, **lines: Any) -> None:
        done = subprocess.run([ROOT / "tools/build-pyslurm", SUITE], check=True, timeout=1500, stdout=subprocess.PIPE,
                              text=True)
        super().__init__(root_of(SUITE), directory, nodes, None, **lines)
        shutil.copytree(ROOT / "slurmdl", self.shared / "python/slurmdl")
        self._env = {"PYTHONPATH": f"{self.shared}/python:{done.stdout.strip()}"}

    def python(self, code: str, *args: str, as_root: bool = False, status: int = 0) -> str:
        done = self.run(["python3", "-c", code, *args], as_root=as_root, env=self._env, timeout=300)
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    def root(self, *argv: str) -> None:
        done = self.run(argv, as_root=True)
        assert done.returncode == 0, done.stderr

    def snapshot(self, as_root: bool = False) -> dict[str, Any]:
        """Return the snapshot of both backends, which must be equal; retry while states change."""
        for _ in range(5):
            scontrol, pyslurm = json.loads(self.python(COMPARE_BACKENDS, as_root=as_root))
            if scontrol == pyslurm:
                break
            time.sleep(1)
        differences = [(left, right) for key, records in scontrol[0].items()
                 for left, right in itertools.zip_longest(pyslurm[0][key], records) if left != right]
        assert not [(left, right) if None in (left, right) else
                    {key: (left[key], right[key]) for key in ("name", *left) if left[key] != right[key]}
                    for left, right in differences]
        assert pyslurm[1] == scontrol[1] != [""]
        return dict(pyslurm[0])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := skip_reason(SUITE, "pyslurm"):
        pytest.skip(reason)
    return tmp_path_factory.mktemp("pyslurm")


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[PySlurmCluster]:
    files = {"gres.conf": GRES, "topology.yaml": TOPOLOGY, "gpu0": "", "gpu1": ""}
    cluster = PySlurmCluster(directory / "host", 4, lines=LINES, files=files)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def idle_cluster(cluster: PySlurmCluster) -> Iterator[PySlurmCluster]:
    """The cluster without jobs; all nodes are idle again afterwards."""
    yield cluster
    cluster.cancel_all()
    cluster.run(["scontrol", "update", "NodeName=n2,n4", "State=RESUME"], as_root=True)


def nodes(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in snapshot["nodes"]}


def names(records: Sequence[dict[str, Any]]) -> list[str]:
    return [record["name"] for record in records]


def test_idle_cluster(idle_cluster: PySlurmCluster) -> None:
    snapshot = idle_cluster.snapshot()
    assert names(snapshot["nodes"]) == ["alone", "c1", "c2", "d1", "d2", "n1", "n2", "n3", "n4"]
    assert names(snapshot["partitions"]) == ["main", "percpu", "pernode", "forced", "closed"]
    by_name = nodes(snapshot)
    assert (by_name["n1"]["gres"], by_name["n1"]["features"]) == ({"gpu:a100": 2, "tmp": 2048}, ["zoneA", "fast"])
    assert by_name["n1"]["partitions"] == ["main", "percpu", "pernode"]
    assert by_name["n2"]["gres"] == {"gpu:a100": 1, "gpu:h100": 1}
    assert (by_name["n3"]["memory"], by_name["n3"]["weight"]) == (3500, 1000000)
    assert (by_name["d1"]["state"], by_name["alone"]["partitions"]) == (["DOWN"], [])
    percpu, pernode = snapshot["partitions"][1:3]
    assert (percpu["memory_per_cpu"], percpu["topology"], percpu["priority"]) == (500, "blocks", 10)
    assert (pernode["memory_per_node"], pernode["topology"], pernode["state"]) == (2000, "flat", "DRAIN")
    assert [record["oversubscribe"] for record in snapshot["partitions"]] == [
        "NO", "YES:4", "EXCLUSIVE", "FORCE:2", "NO"]
    assert [record["memory_per_cpu"] for record in snapshot["partitions"]] == [100, 500, None, 100, 100]


def test_root_sees_hidden_partitions(idle_cluster: PySlurmCluster) -> None:
    snapshot = idle_cluster.snapshot(as_root=True)
    assert {"hidden", "group"} <= set(names(snapshot["partitions"]))
    assert {"h1", "g1"} <= set(names(snapshot["nodes"]))
    assert nodes(snapshot)["n1"]["partitions"] == ["main", "percpu", "pernode", "hidden"]


def test_jobs_and_reservations(idle_cluster: PySlurmCluster) -> None:
    for options in (["-w", "n1", "--gres=gpu:a100:1,tmp:100", "-n1", "--mem=1000"], ["-w", "n2", "--gres=gpu:2"],
                    ["-w", "n3", "-n4", "--mem=300"]):
        job = idle_cluster.submit(["sbatch", *options, "--wrap=sleep 300"])
        idle_cluster.wait_for(job, {"RUNNING"})
    idle_cluster.root("scontrol", "update", "NodeName=n2,n4", "State=DRAIN", "Reason=was State=IDLE before")
    idle_cluster.root("scontrol", "create", "reservation", "ReservationName=now", "Users=root", "StartTime=now",
                      "Duration=60", "Nodes=n[3-4]", "Flags=IGNORE_JOBS")
    idle_cluster.root("scontrol", "create", "reservation", "ReservationName=later", "Users=root",
                      "StartTime=now+2hours", "Duration=60", "Nodes=n1,d[1-2]", "Flags=IGNORE_JOBS,MAINT")
    try:
        snapshot = idle_cluster.snapshot()
        by_name = nodes(snapshot)
        n1 = by_name["n1"]
        assert (n1["state"], n1["cpus_unallocated"], n1["memory_unallocated"]) == (["MIXED"], 3, 3000)
        assert by_name["n1"]["gres_used"] == {"gpu:a100": 1, "tmp": 100}
        assert sum(by_name["n2"]["gres_used"].values()) == 2
        assert "DRAIN" in by_name["n2"]["state"] and "DRAIN" in by_name["n4"]["state"]
        assert by_name["n3"]["cpus_unallocated"] == 0 and by_name["n3"]["state"][0] == "ALLOCATED"
        assert [(record["name"], record["nodes"], record["active"]) for record in snapshot["reservations"]] == [
            ("now", ["n3", "n4"], True), ("later", ["d1", "d2", "n1"], False)]
    finally:
        idle_cluster.root("scontrol", "delete", "ReservationName=now")
        idle_cluster.root("scontrol", "delete", "ReservationName=later")


def test_hanging_controller_times_out_with_both_backends(idle_cluster: PySlurmCluster) -> None:
    code = "import sys; from slurmdl.cluster import load; load.query_cluster(sys.argv[1])"
    signal = ["sh", "-c", 'kill -"$0" "$(cat /run/slurmctld.pid)"']
    idle_cluster.root(*signal, "STOP")
    try:
        for backend, name in (("pyslurm", "PySlurm"), ("scontrol", "scontrol")):
            start = time.monotonic()
            error = idle_cluster.python(code, backend, status=1)
            assert f"UnavailableError: {name}: no answer within 5 s" in error
            assert time.monotonic() - start < 8
    finally:
        idle_cluster.root(*signal, "CONT")
    idle_cluster.snapshot()


def test_missing_slurm_conf_is_reported(idle_cluster: PySlurmCluster) -> None:
    error = idle_cluster.python("import os; os.environ['SLURM_CONF'] = '/nowhere'; from slurmdl.cluster import load; "
                         "load.query_cluster('pyslurm')", status=1)
    assert "UnavailableError: PySlurm: " in error


@pytest.mark.parametrize(("count", "repeats"), [(8, 21), (10_000, 11)])
def test_time(directory: Path, count: int, repeats: int) -> None:
    """Print the times in docs/admin.md (pytest -s)."""
    lines = MANY_NODES.format(cloud=CLOUD_NODES.format(count - 8) if count > 8 else "")
    cluster = PySlurmCluster(directory / f"nodes{count}", 8, lines=lines)
    try:
        node_count, seconds = json.loads(cluster.python(TIME_BACKENDS, str(repeats)))
    finally:
        cluster.down()
    assert node_count == count
    median = {backend: 1e3 * statistics.median(times) for backend, times in seconds.items()}
    for backend, times in seconds.items():
        print(f"{count} nodes, {backend}: median {median[backend]:.0f} ms of {repeats}, "
              f"{1e3 * min(times):.0f} to {1e3 * max(times):.0f}")
