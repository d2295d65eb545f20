"""TODO."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping

from slurmdl.errors import (
    SlurmdlError,
)
from slurmdl.slurm import getopt, process
from slurmdl.slurm.slurm_conf import SlurmConfig


def _mpirun_has_ulfm(environ: Mapping[str, str]) -> bool:
    """Whether the mpirun in PATH is Open MPI's from 5.0 on, whose ranks may go on without one that is lost."""
    told = re.match(r"mpi\w+ \(Open MPI\) (\d+)", process.run_command(["mpirun", "--version"], env=environ).stdout)
    return told is not None and int(told[1]) >= 5


def detect_pmi(environ: Mapping[str, str]) -> str:
    """The PMI by which the MPI in PATH learns its ranks from srun, "" where there is none or it is not known."""
    found = shutil.which("mpirun", path=environ.get("PATH"))
    launcher = os.path.basename(os.path.realpath(found)) if found else ""
    return "pmix" if launcher in ("orterun", "prterun", "mpirun.openmpi", "prte") else \
        "pmi2" if launcher in ("mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich") else ""


def mpi_type_option(line: getopt.CommandLine, get_slurm_config: Callable[[
                    ], SlurmConfig], environ: Mapping[str, str]) -> list[str]:
    """--mpi for the MPI that PATH has; the wrong one starts every task as a world of its own.

    The user's --mpi and SLURM_MPI_TYPE win, and so does the cluster's default where it is the right one.
    """
    wanted = "" if line.has_option("mpi") or "SLURM_MPI_TYPE" in environ else detect_pmi(environ)
    if not wanted:
        return []
    try:
        controller = get_slurm_config()
        needed = controller.has_pmi_plugin(wanted) and not controller.mpi_default.startswith(wanted)
    except SlurmdlError:
        # srun lists its plugins without the controller
        listed = process.run_command(["srun", "--mpi=list"], env=environ)
        needed = wanted in re.findall(r"\w+", listed.stdout + listed.stderr)
    return [f"--mpi={wanted}"] if needed else []
