"""Whose scores are believed: the reader's own, root's, and those of the user that the site names.

Scores steer the jobs of everybody, so a file that another user could have written or replaced is not read. It is
judged after it was opened, so that it cannot be exchanged between look and use.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from typing import BinaryIO

from slurmdl.errors import InputError

#: bytes; scores of 100,000 nodes have 15 MB
MAX_FILE_BYTES = 64 * 2**20


def read_trusted_text(path: str, trusted_users: str = "") -> str:
    """The text of a file of scores.

    Its owner, and that of every directory on the way to it, must be root, the reader, or `owner`; nobody else may
    write there. In a directory with the sticky bit others may write, since they cannot replace what is not theirs.

    Parameters
    ----------
    owner : names or numbers of users with commas between, "" for no other.

    Raises
    ------
    InputError : it cannot be read, is no regular file, is not UTF-8, is too large, or others could have written it.
    """
    try:
        return _read_trusted_bytes(path, trusted_users, "link_scores.trusted_owner").decode()
    except UnicodeDecodeError as error:
        raise InputError("is not text in UTF-8", file=path) from error


def _read_trusted_bytes(path: str, trusted_users: str, valid_owner: str) -> bytes:
    try:
        # a pipe without a writer would hang in open
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError("is no regular file", file=path)
            where = os.path.realpath(f"/proc/self/fd/{file.fileno()}")
            if why := untrusted_reason(where, status, {0, os.geteuid()} | resolve_uids(trusted_users)):
                raise InputError(f"is ignored: {why}; valid: owned by root, yourself or {valid_owner}, and writable by "
                                 "its owner alone", file=path)
            return _read_limited(file, path)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except ValueError as error:
        raise InputError("cannot be read (its name holds a NUL byte)", file=path.replace("\0", "?")) from error


def read_trusted_lines(path: str, trusted_users: str = "") -> list[str]:
    """The lines of a file of samples, or of standard input, with bytes that are not UTF-8 as lone surrogates.

    Parameters
    ----------
    path : "-" for standard input. It must have been made, as a pipe or a file, by root, the reader, or `owner`: the
        pipe of `one | other` belongs to the user whose shell started both.

    Raises
    ------
    InputError : as trusted_text.
    """
    data = _read_trusted_stdin(trusted_users) if path == "-" else _read_trusted_bytes(path,
                               trusted_users, "one of --users")
    return data.decode(errors="surrogateescape").splitlines()


def _read_trusted_stdin(trusted_users: str) -> bytes:
    name = "standard input"
    try:
        with open(os.dup(0), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in {0, os.geteuid()} | resolve_uids(trusted_users):
                raise InputError(f"is ignored: user {status.st_uid} owns it; valid: owned by root, yourself or one "
                                 "of --users", file=name)
            if (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)) and _is_writable_by_others(status):
                raise InputError(f"is ignored: others may write it (mode {stat.S_IMODE(status.st_mode):o}); valid: "
                                 "writable by its owner alone", file=name)
            return _read_limited(file, name)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=name) from error


def _read_limited(file: BinaryIO, name: str) -> bytes:
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"has more than {MAX_FILE_BYTES} bytes", file=name)
    return data


def untrusted_reason(real_path: str, status: os.stat_result, trusted_uids: Collection[int]) -> str:
    """Why others than `users` could have written a file, or put it in its place; "" where they could not.

    Parameters
    ----------
    where : its path without symbolic links.
    status : of the file itself.
    users : numbers of those who may.
    """
    if status.st_uid not in trusted_uids:
        return f"user {status.st_uid} owns it"
    if _is_writable_by_others(status):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    directory = os.path.dirname(real_path)
    while True:
        status = os.stat(directory)
        if status.st_uid not in trusted_uids:
            return f"user {status.st_uid} owns {directory}"
        if _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            return f"others may write {directory} (mode {stat.S_IMODE(status.st_mode):o})"
        if directory == os.path.dirname(directory):
            return ""
        directory = os.path.dirname(directory)


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Whether another than its owner may write; a group that is the owner's alone is the owner."""
    if status.st_mode & stat.S_IWGRP and status.st_mode & stat.S_IWOTH == 0:
        import grp
        import pwd

        try:
            name, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
        except KeyError:
            return True
        return group.gr_name != name or not set(group.gr_mem) <= {name}
    return bool(status.st_mode & stat.S_IWOTH)


def resolve_uids(users: str) -> set[int]:
    """The users' numbers, of names or numbers with commas between; none for a name that the machine does not know."""
    found = set()
    for user in users.split(","):
        if user.isascii() and user.isdecimal():
            found.add(int(user))
        elif user:
            import pwd

            try:
                found.add(pwd.getpwnam(user).pw_uid)
            except KeyError:
                continue
    return found
