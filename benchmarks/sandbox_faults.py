"""Faults in a sandbox: processes of its daemons, their restart, and the power failure of a node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slurmdl.errors import SandboxError
from slurmdl.sandbox import namespaces
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import LOGIN


def daemon_pid(sandbox: Sandbox, host: str) -> int:
    """Return the process id, as seen from the machine, of slurmctld on the login host or slurmd on a node."""
    daemon = "slurmctld" if host == LOGIN else "slurmd"
    namespace = os.stat(f"/proc/{sandbox.pids[host]}/ns/pid")  # its times are those of the lookup
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if (entry.name.isdigit() and Path(entry.path, "comm").read_text().strip() == daemon
                    and os.path.samestat(os.stat(f"{entry.path}/ns/pid"), namespace)):
                return int(entry.name)
    log = sandbox.root / "log" / f"{daemon if host == LOGIN else host}.log"
    last_lines = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
    raise SandboxError(f"no {daemon} runs on {host} ({log} ends with {' '.join(last_lines)!r})")


def start_daemon(sandbox: Sandbox, host: str) -> None:
    """Restart the stopped Slurm daemon of a host."""
    daemon = ["slurmctld"] if host == LOGIN else ["slurmd", "-N", host]
    namespaces.run_on_host(sandbox.pids[host], daemon)
    namespaces.apply_cpu_quota(sandbox.spec.name, host, sandbox.pids[host])


def power_off(sandbox: Sandbox, node: str) -> None:
    """Kill all processes of a node at once and remove its link, as a power failure does."""
    namespaces.stop_hosts(sandbox.spec.name, [node])
    sandbox.pids.pop(node, None)
