"""The text of a file, bounded in size: a reader of a topology never waits for more than it can use."""

from __future__ import annotations

import os
import stat

from slurmdl.errors import InputError

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
