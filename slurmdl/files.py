"""Files: atomic writes, locks, checks of writability, and reads of bounded size, also of compressed files."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from slurmdl.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: a topology of 100,000 nodes on separate lines has 3 MB; reading must take less than a second
MAX_TEXT_BYTES = 4 * 2**20
#: of a compressed file, which may have a thousandth of this size
MAX_UNPACKED_BYTES = 2**32
#: longest wait for a lock; its holder is stopped or hangs then
_LOCK_TIMEOUT_S = 5.0


def check_writable(path: str) -> None:
    """Check that a file can be written, without creating it; OSError otherwise."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path):
        reason = errno.EISDIR
    elif not os.path.isdir(directory):
        reason = errno.ENOTDIR if os.path.exists(directory) else errno.ENOENT
    elif not os.access(path if os.path.exists(path) else directory, os.W_OK):
        reason = errno.EACCES
    else:
        return
    raise OSError(reason, os.strerror(reason), path)


def write_atomic(path: str, text: str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replace a file atomically, through a new temporary file in the same directory.

    `durable`: sync the file to disk, and make it readable by all regardless of the umask. `mode` is limited by the
    umask. After an OSError the old file is unchanged and the temporary file removed.
    """
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}.{os.urandom(8).hex()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                os.fchmod(file.fileno(), 0o644)
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        fsync_dir(directory)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Exclude other processes that change the same file, by a lock file next to it; OSError if that is not possible.

    A lock on the file itself would not outlive its replacement. Without locks in the file system, and after a wait of
    _LOCK_TIMEOUT_S, the caller goes on: then processes may lose each other's changes.
    """
    import fcntl

    directory, name = os.path.split(os.path.abspath(path))
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(os.path.join(directory, f".{name}.lock"), flags, 0o600), "rb+") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # e.g. NFS without a lock daemon
                break
        yield


def fsync_dir(directory: str) -> None:
    """Sync the entries of a directory to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_regular_file(path: str, max_bytes: int, check: Callable[[BinaryIO], None] | None = None,
                      follow_links: bool = True) -> bytes:
    """Content of a regular file, after `check` of the open file; InputError if it is unreadable or too large."""
    try:
        # without O_NONBLOCK, opening a pipe without a writer blocks
        flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError("is not a regular file", file=path)
            if check:
                check(file)
            return read_limited(file, path, max_bytes)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise InputError("is a symbolic link; expected a file", file=path) from error
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except ValueError as error:
        raise InputError("cannot be read (its name holds a NUL byte)", file=path.replace("\0", "?")) from error


def read_limited(file: BinaryIO, name: str, max_bytes: int) -> bytes:
    """Content of an open file, which may grow or report no size; InputError if it is larger than `max_bytes`."""
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InputError(f"is too large; expected at most {max_bytes} bytes", file=name)
    return data


def unpacked(file: io.BufferedReader, name: str) -> io.BufferedReader:
    """The content of an open file, unpacked if gzip compressed it.

    Reading raises InputError beyond MAX_UNPACKED_BYTES; EOFError, zlib.error or gzip.BadGzipFile if it is damaged.
    """
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(_BoundedGzip(file, name), 2**17)


class _BoundedGzip(io.RawIOBase):
    """The unpacked bytes of a gzip file, at most MAX_UNPACKED_BYTES."""

    def __init__(self, file: io.BufferedReader, name: str) -> None:
        import gzip

        self._file, self._name, self._left = gzip.GzipFile(fileobj=file), name, MAX_UNPACKED_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise InputError(f"unpacks to more than {MAX_UNPACKED_BYTES / 2**30:g} GiB; expected the records of a "
                             "shorter period, or the unpacked file", file=self._name)
        return count


def read_newest_lines(path: str, max_bytes: int) -> list[str]:
    """The last lines of a regular file to which processes append; InputError as in `read_regular_file`.

    A quarter of `max_bytes` is left for what they append meanwhile.
    """
    def skip_old_lines(file: BinaryIO) -> None:
        excess = os.fstat(file.fileno()).st_size - max_bytes * 3 // 4
        if excess > 0:
            file.seek(excess)
            file.readline(max_bytes)

    return read_regular_file(path, max_bytes, skip_old_lines).decode(errors="replace").splitlines()


def read_text_limited(path: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Text of a regular file; InputError as in `read_regular_file`, or if it is not UTF-8 text."""
    data = read_regular_file(path, max_bytes)
    nul = data.find(b"\0")
    if nul >= 0:
        raise InputError("contains a NUL byte; expected text", file=path, line=data.count(b"\n", 0, nul) + 1)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", file=path, line=data.count(b"\n", 0, error.start) + 1) from error
