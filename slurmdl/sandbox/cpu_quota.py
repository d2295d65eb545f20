"""How much of a core the processes of a host get: a quota of the kernel's scheduler for each host that has one.

A control group belongs to the machine, not to the host's namespaces, so that it does not end with them: `drop` takes
away those of a sandbox. Where the machine had not enabled the controller, the first quota enables it, and the `drop`
of the last sandbox with quotas disables it again. See cgroups(7), sched-bwc in the kernel's documentation, and
cpu.max of cgroup v2.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from slurmdl.errors import SandboxError

#: microseconds in which a quota may be used up once: far below a training step, so that it slows one down evenly
_PERIOD_US = 10_000
#: of a quota, in microseconds; the kernel's least is 1000
_MIN_QUOTA_US = 1_000
_CONTROLLER = "cpu"
_GROUP_PREFIX = "slurmdl-sandbox."
#: an empty group that says that a sandbox has enabled the controller; like that, it ends with the machine's boot
_MARKER_GROUP = "slurmdl-sandbox-enabled-cpu"


def set_cpu_quota(sandbox: str, host: str, pid: int, fraction: float) -> None:
    """Let all processes of a host together, and those that they start, have so much of a core; 0 for no limit.

    Raises
    ------
    SandboxError : no control group for the CPU, as in most containers; or a share that the kernel cannot give.
    """
    root = _cgroup_root()
    group = root / f"{_GROUP_PREFIX}{sandbox}.{host}"
    quota = round(fraction * _PERIOD_US)
    if fraction and quota < _MIN_QUOTA_US:
        raise SandboxError(
            f"cpu {fraction:g}: the kernel gives no less than {_MIN_QUOTA_US / _PERIOD_US:g} of a core")
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
        raise SandboxError(f"{group}: {error.strerror}: the processes of {host} cannot be limited") from error


def add_processes(sandbox: str, host: str, pid: int) -> None:
    """Bring those processes of a host under its quota, if it has one, that were started from outside.

    Parameters
    ----------
    pid : the host's first process; all of its process namespace are the host's.
    """
    with contextlib.suppress(SandboxError):
        group = _cgroup_root() / f"{_GROUP_PREFIX}{sandbox}.{host}"
        # one that forks meanwhile leaves a child outside, which is found when nothing else is
        while group.exists() and (outside := _host_pids(pid) - set((group / "cgroup.procs").read_text().split())):
            for process in outside:
                with contextlib.suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(process)


def cpu_quotas(sandbox: str) -> dict[str, float]:
    """Host -> its part of a core, of the hosts that have a quota."""
    found = {}
    for group in _groups(sandbox):
        old, new = group / "cpu.cfs_quota_us", group / "cpu.max"
        quota = (new if new.exists() else old).read_text().split()[0]
        if quota not in ("max", "-1"):
            found[group.name.removeprefix(f"{_GROUP_PREFIX}{sandbox}.")] = int(quota) / _PERIOD_US
    return found


def remove_quotas(sandbox: str) -> None:
    """Take the quotas of a sandbox away, once no process of it is left."""
    try:
        root = _cgroup_root()
    except SandboxError:
        return  # where none can be made there are none
    with _group_lock(root):
        for group in _groups(sandbox):
            try:
                group.rmdir()
            except OSError as error:
                raise SandboxError(f"{group}: {error.strerror}") from error
        _disable_controller(root)


def _groups(sandbox: str) -> list[Path]:
    try:
        return sorted(_cgroup_root().glob(f"{_GROUP_PREFIX}{sandbox}.*"))
    except SandboxError:
        return []


def _cgroup_root() -> Path:
    """The directory in which groups for the CPU are made, of cgroup v1 or v2, whichever has the controller."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if (kind == "cgroup" and _CONTROLLER in options.split(",")) or (
                kind == "cgroup2" and _CONTROLLER in (root / "cgroup.controllers").read_text().split()):
            return root
    raise SandboxError("no control group for the CPU is mounted (cgroup v1 with cpu, or v2 with it among "
                       "cgroup.controllers); stopping and continuing processes would be no substitute")


@contextlib.contextmanager
def _group_lock(root: Path) -> Iterator[None]:
    """No other sandbox makes or removes a group meanwhile."""
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _enable_controller(root: Path) -> None:
    """Give the groups in `root` the controller, in cgroup v2, and remember it where that changes anything."""
    control, mark = root / "cgroup.subtree_control", root / _MARKER_GROUP
    if control.exists() and _CONTROLLER not in control.read_text().split():
        mark.mkdir(exist_ok=True)
        try:
            control.write_text(f"+{_CONTROLLER}")
        except OSError:
            mark.rmdir()
            raise


def _disable_controller(root: Path) -> None:
    """Disable the controller again if a sandbox enabled it, and nobody has begun to use it since."""
    mark = root / _MARKER_GROUP
    if not mark.exists() or any(root.glob(f"{_GROUP_PREFIX}*")):
        return
    mark.rmdir()
    if all(file.read_text().split()[0] in ("max", "100") for name in ("max", "weight")
           for file in root.glob(f"*/cpu.{name}")):
        with contextlib.suppress(OSError):  # another program has enabled it in groups of its own
            (root / "cgroup.subtree_control").write_text(f"-{_CONTROLLER}")


def _host_pids(pid: int) -> set[str]:
    """Ids, seen from here, of all processes of a host."""
    inside = os.stat(f"/proc/{pid}/ns/pid")
    found = set()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.stat(f"{entry.path}/ns/pid") == inside:
                found.add(entry.name)
    return found
