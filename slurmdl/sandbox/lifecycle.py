"""Bring a sandbox up, run commands on it, change it, take it down."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import slurmdl
from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import cpu_quota, namespaces, slurm_daemons, veth_links
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, check_name

_STATE_ROOT = Path("/var/lib/slurmdl-sandbox")
#: the account that the sandbox makes up (on its hosts only) where root has no sudo user behind it
_DEFAULT_USER = ("researcher", 20001)


class Sandbox:
    """A sandbox that is up. `up` and `find` make one."""

    def __init__(self, spec: SandboxSpec, pids: dict[str, int], user: slurm_daemons.JobUser) -> None:
        self.spec, self.pids, self.user = spec, pids, user
        self.root = _STATE_ROOT / spec.name

    @property
    def shared(self) -> Path:
        """The directory that all hosts share; every user may write to it."""
        return self.root / "shared"

    def command(self, argv: Sequence[str], host: str = LOGIN, *, as_root: bool = False,
                directory: str | None = None) -> list[str]:
        """The command line that runs `argv` on a host, as the ordinary user, in `directory`.

        Where the user may not enter the directory (default: the current one), the command starts in the shared
        one; where the user may not write to it, the output of jobs goes to the shared one. Variables of an outer
        Slurm are taken away.
        """
        if host not in self.pids:
            raise UsageError(f"sandbox {self.spec.name} has no host {host!r} (hosts: {', '.join(self.pids)})")
        user = slurm_daemons.JobUser("root", 0, 0, "/root") if as_root else self.user
        foreign = [f"--unset={name}" for name in os.environ
                   if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUDO_"))]
        venv = os.path.join(sys.prefix, "bin")
        environ = [f"HOME={user.home}", f"USER={user.name}", f"LOGNAME={user.name}", "SHELL=/bin/bash",
                   f"PATH={venv}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
        drop = [] if as_root else ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--init-groups"]
        # Slurm writes a job's output where it was submitted, and loses the job where it cannot
        start = (f'cd -- "$1" 2>/dev/null || cd {self.shared} || exit 71; shift; '
                 f'[ -w . ] || export SBATCH_OUTPUT="${{SBATCH_OUTPUT-{self.shared}/slurm-%j.out}}"; exec "$@"')
        return namespaces.nsenter_command(self.pids[host], [
            "env", *foreign, *environ, *drop, "sh", "-c", start, "sh", directory or os.getcwd(), *argv])

    def node_states(self) -> dict[str, str]:
        """State of every node as sinfo words it; empty while the controller does not answer."""
        return slurm_daemons.node_states(self.pids)

    def zone_byte_counters(self) -> dict[str, dict[str, int]]:
        """Bytes between zones as the zones' routers counted them: zone -> {"out": bytes, "in": bytes}."""
        return veth_links.zone_byte_counters(self.pids, self.spec.topology.zones)

    def inter_zone_bytes(self) -> int:
        """Bytes that nodes have sent out of their zones so far, all zones together."""
        return sum(counter["out"] for counter in self.zone_byte_counters().values())

    def shape_link(self, name: str, *, rate: float | None = None, delay: float | None = None,
                    loss: float | None = None) -> str:
        """Change a node's link, a zone's uplink, or the way between two leaf zones alone (`zoneA|zoneB`), each way,
        and say by which means; None leaves it as it is.

        Parameters
        ----------
        rate : bits/s, 0 for unshaped.
        delay : seconds that every packet is held.
        loss : share of the packets between nodes that get lost.
        """
        shapes, ends = self.link_shapes(), veth_links.find_inter_leaf(self.spec, name)
        cable = None if ends else veth_links.find_link(self.spec, name)
        name = veth_links.inter_leaf_label(ends) if ends else name
        old = shapes.pop(name, veth_links.LinkShape(cable.rate) if cable else veth_links.UNSHAPED)
        new = replace(old, **{key: value for key, value in (("rate", rate), ("delay", delay), ("loss", loss))
                              if value is not None})
        if cable:
            means = veth_links.set_link_shape(self.pids, cable, old, new, veth_links.restore_commands(self.spec, cable))
        elif ends:
            means = veth_links.set_inter_leaf_shape(self.spec, self.pids, ends, old, new)
        if cable or new != veth_links.UNSHAPED:
            shapes[name] = new
        (self.root / "links.json").write_text(json.dumps({k: vars(v) for k, v in shapes.items()}))
        return means

    def link_shapes(self) -> dict[str, veth_links.LinkShape]:
        """The links that were changed, by node, zone, or pair of zones."""
        file = self.root / "links.json"
        return {k: veth_links.LinkShape(**v) for k, v in json.loads(file.read_text()).items()} if file.exists() else {}

    def limit_cpu(self, node: str, fraction: float) -> None:
        """Let the processes of a node together have so much of a core, its jobs among them; 0 for no limit."""
        if node not in self.pids or node not in self.spec.node_hosts:
            raise UsageError(
                f"sandbox {self.spec.name} has no node {node!r} (nodes: {', '.join(self.spec.node_hosts)})")
        cpu_quota.set_cpu_quota(self.spec.name, node, self.pids[node], fraction)

    def cpu_fractions(self) -> dict[str, float]:
        """Node -> its part of a core, of the nodes that have a limit."""
        return cpu_quota.cpu_quotas(self.spec.name)

    def daemon_pid(self, host: str) -> int:
        """Process id (seen from here) of slurmctld on the login host, of slurmd on a node."""
        daemon = "slurmctld" if host == LOGIN else "slurmd"
        inside = os.stat(f"/proc/{self.pids[host]}/ns/pid")
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if (entry.name.isdigit() and Path(entry.path, "comm").read_text().strip() == daemon
                        and os.stat(f"{entry.path}/ns/pid") == inside):
                    return int(entry.name)
        log = self.root / "log" / f"{daemon if host == LOGIN else host}.log"
        last = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
        raise SandboxError(f"no {daemon} runs on {host} ({log} ends with {' '.join(last)!r})")

    def start_daemon(self, host: str) -> None:
        """Start the Slurm daemon of a host again after it was stopped."""
        daemon = ["slurmctld"] if host == LOGIN else ["slurmd", "-N", host]
        namespaces.run_on_host(self.pids[host], daemon)
        cpu_quota.add_processes(self.spec.name, host, self.pids[host])

    def power_off(self, node: str) -> None:
        """End a node as a loss of power would: all its processes at once, and its link."""
        namespaces.stop_hosts(self.spec.name, [node])
        self.pids.pop(node, None)

    def to_json(self) -> dict[str, Any]:
        return {"spec": self.spec.to_json(), "user": vars(self.user)}


