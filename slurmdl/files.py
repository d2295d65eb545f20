"""Files: atomic writes, locks, checks of writability, and reads of bounded size, also of compressed files.

Link scores influence the jobs of all users, so files of scores and samples are trusted only if root, the reader or a
user that the site names owns them, and no other user could have written or replaced them. The check follows the open,
so that the file cannot be exchanged in between.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from slurmdl.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: a topology of 100,000 nodes on separate lines has 3 MB; reading must take less than a second
MAX_TEXT_BYTES = 4 * 2**20
MAX_TRUSTED_BYTES = 64 * 2**20  # of a file of scores; those of 100,000 nodes have 15 MB
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


def read_trusted_text(path: str, trusted_users: str = "", *, follow_links: bool = True) -> str:
    """Text of a file of scores; `follow_links` as for `read_trusted_lines`.

    The file and all its parent directories must be owned by, and writable only by, root, the reader or
    `trusted_users` (names or uids separated by commas). Directories with the sticky bit may be writable by others.
    Raises InputError if the file is unreadable, not a regular file, not UTF-8, too large, or not trusted.
    """
    try:
        return _read_trusted_bytes(path, trusted_users, "link_scores.trusted_owner", follow_links).decode()
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", file=path) from error


def _read_trusted_bytes(path: str, trusted_users: str, expected_owner: str, follow_links: bool = True) -> bytes:
    def check_trust(file: BinaryIO) -> None:
        status, real_path = os.fstat(file.fileno()), os.path.realpath(f"/proc/self/fd/{file.fileno()}")
        if reason := untrusted_reason(real_path, status, {0, os.geteuid()} | resolve_uids(trusted_users)):
            raise InputError(f"is ignored: {reason}; expected owned by root, yourself or {expected_owner}, and "
                             "writable only by its owner", file=path)

    return read_regular_file(path, MAX_TRUSTED_BYTES, check_trust, follow_links)


def read_trusted_lines(path: str, trusted_users: str = "", *, follow_links: bool = True) -> list[str]:
    """Lines of a file of samples or of standard input; bytes that are not UTF-8 become lone surrogates.

    Without `follow_links` a symbolic link is rejected: in a directory that others may write, it would pass a trusted
    file of their choice.

    The path "-" is standard input: a pipe or file that must be owned by root, the reader or `trusted_users`. The pipe
    of `left | right` belongs to the user whose shell started both. Raises InputError as `read_trusted_text`.
    """
    data = _read_trusted_stdin(trusted_users) if path == "-" else \
        _read_trusted_bytes(path, trusted_users, "one of --users", follow_links)
    return data.decode(errors="surrogateescape").splitlines()


def _read_trusted_stdin(trusted_users: str) -> bytes:
    name = "standard input"
    try:
        with open(os.dup(0), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in {0, os.geteuid()} | resolve_uids(trusted_users):
                raise InputError(f"is ignored: user {status.st_uid} owns it; expected owned by root, yourself or one "
                                 "of --users", file=name)
            if (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)) and \
                    _is_writable_by_others(status, file.fileno()):
                raise InputError(f"is ignored: others may write it (mode {stat.S_IMODE(status.st_mode):o}); expected "
                                 "writable only by its owner", file=name)
            return read_limited(file, name, MAX_TRUSTED_BYTES)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=name) from error


def untrusted_reason(real_path: str, status: os.stat_result, trusted_uids: Collection[int]) -> str:
    """Reason why a user outside `trusted_uids` could have written or replaced a file; "" if none could.

    `real_path` is free of symbolic links, `status` is os.fstat of the file.
    """
    if status.st_uid not in trusted_uids:
        return f"user {status.st_uid} owns it"
    if _is_writable_by_others(status, real_path):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    directory = real_path
    while directory != "/":
        directory = os.path.dirname(directory)
        status = os.stat(directory)
        if status.st_uid not in trusted_uids:
            return f"user {status.st_uid} owns {directory}"
        if _is_writable_by_others(status, directory) and not status.st_mode & stat.S_ISVTX:
            return f"others may write {directory} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _is_writable_by_others(status: os.stat_result, file: str | int) -> bool:
    """Whether users other than the owner may write a file, given by path or descriptor.

    The owner's private group does not count: it has the owner's name, and no other user is in it.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False  # nor does an ACL allow it: its mask are the bits of the group (acl(5))
    import grp
    import pwd

    with suppress(OSError):  # none, or a file system without ACLs
        os.getxattr(file, "system.posix_acl_access")
        return True
    try:
        name, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name != name or not set(group.gr_mem) <= {name} or \
        any(user.pw_gid == status.st_gid and user.pw_uid != status.st_uid for user in pwd.getpwall())


def resolve_uids(users: str) -> set[int]:
    """The uids of names or numbers separated by commas; unknown names are skipped."""
    uids = set()
    for user in users.split(","):
        if user.isascii() and user.isdecimal():
            uids.add(int(user))
        elif user:
            import pwd

            try:
                uids.add(pwd.getpwnam(user).pw_uid)
            except KeyError:
                continue
    return uids
