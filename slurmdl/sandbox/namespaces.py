"""Hosts made of namespaces: each has its own network, host name, mounts and process ids, and may have a CPU quota.

A host lives as long as its first process: a sleeper whose environment names the sandbox and the host. As process 1 of
its PID namespace it takes all processes of the host with it when it ends, and with them mounts, links and rules. So
nothing needs explicit cleanup, and a half-started sandbox is found by the same variable.

A CPU quota is a CFS bandwidth limit (sched-bwc in the kernel's documentation, cpu.max of cgroup v2) of a control
group (cgroups(7)), which belongs to the machine and outlives the host: `remove_cpu_quotas` removes the groups of a
sandbox. The first quota enables the cpu controller of cgroup v2 if necessary; it stays enabled until a reboot.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slurmdl.errors import SandboxError

_HOST_VARIABLE = "SLURMDL_SANDBOX_HOST"
_SLEEP_COMMAND = "sleep"
#: private directories of every host, with their modes
_PRIVATE_DIRS = {"/tmp": "1777", "/var/tmp": "1777", "/run": "755", "/dev/shm": "1777"}
_OVERLAY_DIR = "/var/lib"  # directory with the machine's content and private changes of every host

_PERIOD_US = 10_000  # far below a training step, which is then slowed down evenly
_MIN_QUOTA_US = 1_000  # limit of the kernel
_GROUP_PREFIX = "slurmdl-sandbox."


def running_hosts(sandbox: str) -> dict[str, int]:
    """Return the hosts of a sandbox with the process id of their first process, as seen from the machine."""
    hosts = {}
    for pid, name, host in _marked_processes():
        with contextlib.suppress(OSError):
            if name == sandbox and _read(f"/proc/{pid}/comm").strip() == _SLEEP_COMMAND:
                hosts[host] = pid
    return hosts


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _marked_processes() -> Iterator[tuple[int, str, str]]:
    """Yield (process id, sandbox, host) of all processes with the variable: sleepers and their starters."""
    prefix = f"{_HOST_VARIABLE}="
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = _read(f"/proc/{pid}/environ")
            if environ.startswith(prefix):
                sandbox, _, host = environ[len(prefix):].split("\0", 1)[0].partition("/")
                yield int(pid), sandbox, host


def running_sandboxes() -> set[str]:
    """Return the names of all sandboxes with a process."""
    return {sandbox for _, sandbox, _ in _marked_processes()}


def start_hosts(sandbox: str, mounts: Mapping[str, str], timeout: float = 20.0) -> dict[str, int]:
    """Start hosts and return their process ids as `running_hosts` does.

    `mounts` is the shell text by host that mounts its file systems. SandboxError names a host that failed.
    """
    starters = {}
    for name, mount_script in mounts.items():
        script = (f"mount --make-rprivate /\nhostname {shlex.quote(name)}\nip link set lo up\n{mount_script}\n"
                  f"exec env -i --ignore-signal=CHLD {_HOST_VARIABLE}={sandbox}/{name} {_SLEEP_COMMAND} infinity")
        # with SIGCHLD ignored, the kernel reaps the daemons' orphans, which process 1 inherits
        starters[name] = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL",
             "sh", "-euc", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
            env={_HOST_VARIABLE: f"{sandbox}/{name}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True)
    deadline = time.monotonic() + timeout
    while True:
        up = running_hosts(sandbox)
        missing = [name for name in mounts if name not in up]
        if dead := [name for name in missing if starters[name].poll() is not None]:
            text = starters[dead[0]].communicate()[1].decode(errors="replace")
            raise SandboxError(f"host {dead[0]} did not start: {' '.join(text.split()) or 'no message'}")
        if not missing:
            return {name: up[name] for name in mounts}
        if time.monotonic() > deadline:
            raise SandboxError(f"host {missing[0]} did not start within {timeout:g} s")
        time.sleep(0.03)


def stop_hosts(sandbox: str, names: Sequence[str] | None = None, timeout: float = 10.0) -> bool:
    """End hosts (default: all) and all their processes; return, when they have exited, whether there were any."""
    deadline = time.monotonic() + timeout
    existed = False
    while running := {pid for pid, name, host in _marked_processes()
                      if name == sandbox and (names is None or host in names)}:
        existed = True
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # a killed process has no environment, but process 1 of a host ends only after all others
        while running := {pid for pid in running if _is_alive(pid)}:
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox {sandbox}: processes {sorted(running)} do not exit")
            time.sleep(0.01)
    return existed


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) == (0, 0)  # a child of this process
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] != "Z"  # init may reap it seconds later
    except OSError:
        return False


def nsenter_command(pid: int, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` as root on the host with first process `pid`."""
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--pid", "--", *argv]


