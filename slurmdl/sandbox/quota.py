"""How much of a core the processes of a host get: a quota of the kernel's scheduler for each host that has one.

A control group belongs to the machine, not to the host's namespaces, so that it does not end with them: `drop` takes
away those of a sandbox. See cgroups(7), sched-bwc in the kernel's documentation, and cpu.max of cgroup v2.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slurmdl.errors import SandboxError

#: microseconds in which a quota may be used up once: far below a training step, so that it slows one down evenly
_PERIOD = 10_000
#: of a quota, in microseconds; the kernel's least is 1000
_LEAST = 1_000
_PREFIX = "slurmdl-sandbox."


def limit(sandbox: str, host: str, pid: int, share: float) -> None:
    """Let all processes of a host together, and those that they start, have so much of a core; 0 for no limit.

    Raises
    ------
    SandboxError : no control group for the CPU, as in most containers; or a share that the kernel cannot give.
    """
    group = _root() / f"{_PREFIX}{sandbox}.{host}"
    quota = round(share * _PERIOD)
    if share and quota < _LEAST:
        raise SandboxError(f"cpu {share:g}: the kernel gives no less than {_LEAST / _PERIOD:g} of a core")
    if not share and not group.exists():
        return
    try:
        group.mkdir(exist_ok=True)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
        join(sandbox, host, pid)
    except OSError as error:
        raise SandboxError(f"{group}: {error.strerror}: the processes of {host} cannot be limited") from error


def join(sandbox: str, host: str, pid: int) -> None:
    """Bring those processes of a host under its quota, if it has one, that were started from outside.

    Parameters
    ----------
    pid : the host's first process; all of its process namespace are the host's.
    """
    with contextlib.suppress(SandboxError):
        group = _root() / f"{_PREFIX}{sandbox}.{host}"
        # one that forks meanwhile leaves a child outside, which is found when nothing else is
        while group.exists() and (outside := _processes(pid) - set((group / "cgroup.procs").read_text().split())):
            for process in outside:
                with contextlib.suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(process)


def shares(sandbox: str) -> dict[str, float]:
    """Host -> its part of a core, of the hosts that have a quota."""
    found = {}
    for group in _groups(sandbox):
        old, new = group / "cpu.cfs_quota_us", group / "cpu.max"
        quota = (new if new.exists() else old).read_text().split()[0]
        if quota not in ("max", "-1"):
            found[group.name.removeprefix(f"{_PREFIX}{sandbox}.")] = int(quota) / _PERIOD
    return found


def drop(sandbox: str) -> None:
    """Take the quotas of a sandbox away, once no process of it is left."""
    for group in _groups(sandbox):
        try:
            group.rmdir()
        except OSError as error:
            raise SandboxError(f"{group}: {error.strerror}") from error


def _groups(sandbox: str) -> list[Path]:
    try:
        return sorted(_root().glob(f"{_PREFIX}{sandbox}.*"))
    except SandboxError:
        return []  # where none can be made there are none


def _root() -> Path:
    """The directory in which groups for the CPU are made, of cgroup v1 or v2, whichever has the controller."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if kind == "cgroup" and "cpu" in options.split(","):
            return root
        if kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+cpu")
                return root
    raise SandboxError("no control group for the CPU is mounted (cgroup v1 with cpu, or v2 with it among "
                       "cgroup.controllers); stopping and continuing processes would be no substitute")


def _processes(pid: int) -> set[str]:
    """Ids, seen from here, of all processes of a host."""
    inside = os.stat(f"/proc/{pid}/ns/pid")
    found = set()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.stat(f"{entry.path}/ns/pid") == inside:
                found.add(entry.name)
    return found