def sandbox_up(spec: SandboxSpec) -> Sandbox:
    """Bring a sandbox up and return when Slurm calls all its nodes idle.

    What an earlier, broken start of the same name left is cleared first; a running one is an error.

    Raises
    ------
    SandboxError : no root, a program is missing (with its package), the name is taken, a host or daemon fails.
    """
    _check_requirements()
    root = _STATE_ROOT / spec.name
    if (root / "ready").exists() and namespaces.running_hosts(spec.name):
        raise SandboxError(f"sandbox {spec.name} is up already; `slurmdl sandbox down --name {spec.name}` ends it")
    sandbox_down(spec.name)
    user = _job_user(root)
    shares = _bind_mounts(spec, user)
    try:
        stages = ["copied", *map(str, range(len(shares)))]
        for directory in ("spool/ctld", "log", "shared/home", *(f"stage/{stage}" for stage in stages)):
            (root / directory).mkdir(parents=True)
        for node in spec.node_hosts:
            (root / "spool" / node).mkdir()
        (root / "shared").chmod(0o1777)
        if user.home.startswith(str(root)):
            os.mkdir(user.home, 0o755)
            os.chown(user.home, user.uid, user.gid)
        slurm_daemons.write_config_files(spec, root, user)
        private = f"{namespaces.host_mount_script(shares, str(root), user.may_enter)}\n{slurm_daemons.config_mount_script(root)}"
        mounts = dict.fromkeys([LOGIN, *spec.node_hosts], private)
        mounts |= {} if spec.cloud_nodes else dict.fromkeys(spec.topology.zones, "")
        pids = namespaces.start_hosts(spec.name, list(mounts), mounts)
        veth_links.create_links(spec, pids)
        slurm_daemons.start_daemons(spec, root, pids)
        slurm_daemons.wait_until_ready(pids)
        sandbox = Sandbox(spec, pids, user)
        (root / "state.json").write_text(json.dumps(sandbox.to_json()))
        (root / "ready").touch()
    except BaseException:
        sandbox_down(spec.name)
        raise
    return sandbox


