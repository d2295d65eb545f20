"""Trust in files of scores and samples: owned by root, the reader, or a user that the site names.

Link scores influence the jobs of all users, so a file that another user could have written or replaced is rejected.
The check follows the open, so that the file cannot be exchanged in between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from typing import BinaryIO

from slurmdl.errors import InputError
from slurmdl.files import read_limited, read_regular_file

MAX_FILE_BYTES = 64 * 2**20  # scores of 100,000 nodes have 15 MB


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

    return read_regular_file(path, MAX_FILE_BYTES, check_trust, follow_links)


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
            return read_limited(file, name, MAX_FILE_BYTES)
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
