"""What is to be known of the MPI library at hand."""

from __future__ import annotations

import time
from typing import Any

#: seconds from the end of MPI_Init to the first message: Open MPI 4 lets the first ranks out while others are not
#: ready for messages yet, and crash on one
SETTLED = 0.2


def open_mpi(mpi: Any) -> int:
    """The first number of Open MPI's version, 0 for another library.

    Parameters
    ----------
    mpi : the module mpi4py.MPI.
    """
    name, _, version = mpi.Get_library_version().partition(",")[0].partition(" v")
    number = version.partition(".")[0]
    return int(number) if name == "Open MPI" and number.isdigit() else 0


def settle(mpi: Any) -> None:
    """Wait, after MPI_Init and before the first message, until all ranks are ready for one."""
    if mpi.COMM_WORLD.Get_size() > 1 and 0 < open_mpi(mpi) < 5:
        time.sleep(SETTLED)
