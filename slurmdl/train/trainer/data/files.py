"""What the readers of data files share."""

from __future__ import annotations

import gzip
import os
import zlib

from slurmdl.errors import InputError, UsageError


def require_dir(name: str, path: str) -> str:
    """The folder that --data NAME:DIR names."""
    if not path:
        raise UsageError(f"train: --data {name}: a folder is needed: {name}:DIR")
    if not os.path.isdir(path):
        raise InputError("not a folder", file=path)
    return path


def read_bytes(path: str, max_bytes: int) -> bytes:
    """The bytes of a file, unpacked where it is named .gz; of them no more than `most`.

    Raises
    ------
    InputError : it cannot be read or unpacked.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return bytes(file.read(max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"cannot be unpacked: {error}", file=path) from error
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from error
