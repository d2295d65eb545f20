"""The way of samples from a node to the collector: over TCP, or into a directory from which it takes them.

What cannot be sent now waits in a spool and goes with the next ones. A file of the spool gets its name by a rename,
so nobody sees half of one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmdl import files
from slurmdl.errors import UnavailableError
from slurmdl.links.samples import LinkSample, format_sample_lines

if TYPE_CHECKING:
    import socket

#: what a file of samples ends in once it is whole
SPOOL_SUFFIX = ".jsonl"
#: seconds that sending may take
SEND_TIMEOUT_S = 2.0
#: files that wait in a spool, at most: the oldest go first
MAX_SPOOL_FILES = 100
#: bytes of one sending
_MAX_SEND_BYTES = 500_000


def spool_samples(spool_dir: str, samples: Sequence[LinkSample]) -> None:
    """Put samples into a directory, as a file of their own.

    Raises
    ------
    UnavailableError : the directory cannot be made or written.
    """
    if not samples:
        return
    name = f"{samples[-1].time:.6f}-{os.uname().nodename}-{os.getpid()}"
    try:
        os.makedirs(spool_dir, mode=0o755, exist_ok=True)
        files.write_atomic(os.path.join(spool_dir, name + SPOOL_SUFFIX), format_sample_lines(samples))
        for old in _spooled_files(spool_dir)[:-MAX_SPOOL_FILES]:
            _remove(os.path.join(spool_dir, old))
    except OSError as error:
        raise UnavailableError(f"{spool_dir}: samples cannot be put there ({error.strerror})") from error


def send_samples(address: tuple[str, int], samples: Sequence[LinkSample], spool_dir: str) -> None:
    """Send what waits in the spool, and these samples; what the collector does not take stays in the spool.

    With nothing to send the collector is asked all the same, so that a mistake in the set-up is found at once.

    Raises
    ------
    UnavailableError : the collector is not reached, refuses or does not answer in time.
    """
    spool_samples(spool_dir, samples)
    names, text = [], b""
    for name in _spooled_files(spool_dir):
        try:
            with open(os.path.join(spool_dir, name), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue  # another process has sent it
        except OSError as error:
            raise UnavailableError(f"{spool_dir}/{name}: cannot be read ({error.strerror})") from error
        if text and len(text) + len(data) > _MAX_SEND_BYTES:
            break
        names.append(name)
        text += data
    import socket

    collector = f"collector {address[0]}:{address[1]}"
    kept = f"; the samples wait in {spool_dir}" if names else ""
    try:
        with _connect_privileged(address) as connection:
            connection.sendall(_credential_line(text) + text)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(200).decode(errors="replace").strip()
    except OSError as error:
        raise UnavailableError(f"{collector}: {error.strerror or error}{kept}") from error
    if not answer.startswith("stored"):
        raise UnavailableError(f"{collector}: {answer or 'no answer'}{kept}")
    for name in names:
        _remove(os.path.join(spool_dir, name))


def _credential_line(text: bytes) -> bytes:
    """The line that proves who sends this, where munge is on this host; else the port has to do."""
    from slurmdl.links import munge

    try:
        return munge.create_credential(text).encode() + b"\n"
    except UnavailableError:
        return b""


def _remove(path: str) -> None:
    """Remove a file of the spool, unless another process has."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UnavailableError(f"{path}: cannot be removed ({error.strerror})") from error


def _connect_privileged(address: tuple[str, int]) -> socket.socket:
    """From a port below 1024 where this may take one (root, or CAP_NET_BIND_SERVICE): by that the collector knows
    that no user of the node sends."""
    import socket

    for port in (*range(1023, 1007, -1), 0):
        try:
            return socket.create_connection(address, timeout=SEND_TIMEOUT_S, source_address=("", port))
        except OSError as error:
            if port == 0 or error.errno not in (errno.EACCES, errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    raise AssertionError("the last port is any")


def _spooled_files(spool_dir: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(spool_dir) if name.endswith(SPOOL_SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnavailableError(f"{spool_dir}: cannot be read ({error.strerror})") from error
