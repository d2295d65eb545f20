"""Properties of the MPI library."""

from __future__ import annotations

import time
from typing import Any

#: seconds from the end of MPI_Init to the first message: in Open MPI 4 the first ranks return while others are not
#: ready, and crash on a message
POST_INIT_SECONDS = 0.2
#: environment variable, read by MPI_Init: maximum bytes of an eager message of Open MPI over TCP (default 65,536).
#: Longer messages in both directions between two ranks delay each other's rendezvous reply
EAGER_LIMIT_VARIABLE = "OMPI_MCA_btl_tcp_eager_limit"
#: maximum overhead of a message in bytes
MESSAGE_OVERHEAD_BYTES = 4096


def open_mpi_major(mpi: Any) -> int:
    """Major version of Open MPI, 0 for another library; `mpi` is the module mpi4py.MPI."""
    name, _, version = mpi.Get_library_version().partition(",")[0].partition(" v")
    number = version.partition(".")[0]
    return int(number) if name == "Open MPI" and number.isdigit() else 0


def wait_until_ready(mpi: Any) -> None:
    """Wait, after MPI_Init and before the first message, until all ranks are ready."""
    if mpi.COMM_WORLD.Get_size() > 1 and 0 < open_mpi_major(mpi) < 5:
        time.sleep(POST_INIT_SECONDS)
