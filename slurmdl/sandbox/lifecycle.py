"""Life cycle of a sandbox: start it, run commands on it, reshape its links, remove it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import slurmdl
from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import namespaces, veth_links
from slurmdl.sandbox.spec import LOGIN, JobUser, SandboxSpec, check_name, config_mount_script, write_config_files
from slurmdl.slurm import hostlist
from slurmdl.text import sample_names

_STATE_ROOT = Path("/var/lib/slurmdl-sandbox")
#: program -> Debian package
REQUIRED_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "scontrol": "slurm-client", "munged": "munge",
                     "ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux",
                     "unshare": "util-linux", "setpriv": "util-linux"}


class Sandbox:
    """A running sandbox, from `sandbox_up` or `find_sandbox`."""

    def __init__(self, spec: SandboxSpec, pids: dict[str, int], user: JobUser) -> None:
        self.spec, self.pids, self.user = spec, pids, user
        self.root = _STATE_ROOT / spec.name

    @property
    def shared(self) -> Path:
        """The directory that all hosts share; all users may write to it."""
        return self.root / "shared"

    def command(self, argv: Sequence[str], host: str = LOGIN, *, as_root: bool = False,
                directory: str | None = None) -> list[str]:
        """Return the command line that runs `argv` on a host as the ordinary user.

        It starts in `directory` (default: the current one), or in the shared one if the user may not enter it. If the
        user may not write to it, job output goes to the shared one. Variables of an outer Slurm are removed.
        """
        if host not in self.pids:
            raise UsageError(f"sandbox {self.spec.name} has no host {host!r}; expected one of "
                             f"{', '.join(self.pids)}")
        user = JobUser("root", 0, 0, "/root") if as_root else self.user
        unset = [f"--unset={name}" for name in os.environ
                   if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUDO_"))]
        environ = [f"HOME={user.home}", f"USER={user.name}", f"LOGNAME={user.name}", "SHELL=/bin/bash",
                   f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
        drop = [] if as_root else ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--init-groups"]
        # a job fails if Slurm cannot write its output to the submission directory
        start = (f'cd -- "$1" 2>/dev/null || cd {self.shared} || exit 71; shift; '
                 f'[ -w . ] || export SBATCH_OUTPUT="${{SBATCH_OUTPUT-{self.shared}/slurm-%j.out}}"; exec "$@"')
        return namespaces.nsenter_command(self.pids[host], [
            "env", *unset, *environ, *drop, "sh", "-c", start, "sh", directory or os.getcwd(), *argv])

    def node_states(self) -> dict[str, str]:
        """Return the state of every node as in sinfo; empty if the controller does not answer."""
        return _node_states(self.pids)

    def zone_byte_counters(self) -> dict[str, dict[str, int]]:
        """Return the inter-zone bytes that the routers counted: zone -> {"out": bytes, "in": bytes}."""
        return veth_links.zone_byte_counters(self.pids, self.spec.topology.zones)

    def inter_zone_bytes(self) -> int:
        """Return the bytes that nodes sent out of their zones, summed over zones."""
        return sum(counter["out"] for counter in self.zone_byte_counters().values())

    def shape_link(self, name: str, *, rate: float | None = None, delay: float | None = None,
                   loss: float | None = None) -> str:
        """Reshape a node's link or a zone's uplink.

        Each direction gets the rate (bits/s, 0 for unshaped), the delay per packet (seconds) and the fraction of lost
        packets between nodes; None keeps a value. Return a description of the mechanisms.
        """
        shapes, link = self.link_shapes(), veth_links.find_link(self.spec, name)
        old = shapes.get(name, veth_links.LinkShape(link.rate))
        shapes[name] = replace(old, **{key: value for key, value in (("rate", rate), ("delay", delay), ("loss", loss))
                                       if value is not None})
        mechanisms = veth_links.set_link_shape(self.spec, self.pids, link, old, shapes[name])
        (self.root / "links.json").write_text(json.dumps({name: vars(shape) for name, shape in shapes.items()}))
        return mechanisms

    def link_shapes(self) -> dict[str, veth_links.LinkShape]:
        """Return the reshaped links by node or zone."""
        path = self.root / "links.json"
        shapes = json.loads(path.read_text()) if path.exists() else {}
        return {name: veth_links.LinkShape(**shape) for name, shape in shapes.items()}

    def limit_cpu(self, node: str, fraction: float) -> None:
        """Limit all processes of a node, including its jobs, to a fraction of a core; 0 for no limit."""
        if node not in self.pids or node not in self.spec.node_hosts:
            raise UsageError(f"sandbox {self.spec.name} has no node {node!r}; expected one of "
                             f"{sample_names(self.spec.node_hosts)}")
        namespaces.set_cpu_quota(self.spec.name, node, self.pids[node], fraction)


def sandbox_up(spec: SandboxSpec) -> Sandbox:
    """Start a sandbox and return when all its nodes are idle.

    Remains of a failed start of the same name are removed first. Raises SandboxError without root or a program (with
    its package), if the sandbox is already running, or if a host or daemon fails.
    """
    _check_requirements()
    root = _STATE_ROOT / spec.name
    if (root / "ready").exists() and namespaces.running_hosts(spec.name):
        raise SandboxError(f"sandbox {spec.name} is already running; end it: slurmdl sandbox down --name {spec.name}")
    sandbox_down(spec.name)
    user = _job_user(root)
    bind_mounts = _bind_mounts(spec, user)
    try:
        _create_root(root)
        for directory in ("spool/ctld", *(f"spool/{node}" for node in spec.node_hosts), "log", "shared/home",
                          "stage/copied", *(f"stage/{i}" for i in range(len(bind_mounts)))):
            (root / directory).mkdir(parents=True)
        (root / "shared").chmod(0o1777)
        if user.home.startswith(str(root)):
            os.mkdir(user.home, 0o755)
            os.chown(user.home, user.uid, user.gid)
        write_config_files(spec, root, user)
        host_mounts = namespaces.host_mount_script(bind_mounts, str(root), lambda path: user.has_access(path, 1))
        script = f"{host_mounts}\n{config_mount_script(root)}"
        mounts = dict.fromkeys([LOGIN, *spec.node_hosts], script)
        mounts |= {} if spec.cloud_nodes else dict.fromkeys(spec.topology.zones, "")
        pids = namespaces.start_hosts(spec.name, mounts)
        veth_links.create_links(spec, pids)
        _start_daemons(spec, root, pids)
        _wait_for_nodes_idle(pids)
        (root / "state.json").write_text(json.dumps({"spec": spec.to_json(), "user": vars(user)}))
        (root / "ready").touch()
    except BaseException:
        sandbox_down(spec.name)
        raise
    return Sandbox(spec, pids, user)


def find_sandbox(name: str) -> Sandbox:
    """Return the running sandbox of a name; SandboxError if there is none."""
    check_name(name)
    _check_root()
    root, pids = _STATE_ROOT / name, namespaces.running_hosts(name)
    if not pids or not (root / "ready").exists():
        others = sorted(namespaces.running_sandboxes())
        raise SandboxError(f"no sandbox {name} is running" + (f" (running: {', '.join(others)})" if others else "")
                           + f"; start it: slurmdl sandbox up --name {name}")
    state = json.loads((root / "state.json").read_text())
    return Sandbox(SandboxSpec.from_json(state["spec"]), pids, JobUser(**state["user"]))


def list_sandboxes() -> Iterator[tuple[str, Sandbox | None]]:
    """Yield the name of each sandbox of this machine, and the sandbox; None if it is incomplete."""
    _check_root()
    directories = {path.name for path in _STATE_ROOT.iterdir()} if _STATE_ROOT.is_dir() else set()
    for name in sorted(namespaces.running_sandboxes() | directories):
        try:
            yield name, find_sandbox(name)
        except (SandboxError, UsageError):
            yield name, None


def sandbox_down(name: str) -> bool:
    """End a sandbox, even an incomplete one, and remove all its remains; False if there was none."""
    check_name(name)
    _check_root()
    root = _STATE_ROOT / name
    existed = namespaces.stop_hosts(name) or root.exists()
    namespaces.remove_cpu_quotas(name)
    if root.exists():
        shutil.rmtree(root)
    with contextlib.suppress(OSError):
        _STATE_ROOT.rmdir()
    return existed


def _create_root(root: Path) -> None:
    while True:
        try:
            return root.mkdir(parents=True)
        except FileNotFoundError:
            continue  # another sandbox_down removed the empty parent directory meanwhile


def _check_root() -> None:
    if os.geteuid():
        raise SandboxError("the sandbox needs root to create network namespaces: run it with sudo")


def _check_requirements() -> None:
    if not sys.platform.startswith("linux"):
        raise SandboxError("the sandbox needs Linux: its hosts are Linux namespaces")
    _check_root()
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [program for program in REQUIRED_PROGRAMS if not shutil.which(program, path=path)]
    if missing:
        packages = sorted({REQUIRED_PROGRAMS[program] for program in missing})
        raise SandboxError(f"missing programs: {', '.join(missing)}; on Debian: apt-get install {' '.join(packages)}")


def _job_user(root: Path) -> JobUser:
    """Return the user of sudo, else an account that exists on the sandbox's hosts only."""
    if uid := int(os.environ.get("SUDO_UID") or 0):
        entry = pwd.getpwuid(uid)
        return JobUser(entry.pw_name, uid, entry.pw_gid, entry.pw_dir)
    return JobUser("researcher", 20001, 20001, f"{root}/shared/home/researcher")


