"""The containerized cluster (docker-compose.yml) for the cluster tests.

Only one such cluster can run on a machine, because its networks have fixed addresses; `configure` changes the
settings instead of creating another cluster. Its four networks form the two zones of the tests.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import Cluster

from slurmdl.commit import find_commit
from slurmdl.sandbox import spec as sandbox_spec
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, round_robin_topology

ROOT = Path(__file__).parents[2]
PROJECT = "slurmdl-test"
USER = sandbox_spec.JobUser("researcher", 20001, 20001, "/home/researcher")
#: networks of each zone; networks 1 to 4 contain n1 and n5, n2 and n6, n3 and n7, n4 and n8
ZONES = "zoneA=1,3 zoneB=2,4"


class ComposeCluster(Cluster):
    """Nodes n1 to n8 in containers, in two zones of two networks each; `base` is the directory of its files."""

    def __init__(self, base: Path) -> None:
        self.shared, self.etc = base / "shared", base / "etc"
        self.user, self.ids = USER.name, (USER.uid, USER.gid)
        self._base, self._state, self._containers = base, base / "state", dict[str, str]()
        self._release = os.environ.get("DEBIAN", "trixie")
        self._is_common = False
        self._gres = ""
        self._first_job = 0
        base.chmod(0o755)
        for directory in (self.etc, self._state, self.shared):
            directory.mkdir()
        self.shared.chmod(0o1777)

    def up(self) -> None:
        """Start the containers. Raises RuntimeError on failure."""
        self._write(SandboxSpec("compose", round_robin_topology(8, 2)))
        done = subprocess.run([ROOT / "tests/cluster/base-image", self._release], capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise RuntimeError(f"no image of Debian {self._release}: {last_line(done.stderr)}")
        self._compose("build", "--quiet", "slurmctld")
        self._compose("up", "-d")
        listed = _docker("ps", "--filter", f"label=com.docker.compose.project={PROJECT}", "--format",
                         '{{.Label "com.docker.compose.service"}} {{.ID}}')
        self._containers = dict(line.split() for line in listed.splitlines())
        self._start = self.directory("start")
        self._is_common = True
        # Slurm of Debian forky has no PMIx
        if "pmix" not in self.run(["sh", "-c", "srun --mpi=list 2>&1"]).stdout:
            self.launcher = "--step-starter=mpirun"

    def down(self) -> None:
        self._compose("down", "--volumes", "--timeout", "1")

    def _compose(self, *arguments: str) -> None:
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        files = ["-f", "docker-compose.yml", "-f", "tests/cluster/compose.yml"]
        env = {**os.environ, "SLURMDL_BASE": str(self._base), "ZONES": ZONES, "COMMIT": find_commit()}
        done = subprocess.run([*program, "--project-name", PROJECT, *files, *arguments], cwd=ROOT, env=env,
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"docker-compose {arguments[0]}: {last_line(done.stderr)}")

    # --- settings ---

    def common(self) -> ComposeCluster:
        """Return the cluster with the default settings that most tests share."""
        if not self._is_common:
            self.configure()
            self._is_common = True
        return self

    def configure(self, **options: object) -> ComposeCluster:
        """Restart with an empty state; `options` are `nodes`, `zones` and fields of SandboxSpec."""
        fields = dict(options)
        nodes, zones = int(fields.pop("nodes", 8)), int(fields.pop("zones", 2))  # type: ignore[call-overload]
        for name, reason in (("plugstack", "the plugin is built for this machine's Slurm only"),
                             ("cloud_nodes", "only the sandbox has cloud nodes"),
                             ("bind_mounts", "hosts share one directory"),
                             ("node_rate", "the links of nodes are not shaped"),
                             ("zone_rate", "links start at 50 Mbit/s")):
            if fields.get(name):
                pytest.skip(f"on compose, {reason}")
        if zones != 2 or nodes > 8:
            pytest.skip("compose has eight nodes, in two zones for tests")
        spec = SandboxSpec("compose", round_robin_topology(nodes, zones), **fields)  # type: ignore[arg-type]
        self._is_common = False
        _docker("kill", self._containers["slurmctld"], check=False)
        if spec.gres != self._gres:  # slurmd reads generic resources only when it starts
            _docker("kill", *(self._containers[f"n{number}"] for number in range(1, 9)), check=False)
            self._gres = spec.gres
        for file in self._state.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._write(spec)
        _docker("start", *(self._containers[host] for host in ("slurmctld", *spec.topology.nodes)))
        self._wait_ready()
        # in parallel; `scontrol reconfigure` would also restart the controller
        signals = [subprocess.Popen(["docker", "exec", self._containers[node], "pkill", "-HUP", "-x", "slurmd"])
                for node in spec.topology.nodes]
        for process in signals:
            process.wait()
        self._wait_ready(spec.topology.nodes)
        return self

    @property
    def sandbox(self) -> NoReturn:
        pytest.skip("on compose, there is no sandbox")

    def _write(self, spec: SandboxSpec) -> None:
        """Write /etc/slurm: the files of a sandbox, with the settings of compose/slurm/slurm.conf."""
        self.topology = spec.topology
        with tempfile.TemporaryDirectory() as scratch:
            sandbox_spec.write_config_files(spec, Path(scratch), USER)
            for file in self.etc.iterdir():
                file.unlink()
            for file in (Path(scratch) / "slurm").iterdir():
                shutil.copy(file, self.etc)
        compose_conf = (ROOT / "compose/slurm/slurm.conf").read_text()
        overridden = {setting.split("=")[0] for setting in spec.slurm_conf_lines}
        keys = dict(re.findall(r"^(?!NodeName|PartitionName)(\w+)=(.*)$", compose_conf, re.MULTILINE))
        addresses = dict(re.findall(r"^NodeName=(\w+) NodeAddr=(\S+)", compose_conf, re.MULTILINE))
        lines = [f"{key}={value}" for key, value in keys.items() if key not in overridden]
        # slurmd keeps records of finished jobs, so job IDs must be unique
        self._first_job += 10_000
        lines.append(f"FirstJobId={self._first_job}")
        for line in (self.etc / "slurm.conf").read_text().splitlines():
            key, value = line.split("=", 1)
            if key == "NodeName":
                line = re.sub("NodeAddr=[^ ]+", f"NodeAddr={addresses[value.split()[0]]}", line)
            if (key not in keys or key in overridden) and not key.endswith("LogFile"):
                lines.append(line)
        (self.etc / "slurm.conf").write_text("\n".join(lines) + "\n")
        if self._release == "bookworm":  # required by Slurm 22.05, as in compose/entrypoint
            (self.etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        else:
            shutil.copy(ROOT / "compose/slurm/cgroup.conf", self.etc)

    def _wait_ready(self, nodes: Sequence[str] = (), timeout: float = 60) -> None:
        """Wait until the controller answers and `nodes` are usable."""
        deadline = time.monotonic() + timeout
        while not (states := self._states()) or any(
                states.get(node) not in ("idle", "mixed", "allocated", "completing") for node in nodes):
            assert time.monotonic() < deadline, (
                f"Slurm is not ready: {states or 'no answer'} {self.run(['sinfo', '-R']).stdout}")
            time.sleep(0.2)

    def _states(self) -> dict[str, str]:
        # a starting controller may not answer the first query; sinfo would then wait for 10 s
        text = self.run(["timeout", "2", "sinfo", "-h", "-N", "-o", "%N %T"], as_root=True).stdout
        return dict(line.split() for line in text.splitlines())

    # --- interface of Cluster ---

    @staticmethod
    def _daemon_host(host: str) -> str:
        """Return the container with the daemon of a host; slurmctld runs in a separate container."""
        return "slurmctld" if host == LOGIN else host

    def run(self, argv: Sequence[str], *, host: str = LOGIN, as_root: bool = False, stdin: str = "",
            directory: Path | None = None, env: dict[str, str] | None = None,
            timeout: float = 60) -> subprocess.CompletedProcess[str]:
        user = "root" if as_root else self.user
        variables = {"USER": user, "LOGNAME": user, **(env or {})}
        env_options = [f"--env={key}={value}" for key, value in variables.items()]
        line = ["docker", "exec", "-i", f"--user={user}", f"--workdir={directory or self._start}", *env_options,
                self._containers[host], *argv]
        return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)

    def python_packages(self, *names: str) -> Path | None:
        """Return a directory with the packages and their dependencies in this machine's versions; see Cluster.

        The hosts' own PyTorch and the packages that Debian installs with it stay in use.
        """
        super().python_packages(*names)
        directory = self.shared / "python-packages"
        if not directory.exists():
            version = self.run(["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip()
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "--only-binary=:all:", f"--python-version={version}", f"--target={directory}",
                 *_requirements(names)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            for program in (directory / "bin").iterdir():
                program.write_text(re.sub(r"^#!.*", "#!/usr/bin/python3", program.read_text()))
        return directory

    def stop_daemon(self, host: str) -> None:
        _docker("kill", self._containers[self._daemon_host(host)])

    def start_daemon(self, host: str) -> None:
        _docker("start", self._containers[self._daemon_host(host)])
        self._wait_ready([host] if host in self.topology.nodes else [])

    def freeze_daemon(self, host: str, frozen: bool) -> None:
        self.run(["pkill", "-STOP" if frozen else "-CONT", "-x", "slurmctld|slurmd"], host=self._daemon_host(host),
                 as_root=True).check_returncode()

    def power_off(self, node: str) -> None:
        self.stop_daemon(node)
        self._is_common = False  # `configure` restarts the node

    def shape_link(self, name: str, *, rate: float | None = None, delay: float | None = None,
                    loss: float | None = None) -> None:
        if name not in self.topology.zones:
            pytest.skip("on compose, the links of nodes are not shaped")
        shape = {"rate": rate, "delay": delay, "loss": loss}
        options = [f"--{key}={value:f}" for key, value in shape.items() if value is not None]
        self.run(["shape-links", name, *options], host="router", as_root=True, directory=Path("/")).check_returncode()

    def controller_log(self) -> str:
        pytest.skip("on compose, slurmctld (24.11) stops logging after it rereads its configuration")

    def inter_zone_bytes(self) -> int:
        text = self.run(["shape-links"], host="router", as_root=True, directory=Path("/")).stdout
        return sum(map(int, re.findall(r"(\d+) bytes out", text)))


def _requirements(names: Sequence[str]) -> list[str]:
    """Return packages and their dependencies as NAME==VERSION, without those that the image has."""
    found: dict[str, str] = {}
    todo = list(names)
    while todo:
        name = todo.pop().lower()
        if name in found or name in ("torch", "numpy", "pyyaml"):
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # required on other platforms or by extras
        todo += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in importlib.metadata.requires(name) or ()
                 if "extra ==" not in line]
    return [f"{name}=={version}" for name, version in found.items()]


def _docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"docker {arguments[0]}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the first line that starts with ERROR, or else the last line of a program's output."""
    lines = text.strip().splitlines() or ["failed"]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1])


@contextlib.contextmanager
def up() -> Iterator[ComposeCluster]:
    """Start the cluster for a test session; skip the tests if it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="slurmdl-compose-") as base:
        cluster = ComposeCluster(Path(base))
        try:
            cluster.up()
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError, RuntimeError):
                cluster.down()
            if os.environ.get("SLURMDL_REQUIRE_CLUSTER") == "1":
                raise
            pytest.skip(f"no containerized cluster: {error}")
        try:
            yield cluster
        finally:
            cluster.down()
