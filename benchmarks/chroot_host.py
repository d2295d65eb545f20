"""A host of its own with the Slurm of another Debian release: namespaces around a chroot of tools/debian-chroot.

The host consists of namespaces for network, mounts, processes and host name, as in the sandbox; its processes end
with its first process. Used by benchmarks and by tests of other releases.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path


def root_of(suite: str) -> Path:
    """Return the directory of the chroot that tools/debian-chroot creates."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/root")) / ".cache"
    return Path(cache) / "slurmdl/debian" / suite


def write_munge_key(path: Path) -> None:
    """Write a new key that only root can read."""
    path.touch(0o400)
    path.write_bytes(secrets.token_bytes(1024))


def start_host(script: str, log: Path, search_path: str) -> subprocess.Popen[bytes]:
    """Start a host; the shell script sets it up, and ends as a `sleep` that remains its first process."""
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child=KILL", "sh",
             "-euc", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={"PATH": search_path})


def first_process(host: subprocess.Popen[bytes]) -> int:
    """ID of the host's first process, 0 before it exists."""
    children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
    return int((children.read_text().split() or ["0"])[0])


def is_set_up(first: int) -> bool:
    """Whether the script of the host with this first process has ended."""
    return bool(first) and Path(f"/proc/{first}/comm").read_text().strip() == "sleep"


def enter_chroot(first: int, root: Path) -> list[str]:
    """Words before a command that runs in the chroot on the host with this first process."""
    return ["nsenter", "--target", str(first), "--net", "--uts", "--mount", "--pid", "--", "chroot", str(root)]
