"""CPU quotas of hosts: a CFS bandwidth limit for the processes of each host that has one.

A control group belongs to the machine, not to the host's namespaces, and outlives it: `remove_quotas` removes the
groups of a sandbox. The first quota enables the cpu controller if necessary; removing the last sandbox with quotas
disables it again. See cgroups(7), sched-bwc in the kernel's documentation, and cpu.max of cgroup v2.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from slurmdl.errors import SandboxError

_PERIOD_US = 10_000  # far below a training step, which is then slowed down evenly
_MIN_QUOTA_US = 1_000  # limit of the kernel
_CONTROLLER = "cpu"
_GROUP_PREFIX = "slurmdl-sandbox."
#: empty group: a sandbox enabled the controller; both end with a reboot of the machine
_MARKER_GROUP = "slurmdl-sandbox-enabled-cpu"


def set_cpu_quota(sandbox: str, host: str, pid: int, fraction: float) -> None:
    """Limit all processes of a host together to a fraction of a core; 0 removes the limit.

    Raises SandboxError without a control group for the CPU, as in most containers, or below the kernel's minimum.
    """
    root = _cgroup_root()
    if root is None:
        raise SandboxError("no control group for the CPU is mounted; expected cgroup v1 with cpu, or v2 with cpu in "
                           "cgroup.controllers")
    group = root / f"{_GROUP_PREFIX}{sandbox}.{host}"
    quota = round(fraction * _PERIOD_US)
    if fraction and quota < _MIN_QUOTA_US:
        raise SandboxError(f"CPU limit {fraction:g}: expected 0 or at least {_MIN_QUOTA_US / _PERIOD_US:g} of a core")
    if not fraction and not group.exists():
        return
    try:
        with _group_lock(root):
            _enable_controller(root)
            group.mkdir(exist_ok=True)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
        add_processes(sandbox, host, pid)
    except OSError as error:
        raise SandboxError(f"{group}: {error.strerror}: cannot limit the CPU of {host}") from error


def add_processes(sandbox: str, host: str, pid: int) -> None:
    """Apply a host's quota, if any, to all processes of the PID namespace of `pid`, its first process."""
    if root := _cgroup_root():
        group = root / f"{_GROUP_PREFIX}{sandbox}.{host}"
        # repeat: a process that forks meanwhile leaves its child outside
        while group.exists() and (outside := _host_pids(pid) - set((group / "cgroup.procs").read_text().split())):
            for process in outside:
                with contextlib.suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(process)


def cpu_quotas(sandbox: str) -> dict[str, float]:
    """Return the fraction of a core by host, for hosts with a quota."""
    fractions = {}
    for group in _groups(sandbox):
        v1, v2 = group / "cpu.cfs_quota_us", group / "cpu.max"
        quota = (v2 if v2.exists() else v1).read_text().split()[0]
        if quota not in ("max", "-1"):
            fractions[group.name.removeprefix(f"{_GROUP_PREFIX}{sandbox}.")] = int(quota) / _PERIOD_US
    return fractions


def remove_quotas(sandbox: str) -> None:
    """Remove the quotas of a sandbox, after its processes ended."""
    root = _cgroup_root()
    if root is None:
        return
    with _group_lock(root):
        for group in _groups(sandbox):
            try:
                group.rmdir()
            except OSError as error:
                raise SandboxError(f"{group}: {error.strerror}") from error
        _disable_controller(root)


def _groups(sandbox: str) -> list[Path]:
    root = _cgroup_root()
    return sorted(root.glob(f"{_GROUP_PREFIX}{sandbox}.*")) if root else []


def _cgroup_root() -> Path | None:
    """Return the cgroup v1 or v2 directory with the cpu controller, if any."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, options, *_ = line.split()
        root = Path(mount_point)
        if (kind == "cgroup" and _CONTROLLER in options.split(",")) or (
                kind == "cgroup2" and _CONTROLLER in (root / "cgroup.controllers").read_text().split()):
            return root
    return None


@contextlib.contextmanager
def _group_lock(root: Path) -> Iterator[None]:
    """Lock the groups against other sandboxes."""
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _enable_controller(root: Path) -> None:
    """Enable the controller for groups in `root` (cgroup v2), and mark the change."""
    control, marker = root / "cgroup.subtree_control", root / _MARKER_GROUP
    if control.exists() and _CONTROLLER not in control.read_text().split():
        marker.mkdir(exist_ok=True)
        try:
            control.write_text(f"+{_CONTROLLER}")
        except OSError:
            marker.rmdir()
            raise


def _disable_controller(root: Path) -> None:
    """Disable the controller if a sandbox enabled it and no other group uses it."""
    marker = root / _MARKER_GROUP
    if not marker.exists() or any(root.glob(f"{_GROUP_PREFIX}*")):
        return
    marker.rmdir()
    if all(file.read_text().split()[0] in ("max", "100") for name in ("max", "weight")
           for file in root.glob(f"*/cpu.{name}")):
        with contextlib.suppress(OSError):  # another program uses it in child groups
            (root / "cgroup.subtree_control").write_text(f"-{_CONTROLLER}")


def _host_pids(pid: int) -> set[str]:
    """Return the process ids of a host, as seen from the machine."""
    namespace = os.stat(f"/proc/{pid}/ns/pid")  # its times are those of the lookup
    pids = set()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samestat(os.stat(f"{entry.path}/ns/pid"), namespace):
                pids.add(entry.name)
    return pids
