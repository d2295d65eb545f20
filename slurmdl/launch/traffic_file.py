"""Traffic matrices of the user: the file of --dl-comm-pattern."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.plan import COMM_PATTERNS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slurmdl.traffic import Traffic

    Matrix = npt.NDArray[np.float64]

#: maximum bytes of all numbers of a file, 8 per number, and of a text file: one matrix of 5,792 ranks
MAX_TRAFFIC_BYTES = 2**28

_EXPECTED = ("expected matrices of one row and one column for each rank, in .npz or as CSV with a blank line between "
             "matrices")


def load_traffic(options: DlOptions) -> Traffic:
    """The traffic of the options, with the matrices of --dl-comm-pattern unless it names a pattern of the strategy.

    Raises InputError if the file cannot be read, is too large, or does not hold square matrices of one size with
    finite numbers of 0 or more, some between different ranks above 0. Entry [i, j] of a matrix, shape (ranks, ranks),
    is the bytes that rank i sends to rank j per iteration. There is one matrix per phase, all of the same shape.
    """
    path, patterns = options.comm_pattern, COMM_PATTERNS[options.strategy]
    if not path or path in patterns:
        return options.traffic
    import zipfile

    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError("is not a regular file", path)
        if status.st_size > MAX_TRAFFIC_BYTES:
            raise InputError(f"has {status.st_size} bytes; expected at most {MAX_TRAFFIC_BYTES}", path)
        matrices = _read_npz(path) if zipfile.is_zipfile(path) else _read_csv(path)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}); expected with {options.strategy}: "
                         f"{', '.join(patterns)}, or a file of matrices", path) from error
    _check_matrices(matrices, path)
    return replace(options.traffic, matrices=tuple(matrices.values()))


def _check_matrices(matrices: dict[str, Matrix], path: str) -> None:
    import numpy as np

    if not matrices:
        raise InputError(f"holds no matrix; {_EXPECTED}", path)
    size = len(next(iter(matrices.values())))
    for name, matrix in matrices.items():
        rows, columns = matrix.shape
        if rows != columns:
            raise InputError(f"{name} is not square ({rows} x {columns}); {_EXPECTED}", path)
        if rows != size:
            raise InputError(f"{name} is {rows} x {rows}, the first one {size} x {size}; {_EXPECTED}", path)
        is_wrong = ~(np.isfinite(matrix) & (matrix >= 0))
        if is_wrong.any():
            row, column = np.argwhere(is_wrong)[0].tolist()
            raise InputError(f"{name}: entry [{row}, {column}] is {matrix[row, column]:g}; expected bytes, 0 or more",
                             path)
    if size > 1 and all(np.count_nonzero(matrix) == np.count_nonzero(matrix.diagonal())
                        for matrix in matrices.values()):
        raise InputError("holds no traffic between different ranks: all entries are 0; expected bytes", path)


def _read_npz(path: str) -> dict[str, Matrix]:
    """Read the arrays in the order of their names. Sizes are checked before unpacking; pickles are rejected."""
    import zipfile

    matrices = {}
    remaining_bytes = MAX_TRAFFIC_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for member_name in sorted(archive.namelist()):
                name = member_name.removesuffix(".npy")
                with archive.open(member_name) as member:
                    remaining_bytes -= _matrix_bytes(member, name, path)
                if remaining_bytes < 0:
                    raise InputError(f"holds more than {MAX_TRAFFIC_BYTES} bytes of numbers", path)
                with archive.open(member_name) as member:
                    matrices[name] = _read_array(member)
    except InputError:
        raise
    except Exception as error:
        # exceptions of zipfile, its decompressors and numpy for damaged bytes have no narrower base
        raise InputError(f"is not .npz ({error or type(error).__name__}); {_EXPECTED}", path) from error
    return matrices


def _matrix_bytes(member: IO[bytes], name: str, path: str) -> int:
    """Bytes of an array as 8-byte numbers, from its header; InputError unless it is a matrix of real numbers."""
    from numpy.lib import format as npy

    version = npy.read_magic(member)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(member)
    if len(shape) != 2 or not all(shape):
        raise InputError(f"{name} has the shape {shape}; {_EXPECTED}", path)
    if dtype.kind not in "fiub" or dtype.hasobject:
        raise InputError(f"{name} holds {dtype}, not numbers; {_EXPECTED}", path)
    return int(8 * shape[0] * shape[1])


def _read_array(member: IO[bytes]) -> Matrix:
    import numpy as np
    from numpy.lib import format as npy

    return np.asarray(npy.read_array(member, allow_pickle=False), np.float64)


def _read_csv(path: str) -> dict[str, Matrix]:
    """Read matrices separated by blank lines; the keys number them."""
    import numpy as np

    matrices: dict[str, Matrix] = {}
    rows: list[Matrix] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate([*file, ""], 1):
            if line.strip():
                try:
                    rows.append(np.array(line.split(","), np.float64))
                except ValueError as error:
                    raise InputError(f"is not a row of numbers separated by commas; {_EXPECTED}", path, number,
                                     line) from error
                if len(rows[-1]) != len(rows[0]):
                    raise InputError(f"{len(rows[-1])} numbers, the first row of the matrix has {len(rows[0])}", path,
                                     number)
            elif rows:
                matrices[f"matrix {len(matrices) + 1}"] = np.array(rows)
                rows = []
    return matrices
