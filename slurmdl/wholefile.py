"""Files that readers see as a whole or not at all, and what is known of them before they are written."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress


def check_writable(path: str) -> None:
    """Say before long work, not after it, that a file cannot be written. Nothing is left of the attempt.

    Raises
    ------
    OSError : a folder has that name, or the folder it lies in is not there, or is not for this user to write to.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        reason = errno.EISDIR
    elif not os.path.isdir(folder):
        reason = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = errno.EACCES
    else:
        return
    raise OSError(reason, os.strerror(reason), path)


def write_atomic(path: str, text: str, *, durable: bool = False) -> None:
    """Put a file in its place at once, from a new file of a random name beside it that nobody else has made.

    Parameters
    ----------
    durable : readable by all whatever the umask says, and on the disk when this returns, also after a power failure.

    Raises
    ------
    OSError : it cannot be written; the old one stays, and nothing beside it.
    """
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                os.fchmod(file.fileno(), 0o644)
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
    if durable:
        fsync_dir(folder)


def fsync_dir(directory: str) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
