"""The command of each task: a shell that sets the task's variables, then the user's program; the port of rank 0."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmdl.errors import InputError, PlacementError
from slurmdl.slurm.getopt import CommandLine

#: put before the program of each task; the environment has the script
TASK_SHELL = ("/bin/sh", "-c", 'eval "$SLURMDL_TASK_SCRIPT"', "slurmdl")
#: the same in an unmapped step; by SLURMDL_TASK_SCRIPT the SPANK plugin recognizes mapped ones, and sets no roles
UNMAPPED_TASK_SHELL = ("/bin/sh", "-c", 'eval "$SLURMDL_UNMAPPED_TASK_SCRIPT"', "slurmdl")
#: bash as sh keeps variables with names that are no identifiers (exported functions); dash drops them
_BASH = ("/bin/bash", "--posix")

#: nodes whose addresses the task shell can write as texts that sort as planned
MAX_SORTABLE_NODES = 4096
#: seconds for the addresses of all nodes
_MAX_RESOLVE_S = 5.0
_MAX_PORT_DRAWS = 100


@dataclass(frozen=True)
class TaskCommand:
    """The command of each task.

    Attributes:
        script: value of SLURMDL_TASK_SCRIPT, or SLURMDL_UNMAPPED_TASK_SCRIPT.
        shell: the arguments before the user's program.
        multi_prog: text of the configuration file of `srun --multi-prog`, with the task shell in it; "" without.
    """

    script: str
    shell: tuple[str, ...]
    program: tuple[str, ...]
    multi_prog: str = ""


def build_task_command(line: CommandLine, step_starter: str, environ: Mapping[str, str],
                       is_mapped: bool = True) -> TaskCommand:
    """Build the command of each task.

    Raises PlacementError if the file of `srun --multi-prog` cannot be read, InputError if a file of slurmdl's
    installation cannot be read.

    Args:
        line: the user's command line, with a program.
        step_starter: "srun" or "mpirun".
    """
    script, shell = _task_script(f"task_{step_starter}.sh"), _task_shell(environ, is_mapped)
    if step_starter != "srun":
        return TaskCommand(script, shell, line.operands)
    if line.has_option("multi-prog"):
        return TaskCommand(script, shell, line.operands, wrap_multi_prog(line.operands[0], shell))
    return TaskCommand(script, shell, (_resolve_program(line, environ), *line.operands[1:]))


def wrap_multi_prog(path: str, shell: Sequence[str]) -> str:
    """Put the task shell before every program in the configuration file of `srun --multi-prog`.

    The ranks keep their programs: only their nodes change. PlacementError if the file cannot be read.
    """
    prefix = " ".join(arg if arg.isalnum() or arg[0] in "/-" else f"'{arg}'" for arg in shell)
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise PlacementError(f"--multi-prog: {path}: {error.strerror}") from error
    lines, is_continuation = [], False
    for line in text.splitlines():
        fields = line.split(None, 1)
        if len(fields) == 2 and not fields[0].startswith("#") and not is_continuation:
            lines.append(f"{fields[0]} {prefix} {fields[1]}")
        else:
            lines.append(line)
        is_continuation = line.endswith("\\")
    return "\n".join(lines) + "\n"


def _task_shell(environ: Mapping[str, str], is_mapped: bool) -> tuple[str, ...]:
    shell = TASK_SHELL if is_mapped else UNMAPPED_TASK_SHELL
    needs_bash = any(not name.isidentifier() for name in environ)
    return (*_BASH, *shell[1:]) if needs_bash and os.path.exists(_BASH[0]) else shell


def _task_script(head: str) -> str:
    """The task script without comments."""
    directory = Path(__file__).parent
    try:
        text = (directory / head).read_text() + (directory / "task.sh").read_text()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", error.filename) from error
    return "\n".join(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def _resolve_program(line: CommandLine, environ: Mapping[str, str]) -> str:
    """The program for a shell: unlike srun, a shell does not search the working directory after PATH."""
    program = line.operands[0]
    local = os.path.join(line.last_value("chdir") or os.getcwd(), program)
    if "/" not in program and shutil.which(program, path=environ.get("PATH")) is None and os.path.isfile(local):
        return local
    return program


def is_local_host(host: str) -> bool:
    """Whether a host name or address is this machine's: a socket can be bound to it."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


def node_addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    """The IPv4 address of each host at which other hosts reach it.

    Empty if a host has none, if there are more than MAX_SORTABLE_NODES hosts, or if name resolution is slow.
    """
    end = time.monotonic() + _MAX_RESOLVE_S
    addresses: list[str] = []
    for host in hosts:
        address = _ipv4_address(host)
        if not address or len(addresses) == MAX_SORTABLE_NODES or time.monotonic() > end:
            return ()
        addresses.append(address)
    return tuple(addresses)


def _ipv4_address(host: str) -> str:
    """An address of a host that is not of the loopback interface, else ""."""
    with contextlib.suppress(OSError, UnicodeError):
        for *_, address in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM):
            if not str(address[0]).startswith("127."):
                return str(address[0])
    return ""


def pick_free_port() -> int:
    """A port for rank 0 that is free on this host, since `slurmdl srun` usually runs on the host of rank 0.

    It is random, so that no other user can occupy it beforehand; below Linux's ephemeral ports (32768) and above the
    ports of services.
    """
    for _ in range(_MAX_PORT_DRAWS):
        port = 10_000 + int.from_bytes(os.urandom(4), "little") % 22_000
        if _is_port_free(port):
            break
    return port


def _is_port_free(port: int) -> bool:
    """Whether a server can listen at this port of this host, by IPv6 and IPv4; True if that cannot be tested."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as server:
                server.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
