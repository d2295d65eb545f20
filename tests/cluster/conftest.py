"""Clusters for the cluster tests: submit jobs, run commands on a host, stop a daemon, reshape a link.

`Cluster` is the interface of the tests; `SandboxCluster` implements it with the sandbox, compose.py with containers,
releases.py with one host. Commands run as an ordinary user unless `as_root` is set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import AT_ONCE, wait_until

from benchmarks import sandbox_faults
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, round_robin_topology
from slurmdl.topology.topology import Topology

_numbers = itertools.count()
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED"}
#: clusters that a module keeps for `cluster_with`
MAX_KEPT = 2


class Cluster(ABC):
    """A real Slurm cluster.

    Attributes:
        shared: directory shared by all hosts.
        user, ids: name of the ordinary user, and its user and group ID.
        etc: directory that is /etc/slurm on the hosts.
        launcher: option of `slurmdl srun` that selects the launcher of MPI programs, or "" for the default.
    """

    topology: Topology
    shared: Path
    user: str
    ids: tuple[int, int]
    etc: Path
    launcher = ""

    @abstractmethod
    def run(self, argv: Sequence[str], *, host: str = LOGIN, as_root: bool = False, stdin: str = "",
            directory: Path | None = None, env: dict[str, str] | None = None,
            timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; capture stdout and stderr separately."""

    def root(self, *argv: str, host: str = LOGIN) -> str:
        """Run a command as root, which must succeed; return its output."""
        done = self.run(argv, host=host, as_root=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def directory(self, name: str = "job") -> Path:
        """Create a directory on the shared file system, owned by the ordinary user."""
        path = self.shared / f"{name}-{next(_numbers)}"
        path.mkdir()
        path.chmod(0o755)
        os.chown(path, *self.ids)
        return path

    def python_packages(self, *names: str) -> Path | None:
        """Return a directory with Python packages that the hosts lack; skip the test if this machine lacks them."""
        for name in names:
            pytest.importorskip(name)
        return None

    def script(self, text: str, name: str = "job.sh") -> Path:
        """Write a script in a new directory; `#!/bin/sh` is added if missing."""
        path = self.directory() / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        return path

    def submit(self, argv: Sequence[str], **keywords: object) -> int:
        """Run a submission, `["sbatch", ...]` or `["slurmdl", "sbatch", ...]`; return the job ID."""
        result = self.run(argv, **keywords)  # type: ignore[arg-type]
        assert result.returncode == 0, result.stderr
        fields = result.stdout.split()
        return int(fields[3] if fields[:3] == ["Submitted", "batch", "job"] else fields[0].split(";")[0])

    def sbatch(self, text: str | Path, *options: str, program: str = "slurmdl sbatch", **keywords: object) -> int:
        """Submit a script, or the text of one, from its directory; return the job ID."""
        script = text if isinstance(text, Path) else self.script(text)
        return self.submit([*program.split(), *options, str(script)], **{"directory": script.parent, **keywords})

    def job_output(self, text: str | Path, *options: str, timeout: float = 60, **keywords: object) -> str:
        """Submit a script as `sbatch` does; wait until the job has completed, and return its standard output."""
        return self.output(self.sbatch(text, *options, **keywords), timeout)

    def job(self, job: int | str) -> dict[str, str]:
        """Return the record of `scontrol show job`."""
        text = self.run(["scontrol", "-o", "show", "job", str(job)]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for(self, job: int | str, states: set[str], timeout: float = 60) -> dict[str, str]:
        """Wait until a job is in one of `states`; return its record."""
        deadline, delay = time.monotonic() + timeout, 0.1
        while (record := self.job(job)).get("JobState") not in states:
            if time.monotonic() > deadline:
                fields = ("JobId", "JobState", "Reason", "NodeList", "ReqNodeList", "ExcNodeList")
                nodes = self.run(["sinfo", "-h", "-o", "%T=%N"]).stdout.split()
                raise AssertionError(" ".join([*(f"{name}={record.get(name)}" for name in fields), *nodes]))
            time.sleep(delay)
            delay = min(1.2 * delay, 0.5)  # each query takes CPU time from the jobs
        return record

    def start(self, argv: Sequence[str], **keywords: object) -> int:
        """Submit a job and wait until it runs; return its ID."""
        job = self.submit(argv, **keywords)
        self.wait_for(job, {"RUNNING"})
        return job

    def wait(self, job: int | str, timeout: float = 60) -> dict[str, str]:
        """Wait until a job has ended; return its record."""
        return self.wait_for(job, FINAL, timeout)

    def output(self, job: int, timeout: float = 60) -> str:
        """Wait until a job has completed; return its standard output."""
        record = self.wait(job, timeout)
        text = self.text_of(record)
        assert record["JobState"] == "COMPLETED", f"{record['JobState']} {record['ExitCode']}: {text}"
        return text

    def text_of(self, record: dict[str, str]) -> str:
        """Return the standard output of a job so far."""
        return Path(record["StdOut"]).read_text()

    @contextlib.contextmanager
    def drained(self, *nodes: str, reason: str = "test") -> Iterator[None]:
        """Drain nodes for a while; Slurm uses resumed nodes only after they have registered again."""
        self.root("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", f"reason={reason}")
        try:
            yield
        finally:
            self.resume(nodes)

    def resume(self, nodes: Sequence[str]) -> None:
        for name in nodes:
            self.root("scontrol", "update", f"nodename={name}", "state=resume")
        wait_until(lambda: "*" not in self.run(["sinfo", "-h", "-o", "%T"]).stdout, "resumed nodes do not respond")

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until every node is free."""
        if self.run(["squeue", "-h"]).stdout.strip():
            self.run(["sh", "-c", "squeue -h -o %A | sort -u | xargs -r scancel"], as_root=True)
            wait_until(lambda: not self.run(["squeue", "-h"]).stdout.strip(), "jobs do not end")


class SandboxCluster(Cluster):
    def __init__(self, sandbox: lifecycle.Sandbox) -> None:
        self.sandbox, self.topology = sandbox, sandbox.spec.topology
        self.shared, self.user, self.ids = sandbox.shared, sandbox.user.name, (sandbox.user.uid, sandbox.user.gid)
        self.etc = sandbox.root / "slurm"
        self._start = self.directory("start")  # the home directory may be the user's real one
        self.shape_link, self.inter_zone_bytes = sandbox.shape_link, sandbox.inter_zone_bytes

    def run(self, argv: Sequence[str], *, host: str = LOGIN, as_root: bool = False, stdin: str = "",
            directory: Path | None = None, env: dict[str, str] | None = None,
            timeout: float = 60) -> subprocess.CompletedProcess[str]:
        line = self.sandbox.command(argv, host, as_root=as_root, directory=str(directory or self._start))
        return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=timeout,
                              env={**os.environ, **(env or {})}, check=False)

    def stop_daemon(self, host: str) -> None:
        """Kill slurmctld (on the login host) or slurmd (on a node)."""
        pid = sandbox_faults.daemon_pid(self.sandbox, host)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)

    def start_daemon(self, host: str) -> None:
        """Start the daemon of a host, and wait until Slurm uses the host."""
        def is_back() -> bool:
            states = self.sandbox.node_states()
            return bool(states) and (host == LOGIN or states.get(host) in ("idle", "mixed", "allocated"))

        sandbox_faults.start_daemon(self.sandbox, host)
        wait_until(is_back, f"{host} does not come back")

    def freeze_daemon(self, host: str, frozen: bool) -> None:
        """Stop a daemon with SIGSTOP, or continue it with SIGCONT."""
        os.kill(sandbox_faults.daemon_pid(self.sandbox, host), signal.SIGSTOP if frozen else signal.SIGCONT)

    def power_off(self, node: str) -> None:
        """Kill all processes of a node, as in a power failure."""
        sandbox_faults.power_off(self.sandbox, node)

    def controller_log(self) -> str:
        """Return the log of slurmctld."""
        return (self.sandbox.root / "log/slurmctld.log").read_text()


@contextlib.contextmanager
def skipped_without_cluster() -> Iterator[None]:
    """Skip a test whose cluster does not start, unless SLURMDL_REQUIRE_CLUSTER is 1."""
    try:
        yield
    except SandboxError as error:
        if os.environ.get("SLURMDL_REQUIRE_CLUSTER") == "1":
            raise
        pytest.skip(f"no real Slurm cluster: {error}")


def _up(slurm_conf_lines: tuple[str, ...] = (), **options: object) -> SandboxCluster:
    """Start a sandbox of 8 nodes in 2 zones; `options` are `nodes`, `zones`, `names` and fields of SandboxSpec.

    Slurm schedules jobs at once, unless `slurm_conf_lines` sets SchedulerParameters.
    """
    if not any(line.startswith("SchedulerParameters=") for line in slurm_conf_lines):
        slurm_conf_lines = (*AT_ONCE, *slurm_conf_lines)
    nodes, zones = int(options.pop("nodes", 8)), int(options.pop("zones", 2))  # type: ignore[call-overload]
    topology = round_robin_topology(nodes, zones)
    topology = replace(topology, nodes=options.pop("names", topology.nodes))
    spec = SandboxSpec(f"test-{os.getpid()}-{next(_numbers)}", topology,
                       slurm_conf_lines=slurm_conf_lines, **options)  # type: ignore[arg-type]
    with skipped_without_cluster():
        return SandboxCluster(lifecycle.sandbox_up(spec))


def _down(cluster: SandboxCluster) -> None:
    lifecycle.sandbox_down(cluster.sandbox.spec.name)


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[SandboxCluster]:
    cluster = _up()
    try:
        yield cluster
    finally:
        _down(cluster)


@pytest.fixture(scope="session")
def _containers() -> Iterator[Cluster]:
    import compose  # here, because it imports this module

    with compose.up() as cluster:
        yield cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The shared cluster without jobs: nodes n1 to n8 with 2 CPUs each, odd nodes in zoneA, even nodes in zoneB."""
    shared: Cluster = (request.getfixturevalue("_containers").common() if in_containers(request.config)
                       else request.getfixturevalue("_shared_cluster"))
    yield shared
    shared.cancel_all()


def _cluster_factory() -> Iterator[Callable[..., SandboxCluster]]:
    clusters: list[SandboxCluster] = []

    def make(**options: object) -> SandboxCluster:
        clusters.append(_up(**options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        _down(cluster)


@pytest.fixture
def new_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster for one test, which may change it; options as `_up`."""
    if in_containers(request.config):
        yield request.getfixturevalue("_containers").configure
    else:
        yield from _cluster_factory()


@pytest.fixture(scope="module")
def new_sandbox() -> Iterator[Callable[..., SandboxCluster]]:
    """A function that starts a sandbox for the tests of a module; they can change it (`sandbox.pids`)."""
    yield from _cluster_factory()


@pytest.fixture(scope="module")
def _kept_clusters() -> Iterator[dict[str, SandboxCluster]]:
    clusters: dict[str, SandboxCluster] = {}
    yield clusters
    for cluster in clusters.values():
        _down(cluster)


@pytest.fixture
def cluster_with(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """A function that returns a cluster without jobs that the tests of a module share; options as `_up`.

    The tests do not change it.
    """
    if in_containers(request.config):
        yield request.getfixturevalue("_containers").configure
        return
    kept: dict[str, SandboxCluster] = request.getfixturevalue("_kept_clusters")

    def find(**options: object) -> Cluster:
        key = repr(sorted(options.items()))
        cluster = kept.pop(key, None) or _up(**options)
        kept[key] = cluster  # the last one that was used
        if len(kept) > MAX_KEPT:
            _down(kept.pop(next(iter(kept))))
        return cluster

    yield find
    for cluster in kept.values():
        cluster.cancel_all()


def in_containers(config: pytest.Config) -> bool:
    return bool(config.getoption("--cluster") == "compose")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="not for compose: uses no cluster fixture")
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker("cluster")
            names = set(getattr(item, "fixturenames", ()))
            if in_containers(config) and ("new_sandbox" in names
                                          or not {"cluster", "new_cluster", "cluster_with"} & names):
                item.add_marker(skip)
