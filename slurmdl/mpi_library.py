"""Properties of the MPI library."""

from __future__ import annotations

import time
from typing import Any

#: seconds from the end of MPI_Init to the first message. The first ranks of Open MPI return while others still wait
#: in MPI_Init, and a rank that gets a message there crashes: https://github.com/open-mpi/ompi/issues/12495 (seen
#: with 4.1.4 and 5.0.7 under srun)
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
    if mpi.COMM_WORLD.Get_size() > 1 and open_mpi_major(mpi):
        time.sleep(POST_INIT_SECONDS)
