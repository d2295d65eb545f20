"""Transfer of samples from a node to the collector, over TCP or through a spool directory.

Samples that cannot be sent stay in the spool until the next call. Spool files appear by an atomic rename.
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

#: suffix of complete spool files
SPOOL_SUFFIX = ".jsonl"
SEND_TIMEOUT_S = 2.0
#: files in a spool; older ones are deleted
MAX_SPOOL_FILES = 100
#: size of one transfer
_MAX_SEND_BYTES = 500_000


def spool_samples(spool_dir: str, samples: Sequence[LinkSample]) -> None:
    """Write samples to a new file in the spool directory.

    Raises
    ------
    UnavailableError : the directory cannot be created or written.
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
        raise UnavailableError(f"{spool_dir}: samples cannot be written ({error.strerror})") from error


def send_samples(address: tuple[str, int], samples: Sequence[LinkSample], spool_dir: str) -> None:
    """Send the spooled samples and these ones; samples that the collector does not store stay in the spool.

    Connects even if there are no samples, so that configuration errors are reported at once.

    Raises
    ------
    UnavailableError : the collector is not reachable, rejects the samples or does not answer in time.
    """
    spool_samples(spool_dir, samples)
    names, text = [], b""
    for name in _spooled_files(spool_dir):
        try:
            with open(os.path.join(spool_dir, name), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue  # sent by another process
        except OSError as error:
            raise UnavailableError(f"{spool_dir}/{name}: cannot be read ({error.strerror})") from error
        if text and len(text) + len(data) > _MAX_SEND_BYTES:
            break
        names.append(name)
        text += data
    import socket

    collector = f"collector {address[0]}:{address[1]}"
    kept = f"; samples are kept in {spool_dir}" if names else ""
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
    """Line with a MUNGE credential for the text; empty if MUNGE is not available."""
    from slurmdl.links import munge

    try:
        return munge.create_credential(text).encode() + b"\n"
    except UnavailableError:
        return b""


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # removed by another process
    except OSError as error:
        raise UnavailableError(f"{path}: cannot be removed ({error.strerror})") from error


def _connect_privileged(address: tuple[str, int]) -> socket.socket:
    """Connect from a port below 1024 if permitted (root or CAP_NET_BIND_SERVICE), as proof to the collector."""
    import socket

    for port in (*range(1023, 1007, -1), 0):
        try:
            return socket.create_connection(address, timeout=SEND_TIMEOUT_S, source_address=("", port))
        except OSError as error:
            if port == 0 or error.errno not in (errno.EACCES, errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    raise AssertionError("port 0 is always available")


def _spooled_files(spool_dir: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(spool_dir) if name.endswith(SPOOL_SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnavailableError(f"{spool_dir}: cannot be read ({error.strerror})") from error
