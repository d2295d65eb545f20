"""Environments of Open MPI on one machine, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping

#: environment of Open MPI's mpirun on one machine with more ranks than cores: waiting ranks yield. Permits root
OVERSUBSCRIBE_ENV: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1"}
#: messages use TCP over loopback only: container engines rewrite source addresses on other interfaces, and Open MPI
#: waits forever for a peer with an unknown address
LOOPBACK_TCP_ENV: Mapping[str, str] = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self",
                                       "OMPI_MCA_btl_tcp_if_include": "lo"}
