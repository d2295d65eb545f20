"""inside a job: rank map for the real allocation, then srun (or mpirun)"""

from __future__ import annotations

import os

HELP = """usage: slurmdl srun [--dl-*] [--launcher=srun|mpirun] [--print-rank-map=FORMAT] [srun options] program [args]

Inside a job or an salloc: orders the ranks of the step by the zones of the nodes that the job was given,
then becomes srun with all its options as they are given. Tasks per node and CPUs per task are srun's own.
What cannot be mapped runs as plain srun, with one line on stderr that says why.

  --launcher=srun|mpirun  what starts the tasks (default: srun; mpirun is Open MPI's)
  --print-rank-map=FORMAT      print the map and start nothing; no program is needed. FORMAT is slurm-hostfile,
                          openmpi-rankfile, openmpi-seq, mpich-rank-order, intel-machinefile, hydra-hostfile,
                          torchrun, or shell: the variables of `srun --dl-rank-map`, for a Slurm with slurmdl's plugin:
                              eval "$(slurmdl srun --print-rank-map=shell)"
                          Open MPI 5 takes no rank file with a dash in its name.
"""


def run(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        from slurmdl import dl_options

        print(HELP, end="")
        for option in dl_options.OPTIONS:
            value = f"={option.values}" if option.values else ""
            print(f"  --dl-{option.name}{value}\n                          {option.help}")
        print("\nsrun's own options: srun --help")
        return 0
    from slurmdl.launch import srun

    return srun.run_srun(argv, os.environ)
