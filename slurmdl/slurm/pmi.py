"""Process management interface (PMI) of the MPI in PATH, and srun's --mpi option for it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping

from slurmdl.errors import SlurmdlError
from slurmdl.slurm import process
from slurmdl.slurm.getopt import CommandLine
from slurmdl.slurm.slurm_conf import SlurmConfig

#: name of mpirun's file -> PMI
_PMI_BY_MPIRUN = {**dict.fromkeys(("orterun", "prterun", "mpirun.openmpi", "prte"), "pmix"),
                  **dict.fromkeys(("mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich"), "pmi2")}


def detect_pmi(environ: Mapping[str, str]) -> str:
    """Return the PMI of the MPI in PATH: "pmix", "pmi2", or "" if there is no known MPI."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    return _PMI_BY_MPIRUN.get(os.path.basename(os.path.realpath(mpirun)), "") if mpirun else ""


def mpi_type_option(line: CommandLine, get_slurm_config: Callable[[], SlurmConfig],
                    environ: Mapping[str, str]) -> list[str]:
    """Return srun's --mpi option for the MPI in PATH; with a wrong type every task is an MPI world of its own.

    The list is empty if the user chooses (--mpi, SLURM_MPI_TYPE) or the cluster's default is right.
    """
    pmi = "" if line.has_option("mpi") or "SLURM_MPI_TYPE" in environ else detect_pmi(environ)
    if not pmi:
        return []
    try:
        slurm_config = get_slurm_config()
        is_needed = slurm_config.has_pmi_plugin(pmi) and not slurm_config.mpi_default.startswith(pmi)
    except SlurmdlError:
        # srun lists its plugins without the controller
        result = process.run_command(["srun", "--mpi=list"], env=environ)
        is_needed = pmi in re.findall(r"\w+", result.stdout + result.stderr)
    return [f"--mpi={pmi}"] if is_needed else []


def pmix_hangs_across_components(get_slurm_config: Callable[[], SlurmConfig]) -> bool:
    """Whether `srun --mpi=pmix` can hang at the end of a step over several components of a heterogeneous job.

    Its threads, one per component, overwrite each other's PMIx agent (SchedMD ticket 16817, fixed in Slurm 24.11).
    """
    try:
        return get_slurm_config().version < (24, 11)
    except SlurmdlError:
        return True


def mpirun_has_ulfm(environ: Mapping[str, str]) -> bool:
    """Whether the mpirun in PATH is Open MPI 5.0 or newer, whose ranks can continue after the loss of a rank."""
    version = re.match(r"mpi\w+ \(Open MPI\) (\d+)", process.run_command(["mpirun", "--version"], env=environ).stdout)
    return version is not None and int(version[1]) >= 5
