"""The user's own traffic: the file that --dl-traffic names."""

from __future__ import annotations

import os
import stat
import zipfile
from typing import IO, TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.plan import PATTERNS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

#: most bytes of all numbers of a file, 8 a number, and of a text: one matrix of 5,792 ranks
MAX_BYTES = 2**28

_VALID = "valid: matrices of one row and one column for each rank, in .npz or as CSV with a blank line between"


def of(dl: DlOptions) -> tuple[Matrix, ...]:
    """The matrices that --dl-traffic names; () where it names a pattern of the strategy, or nothing.

    Returns
    -------
    one matrix a phase, each of the same shape (ranks, ranks): entry [i, j] is the bytes that rank i sends to
    rank j per iteration.

    Raises
    ------
    InputError : with the file: it cannot be read, is too large, or does not hold square matrices of one size
        with finite numbers of 0 or more.
    """
    if not dl.traffic or dl.traffic in PATTERNS[dl.strategy]:
        return ()
    try:
        status = os.stat(dl.traffic)
        if not stat.S_ISREG(status.st_mode):
            raise InputError("is no regular file", dl.traffic)
        if status.st_size > MAX_BYTES:
            raise InputError(f"has {status.st_size} bytes; valid: at most {MAX_BYTES}", dl.traffic)
        found = _npz(dl.traffic) if zipfile.is_zipfile(dl.traffic) else _csv(dl.traffic)
    except OSError as error:
        patterns = ", ".join(PATTERNS[dl.strategy])
        raise InputError(f"cannot be read ({error.strerror}); valid with {dl.strategy}: {patterns}, or a file of "
                         "matrices", dl.traffic) from error
    _check(found, dl.traffic)
    return tuple(found.values())


def _check(found: dict[str, Matrix], path: str) -> None:
    import numpy as np

    if not found:
        raise InputError(f"holds no matrix; {_VALID}", path)
    first = next(iter(found.values()))
    for name, matrix in found.items():
        rows, columns = matrix.shape
        if rows != columns:
            raise InputError(f"{name} is not square ({rows} x {columns}); {_VALID}", path)
        if rows != len(first):
            raise InputError(f"{name} is {rows} x {rows}, the first one {len(first)} x {len(first)}; {_VALID}", path)
        wrong = ~(np.isfinite(matrix) & (matrix >= 0))
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise InputError(f"{name}: entry [{row}, {column}] is {matrix[row, column]:g}; valid: bytes, 0 or more",
                             path)


def _npz(path: str) -> dict[str, Matrix]:
    """The arrays in the order of their names. Nothing is unpacked before its size is known, and never a pickle."""
    found = {}
    left = MAX_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                array = name.removesuffix(".npy")
                with archive.open(name) as member:
                    left -= _bytes(member, array, path)
                if left < 0:
                    raise InputError(f"holds more than {MAX_BYTES} bytes of numbers", path)
                with archive.open(name) as member:
                    found[array] = _array(member)
    except InputError:
        raise
    except Exception as error:
        # what zipfile, its decompressors and numpy raise for damaged bytes has no other base
        raise InputError(f"is not .npz ({error or type(error).__name__}); {_VALID}", path) from error
    return found


def _bytes(member: IO[bytes], name: str, path: str) -> int:
    """Bytes that an array will take as numbers of 8 bytes, from its header alone.

    Raises
    ------
    InputError : it has no two dimensions, or holds no real numbers.
    """
    from numpy.lib import format as npy

    version = npy.read_magic(member)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, kind = header(member)
    if len(shape) != 2 or not all(shape):
        raise InputError(f"{name} has the shape {shape}; {_VALID}", path)
    if kind.kind not in "fiub" or kind.hasobject:
        raise InputError(f"{name} holds {kind}, no numbers; {_VALID}", path)
    return int(8 * shape[0] * shape[1])


def _array(member: IO[bytes]) -> Matrix:
    import numpy as np
    from numpy.lib import format as npy

    return np.asarray(npy.read_array(member, allow_pickle=False), np.float64)


def _csv(path: str) -> dict[str, Matrix]:
    """The matrices, with a blank line or several between, by their numbers."""
    import numpy as np

    found: dict[str, Matrix] = {}
    rows: list[Matrix] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate([*file, ""], 1):
            if line.strip():
                try:
                    rows.append(np.array(line.split(","), np.float64))
                except ValueError as error:
                    raise InputError(f"is no row of numbers with commas between; {_VALID}", path, number,
                                     line) from error
                if len(rows[-1]) != len(rows[0]):
                    raise InputError(f"{len(rows[-1])} numbers, the first row of the matrix has {len(rows[0])}", path,
                                     number)
            elif rows:
                found[f"matrix {len(found) + 1}"] = np.array(rows)
                rows = []
    return found
