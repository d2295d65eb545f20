"""The user's own traffic: the file that --dl-comm-pattern names."""

from __future__ import annotations

import os
import stat
import zipfile
from typing import IO, TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.plan import COMM_PATTERNS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

#: most bytes of all numbers of a file, 8 a number, and of a text: one matrix of 5,792 ranks
MAX_TRAFFIC_BYTES = 2**28

_EXPECTED_FORMAT = "valid: matrices of one row and one column for each rank, in .npz or as CSV with a blank line between"


def load_traffic_matrices(dl: DlOptions) -> tuple[Matrix, ...]:
    """The matrices that --dl-comm-pattern names; () where it names a pattern of the strategy, or nothing.

    Returns
    -------
    one matrix a phase, each of the same shape (ranks, ranks): entry [i, j] is the bytes that rank i sends to
    rank j per iteration.

    Raises
    ------
    InputError : with the file: it cannot be read, is too large, or does not hold square matrices of one size
        with finite numbers of 0 or more.
    """
    if not dl.comm_pattern or dl.comm_pattern in COMM_PATTERNS[dl.strategy]:
        return ()
    try:
        status = os.stat(dl.comm_pattern)
        if not stat.S_ISREG(status.st_mode):
            raise InputError("is no regular file", dl.comm_pattern)
        if status.st_size > MAX_TRAFFIC_BYTES:
            raise InputError(f"has {status.st_size} bytes; valid: at most {MAX_TRAFFIC_BYTES}", dl.comm_pattern)
        found = _read_npz(dl.comm_pattern) if zipfile.is_zipfile(dl.comm_pattern) else _read_csv(dl.comm_pattern)
    except OSError as error:
        patterns = ", ".join(COMM_PATTERNS[dl.strategy])
        raise InputError(f"cannot be read ({error.strerror}); valid with {dl.strategy}: {patterns}, or a file of "
                         "matrices", dl.comm_pattern) from error
    _check_matrices(found, dl.comm_pattern)
    return tuple(found.values())


def _check_matrices(matrices: dict[str, Matrix], path: str) -> None:
    import numpy as np

    if not matrices:
        raise InputError(f"holds no matrix; {_EXPECTED_FORMAT}", path)
    first = next(iter(matrices.values()))
    for name, matrix in matrices.items():
        rows, columns = matrix.shape
        if rows != columns:
            raise InputError(f"{name} is not square ({rows} x {columns}); {_EXPECTED_FORMAT}", path)
        if rows != len(first):
            raise InputError(
    f"{name} is {rows} x {rows}, the first one {len(first)} x {len(first)}; {_EXPECTED_FORMAT}", path)
        wrong = ~(np.isfinite(matrix) & (matrix >= 0))
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise InputError(f"{name}: entry [{row}, {column}] is {matrix[row, column]:g}; valid: bytes, 0 or more",
                             path)


def _read_npz(path: str) -> dict[str, Matrix]:
    """The arrays in the order of their names. Nothing is unpacked before its size is known, and never a pickle."""
    found = {}
    left = MAX_TRAFFIC_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                array = name.removesuffix(".npy")
                with archive.open(name) as member:
                    left -= _matrix_bytes(member, array, path)
                if left < 0:
                    raise InputError(f"holds more than {MAX_TRAFFIC_BYTES} bytes of numbers", path)
                with archive.open(name) as member:
                    found[array] = _read_array(member)
    except InputError:
        raise
    except Exception as error:
        # what zipfile, its decompressors and numpy raise for damaged bytes has no other base
        raise InputError(f"is not .npz ({error or type(error).__name__}); {_EXPECTED_FORMAT}", path) from error
    return found


def _matrix_bytes(member: IO[bytes], name: str, path: str) -> int:
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
        raise InputError(f"{name} has the shape {shape}; {_EXPECTED_FORMAT}", path)
    if kind.kind not in "fiub" or kind.hasobject:
        raise InputError(f"{name} holds {kind}, no numbers; {_EXPECTED_FORMAT}", path)
    return int(8 * shape[0] * shape[1])


def _read_array(member: IO[bytes]) -> Matrix:
    import numpy as np
    from numpy.lib import format as npy

    return np.asarray(npy.read_array(member, allow_pickle=False), np.float64)


def _read_csv(path: str) -> dict[str, Matrix]:
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
                    raise InputError(f"is no row of numbers with commas between; {_EXPECTED_FORMAT}", path, number,
                                     line) from error
                if len(rows[-1]) != len(rows[0]):
                    raise InputError(f"{len(rows[-1])} numbers, the first row of the matrix has {len(rows[0])}", path,
                                     number)
            elif rows:
                found[f"matrix {len(found) + 1}"] = np.array(rows)
                rows = []
    return found
