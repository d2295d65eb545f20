"""What is to be known of the MPI library at hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

#: seconds from the end of MPI_Init to the first message: Open MPI 4 lets the first ranks out while others are not
#: ready for messages yet, and crash on one
POST_INIT_SECONDS = 0.2
#: environment of Open MPI's mpirun on one machine, whose ranks may outnumber its cores: one that waits must let
#: others run. Root may be the one who tests or measures
OVERSUBSCRIBE_ENV: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1"}
#: its messages go by TCP. By the loopback alone: an engine of containers rewrites the address of what goes out by
#: another interface of its own, and Open MPI waits for ever for a peer whose address it does not know
LOOPBACK_TCP_ENV: Mapping[str, str] = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self",
                                  "OMPI_MCA_btl_tcp_if_include": "lo"}

#: variable of the environment, read by MPI_Init: bytes of a message that Open MPI sends over TCP without asking the
#: receiver (65,536 by default). Of longer ones, one each way between two ranks, one waits for the other: the answer
#: of each comes behind what is on its way already
EAGER_LIMIT_VARIABLE = "OMPI_MCA_btl_tcp_eager_limit"
#: bytes that belong to a message beside its payload, at most
MESSAGE_OVERHEAD_BYTES = 4096


def open_mpi_major(mpi: Any) -> int:
    """The first number of Open MPI's version, 0 for another library.

    Parameters
    ----------
    mpi : the module mpi4py.MPI.
    """
    name, _, version = mpi.Get_library_version().partition(",")[0].partition(" v")
    number = version.partition(".")[0]
    return int(number) if name == "Open MPI" and number.isdigit() else 0


def wait_until_ready(mpi: Any) -> None:
    """Wait, after MPI_Init and before the first message, until all ranks are ready for one."""
    if mpi.COMM_WORLD.Get_size() > 1 and 0 < open_mpi_major(mpi) < 5:
        time.sleep(POST_INIT_SECONDS)
