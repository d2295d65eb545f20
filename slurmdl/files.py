"""Files that readers see as a whole or not at all, and what is known of them before they are written."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress

from slurmdl.errors import InputError


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


# MERGED: The text of a file, bounded in size: a reader of a topology never waits for more than it can use.

#: bytes; a file of 100,000 nodes, each on a line of its own, has 3 MB, and reading must not take a second
MAX_TEXT_BYTES = 4 * 2**20


def read_text_limited(path: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file.

    Raises
    ------
    InputError : it cannot be read, is no regular file, has more than `limit` bytes, or is not text in UTF-8.
    """
    try:
        # a pipe without a writer would hang in open
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError("is no regular file", file=path)
            # what grows while it is read, or tells no size, is bounded as well
            data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
            if status.st_size > max_bytes or len(data) > max_bytes:
                raise InputError(f"has more than {max_bytes} bytes", file=path)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except ValueError as error:
        raise InputError("cannot be read (its name holds a NUL byte)", file=path.replace("\0", "?")) from error
    zero = data.find(b"\0")
    if zero >= 0:
        raise InputError("holds a NUL byte; it must be text", file=path, line=data.count(b"\n", 0, zero) + 1)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("is not text in UTF-8", file=path, line=data.count(b"\n", 0, error.start) + 1) from error
