"""Hosts made of namespaces: each has its own network, host name, mounts and process ids.

A host lives as long as its first process, a sleeper that a variable in its environment marks with the
names of sandbox and host. It is the host's process 1, so the kernel ends every process of the host with
it, and with them go the mounts, the links and the rules of the host: nothing has to be remembered to be
taken away, and a sandbox whose making was cut off is found by the same mark.
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
#: directories that every host has for itself, with their modes
_PRIVATE_DIRS = {"/tmp": "1777", "/var/tmp": "1777", "/run": "755", "/dev/shm": "1777"}
#: directory of which every host sees the machine's content, but keeps its changes for itself
_OVERLAY_DIR = "/var/lib"


def running_hosts(sandbox: str) -> dict[str, int]:
    """The living hosts of a sandbox: host name -> process id of its first process, seen from here."""
    hosts = {}
    for pid, name, host in _marked_processes():
        with contextlib.suppress(OSError):
            if name == sandbox and Path(f"/proc/{pid}/comm").read_text().strip() == _SLEEP_COMMAND:
                hosts[host] = pid
    return hosts


def _marked_processes() -> Iterator[tuple[int, str, str]]:
    """(process id, sandbox, host) of all processes with the mark: the sleepers, and what starts them."""
    prefix = f"{_HOST_VARIABLE}=".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                environ = Path(entry.path, "environ").read_bytes()
                if environ.startswith(prefix):
                    sandbox, _, host = environ[len(prefix):].split(b"\0", 1)[0].decode().partition("/")
                    yield int(entry.name), sandbox, host


def running_sandboxes() -> set[str]:
    """Names of all sandboxes of which anything lives."""
    return {sandbox for _, sandbox, _ in _marked_processes()}


def start_hosts(sandbox: str, names: Sequence[str], mounts: Mapping[str,
                str], timeout: float = 20.0) -> dict[str, int]:
    """Start the hosts `names`; `mounts[name]` is the shell text that lays the host's file systems.

    Returns the process ids as `find` does. SandboxError names the host that did not come up.
    """
    starters = {}
    for name in names:
        script = (f"mount --make-rprivate /\nhostname {shlex.quote(name)}\nip link set lo up\n{mounts[name]}\n"
                  f"exec env -i --ignore-signal=CHLD {_HOST_VARIABLE}={sandbox}/{name} {_SLEEP_COMMAND} infinity")
        # SIGCHLD is ignored so that the kernel reaps the daemons' orphans, which fall to process 1
        starters[name] = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL",
             "sh", "-euc", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
            env={_HOST_VARIABLE: f"{sandbox}/{name}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, start_new_session=True)
    deadline = time.monotonic() + timeout
    while True:
        up = running_hosts(sandbox)
        missing = [name for name in names if name not in up]
        dead = [name for name in missing if starters[name].poll() is not None]
        if dead:
            error = starters[dead[0]].stderr
            text = error.read().decode(errors="replace").strip() if error else ""
            raise SandboxError(f"host {dead[0]} did not start: {' '.join(text.split()) or 'no message'}")
        if not missing:
            return {name: up[name] for name in names}
        if time.monotonic() > deadline:
            raise SandboxError(f"host {missing[0]} did not start within {timeout:g} s")
        time.sleep(0.01)


def stop_hosts(sandbox: str, names: Sequence[str] | None = None, timeout: float = 10.0) -> None:
    """End hosts (all of them by default) and every process on them; returns when they are gone."""
    deadline = time.monotonic() + timeout
    ended: set[int] = set()
    while True:
        left = {pid for pid, name, host in _marked_processes() if name == sandbox and (names is None or host in names)}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # a killed process has lost its mark, but process 1 of a host ends only after all others of the host
        ended = {pid for pid in ended | left if _is_alive(pid)}
        if not left and not ended:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"sandbox {sandbox}: processes {sorted(ended)} do not end")
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) == (0, 0)  # our own child: nobody else will collect it
    return Path(f"/proc/{pid}").exists()


def nsenter_command(pid: int, argv: Sequence[str], *, directory: str | None = None) -> list[str]:
    """The command line that runs `argv` as root on the host whose first process is `pid`."""
    where = [f"--wdns={directory}"] if directory else []
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--pid", *where, "--", *argv]


def run_on_host(pid: int, argv: Sequence[str], *, stdin: str = "", timeout: float = 20.0) -> str:
    """Run a command as root on a host and return its stdout; SandboxError quotes it where it fails."""
    try:
        done = subprocess.run(nsenter_command(pid, argv), input=stdin, capture_output=True, text=True, timeout=timeout,
                              check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{argv[0]}: {error}") from error
    if done.returncode:
        raise SandboxError(f"{argv[0]}: exit status {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def host_mount_script(bind_mounts: Sequence[str], root: str, may_enter: Callable[[Path], bool]) -> str:
    """Shell text that gives a host directories of its own; the rest of its file system is the machine's.

    Parameters
    ----------
    shares : directories that keep their path. Where one lies under a directory that the host has for itself,
        or that the user of the jobs may not enter (a home of root, a `mktemp -d`), an empty directory is put
        over that one and the share is laid back into it.
    root : the sandbox's directory, which all hosts share. In its directory `stage` is one entry per share ("0", "1",
        ...), where they wait meanwhile, and "copied".
    may_enter : whether that user may enter a directory.
    """
    stage = shlex.quote(f"{root}/stage")
    lines = _overlay_script([root, *bind_mounts], f"{root}/stage/copied")
    lines += [f"mount --bind {shlex.quote(share)} {stage}/{i}" for i, share in enumerate(bind_mounts)]
    closed = [next((a for a in reversed(Path(share).parents) if not may_enter(a)), None) for share in bind_mounts]
    covers = [*_PRIVATE_DIRS, *sorted({str(topmost) for topmost in closed if topmost})]
    for cover in covers:
        if not any(cover.startswith(other + "/") for other in covers):
            lines.append(f"mount -t tmpfs -o mode={_PRIVATE_DIRS.get(cover, '755')} tmpfs {shlex.quote(cover)}")
    for i, share in enumerate(bind_mounts):
        if any(share == cover or share.startswith(cover + "/") for cover in covers):
            lines += [f"mkdir -p {shlex.quote(share)}", f"mount --bind {stage}/{i} {shlex.quote(share)}"]
        lines.append(f"umount {stage}/{i}")
    return "\n".join(lines)


def _overlay_script(bind_mounts: Sequence[str], stage: str) -> list[str]:
    """Lines that lay an overlay on _COPIED, with those directories in it that are shared; it is made in `stage`."""
    own = shlex.quote(stage)
    kept = [(shlex.quote(path), shlex.quote(path.removeprefix(_OVERLAY_DIR))) for path in bind_mounts
            if path.startswith(f"{_OVERLAY_DIR}/")]
    return [f"mount -t tmpfs -o mode=755 tmpfs {own}", f"mkdir {own}/upper {own}/work {own}/seen",
            f"mount -t overlay -o lowerdir={_OVERLAY_DIR},upperdir={own}/upper,workdir={own}/work overlay {own}/seen",
            *(f"mount --bind {path} {own}/seen{below}" for path, below in kept),
            f"mount --move {own}/seen {_OVERLAY_DIR}"]