def run_on_host(pid: int, argv: Sequence[str], *, stdin: str = "", timeout: float = 20.0) -> str:
    """Run a command as root on a host and return its stdout; SandboxError quotes its stderr if it fails."""
    try:
        result = subprocess.run(nsenter_command(pid, argv), input=stdin, capture_output=True, text=True,
                                timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{argv[0]}: {error}") from error
    if result.returncode:
        raise SandboxError(f"{argv[0]}: exit status {result.returncode}: {' '.join(result.stderr.split())[-300:]}")
    return result.stdout


def run_batch(pid: int, program: str, lines: Sequence[str]) -> None:
    """Run lines of ip(8) or tc(8) commands on a host."""
    run_on_host(pid, [program, "-batch", "-"], stdin="\n".join(lines) + "\n")


def host_mount_script(bind_mounts: Sequence[str], root: str, may_enter: Callable[[Path], bool]) -> str:
    """Return shell text that gives a host private directories; the rest of its file system is the machine's.

    Args:
        bind_mounts: directories that keep their path. If one is inside a private directory, or in one that the user
            may not enter (a home of root, a `mktemp -d`), an empty directory with the bind mount covers that one.
        root: the sandbox's directory, shared by all hosts. Its `stage` has one entry per bind mount ("0", "1", ...)
            as a temporary mount point, and "copied".
    """
    stage = shlex.quote(f"{root}/stage")
    lines = _overlay_script([root, *bind_mounts], f"{root}/stage/copied")
    lines += [f"mount --bind {shlex.quote(path)} {stage}/{i}" for i, path in enumerate(bind_mounts)]
    # the topmost parent of each bind mount that the user may not enter
    closed = {str(next((parent for parent in reversed(Path(path).parents) if not may_enter(parent)), ""))
              for path in bind_mounts} - {""}
    covers = [*_PRIVATE_DIRS, *sorted(closed)]
    for cover in covers:
        if not any(cover.startswith(outer + "/") for outer in covers):
            lines.append(f"mount -t tmpfs -o mode={_PRIVATE_DIRS.get(cover, '755')} tmpfs {shlex.quote(cover)}")
    for i, path in enumerate(bind_mounts):
        if any(path == cover or path.startswith(cover + "/") for cover in covers):
            lines += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {stage}/{i} {shlex.quote(path)}"]
        lines.append(f"umount {stage}/{i}")
    return "\n".join(lines)


def _overlay_script(bind_mounts: Sequence[str], stage: str) -> list[str]:
    """Return lines that mount an overlay on _OVERLAY_DIR, built in `stage`, with the bind mounts inside it."""
    base = shlex.quote(stage)
    mounts = [(shlex.quote(path), shlex.quote(path.removeprefix(_OVERLAY_DIR))) for path in bind_mounts
            if path.startswith(f"{_OVERLAY_DIR}/")]
    return [f"mount -t tmpfs -o mode=755 tmpfs {base}", f"mkdir {base}/upper {base}/work {base}/merged",
            f"mount -t overlay -o lowerdir={_OVERLAY_DIR},upperdir={base}/upper,workdir={base}/work overlay "
            f"{base}/merged",
            *(f"mount --bind {path} {base}/merged{relative}" for path, relative in mounts),
            f"mount --move {base}/merged {_OVERLAY_DIR}"]


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
        control = root / "cgroup.subtree_control"  # of cgroup v2
        if control.exists() and "cpu" not in control.read_text().split():
            control.write_text("+cpu")
        group.mkdir(exist_ok=True)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
        apply_cpu_quota(sandbox, host, pid)
    except OSError as error:
        raise SandboxError(f"{group}: {error.strerror}: cannot limit the CPU of {host}") from error


def apply_cpu_quota(sandbox: str, host: str, pid: int) -> None:
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


def remove_cpu_quotas(sandbox: str) -> None:
    """Remove the quotas of a sandbox, after its processes ended."""
    for group in _groups(sandbox):
        try:
            group.rmdir()
        except OSError as error:
            raise SandboxError(f"{group}: {error.strerror}") from error


def _groups(sandbox: str) -> list[Path]:
    root = _cgroup_root()
    return sorted(root.glob(f"{_GROUP_PREFIX}{sandbox}.*")) if root else []


def _cgroup_root() -> Path | None:
    """Return the cgroup v1 or v2 directory with the cpu controller, if any."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, options, *_ = line.split()
        root = Path(mount_point)
        if (kind == "cgroup" and "cpu" in options.split(",")) or (
                kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split()):
            return root
    return None


def _host_pids(pid: int) -> set[str]:
    """Return the process ids of a host, as seen from the machine."""
    namespace = os.stat(f"/proc/{pid}/ns/pid")  # its times are those of the lookup
    pids = set()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samestat(os.stat(f"{entry.path}/ns/pid"), namespace):
                pids.add(entry.name)
    return pids