def _bind_mounts(spec: SandboxSpec, user: JobUser) -> list[str]:
    """Return the directories to keep visible: the requested ones, this package, and its Python."""
    package = str(Path(slurmdl.__file__).resolve().parent.parent)
    paths = [*spec.bind_mounts, package, os.path.abspath(sys.prefix), os.path.abspath(sys.base_prefix)]
    mounts: list[str] = []
    for path in map(os.path.abspath, paths):
        if not os.path.isdir(path):
            raise SandboxError(f"--bind-mount={path}: not a directory")
        if path == "/" or path.startswith("/usr") or any(f"{path}/".startswith(f"{mount}/") for mount in mounts):
            continue
        mounts = [mount for mount in mounts if not mount.startswith(f"{path}/")] + [path]
    for path in mounts:
        if not user.has_access(Path(path), 5):
            raise SandboxError(f"{path}: not readable for {user.name}; run `chmod o+rx {path}`")
    return mounts


def _start_daemons(spec: SandboxSpec, root: Path, pids: Mapping[str, int]) -> None:
    """Start munged on every host, slurmctld on the login host and slurmd on every node."""
    scripts = {
        "munged": "mkdir -p -m 755 /run/munge && exec munged --force --key-file={root}/munge.key"
                  " --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed --num-threads=2",
        "slurmctld": "exec slurmctld",
        "slurmd": "exec slurmd -N {host}",
    }

    def start(names: Sequence[str], daemon: str) -> None:
        processes = [(name, subprocess.Popen(
            namespaces.nsenter_command(pids[name], ["sh", "-c", scripts[daemon].format(root=root, host=name)]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})) for name in names]
        for name, process in processes:
            try:
                _, text = process.communicate(timeout=20)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise SandboxError(f"{daemon} on {name}: not started within 20 s") from error
            if process.returncode:
                raise SandboxError(f"{daemon} on {name}: {' '.join(text.split())[-300:] or 'failed'}")

    start([LOGIN, *spec.node_hosts], "munged")
    start([LOGIN], "slurmctld")
    start(spec.node_hosts, "slurmd")


def _node_states(pids: Mapping[str, int]) -> dict[str, str]:
    """Return node -> state as in sinfo ("idle", "down*", ...); empty if the controller does not answer."""
    try:
        # grouped by state: one line per node (-N) takes sinfo a second for 10,000 nodes
        text = namespaces.run_on_host(pids[LOGIN], ["sinfo", "-h", "-o", "%T %N"], timeout=5)
    except SandboxError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {node: row[0] for row in rows if len(row) > 1 for node in hostlist.expand_hostlist(row[1])}


def _wait_for_nodes_idle(pids: Mapping[str, int], timeout: float = 30.0) -> None:
    """Return when every node is idle; SandboxError names nodes that are not."""
    deadline = time.monotonic() + timeout
    while True:
        states = _node_states(pids)
        not_idle = [node for node, state in states.items() if state.rstrip("~") != "idle"]
        if states and not not_idle:
            return
        if time.monotonic() > deadline:
            reason = f"not idle: {sample_names(not_idle)}" if not_idle else "the controller does not answer"
            raise SandboxError(f"Slurm is not ready after {timeout:g} s ({reason})")
        time.sleep(0.05)