def find_sandbox(name: str) -> Sandbox:
    """The running sandbox of a name; SandboxError where there is none."""
    check_name(name)
    _check_root()
    root, pids = _STATE_ROOT / name, namespaces.running_hosts(name)
    if not pids or not (root / "ready").exists():
        others = sorted(namespaces.running_sandboxes())
        raise SandboxError(f"no sandbox {name} is up" + (f" (up: {', '.join(others)})" if others else "")
                           + f"; `slurmdl sandbox up --name {name}` starts it")
    state = json.loads((root / "state.json").read_text())
    return Sandbox(SandboxSpec.from_json(state["spec"]), pids, slurm_daemons.JobUser(**state["user"]))


def sandbox_down(name: str) -> bool:
    """End a sandbox, whole or half-made, and remove all that is left of it. False where there was nothing."""
    check_name(name)
    _check_root()
    root = _STATE_ROOT / name
    existed = bool(namespaces.running_hosts(name)) or root.exists()
    namespaces.stop_hosts(name)
    cpu_quota.remove_quotas(name)
    if root.exists():
        shutil.rmtree(root)
    with contextlib.suppress(OSError):
        _STATE_ROOT.rmdir()
    return existed


def _check_root() -> None:
    if os.geteuid():
        raise SandboxError("the sandbox needs root to make network namespaces: run it with sudo")


def _check_requirements() -> None:
    if not sys.platform.startswith("linux"):
        raise SandboxError("the sandbox needs Linux: its hosts are Linux namespaces")
    _check_root()
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [program for program in slurm_daemons.REQUIRED_PROGRAMS if not shutil.which(program, path=path)]
    if missing:
        packages = sorted({slurm_daemons.REQUIRED_PROGRAMS[program] for program in missing})
        raise SandboxError(f"missing: {', '.join(missing)}; on Debian: apt-get install {' '.join(packages)}")


def _job_user(root: Path) -> slurm_daemons.JobUser:
    """The user behind sudo, else an account that exists on the sandbox's hosts only."""
    uid = int(os.environ.get("SUDO_UID", "0") or 0)
    if uid:
        entry = pwd.getpwuid(uid)
        return slurm_daemons.JobUser(entry.pw_name, uid, entry.pw_gid, entry.pw_dir)
    name, number = _DEFAULT_USER
    return slurm_daemons.JobUser(name, number, number, f"{root}/shared/home/{name}")


def _bind_mounts(spec: SandboxSpec, user: slurm_daemons.JobUser) -> list[str]:
    """Directories to keep visible: those asked for, this package, and the Python that runs it."""
    package = str(Path(slurmdl.__file__).resolve().parent.parent)
    wanted = [*spec.bind_mounts, package, os.path.abspath(sys.prefix), os.path.abspath(sys.base_prefix)]
    kept: list[str] = []
    for path in (os.path.abspath(p) for p in wanted):
        if not os.path.isdir(path):
            raise SandboxError(f"--share {path}: not a directory")
        if path == "/" or path.startswith("/usr") or any(path == k or path.startswith(k + "/") for k in kept):
            continue
        kept = [k for k in kept if not k.startswith(path + "/")] + [path]
    for path in kept:
        if not user.may_read(Path(path)):
            raise SandboxError(f"{path}: {user.name} may not read it; `chmod o+rx {path}` lets the nodes see it")
    return kept
