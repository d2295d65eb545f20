"""`slurmdl srun`: help, and the call of slurmdl.launch.srun."""

from __future__ import annotations

import os

HELP = """usage: slurmdl srun [--dl-*] [--step-starter=NAME] [--print-rank-map=FORMAT] [srun options] program [args]

Inside a job or an salloc: orders the ranks of the step by the zones of the allocated nodes, then executes srun
with all its options unchanged. srun determines tasks per node and CPUs per task.
A step that cannot be mapped, or outside a job, runs as plain srun, with one line on stderr that gives the reason.

  --step-starter=srun|mpirun  program that starts the tasks (default: srun; mpirun is Open MPI's)
  --print-rank-map=FORMAT     print the rank map instead of starting a step; needs no program. FORMAT is
                              slurm-hostfile, openmpi-rankfile, openmpi-seq, mpich-rank-order, intel-machinefile,
                              hydra-hostfile, torchrun, or shell: variables for `srun --dl-rank-map`, an option of
                              slurmdl's SPANK plugin:
                                  eval "$(slurmdl srun --print-rank-map=shell)"
                              Open MPI 5 rejects rank files with a dash in the name.
"""


def run(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        from slurmdl import dl_options

        print(f"{HELP}\n{dl_options.help_text()}\nsrun's own options: srun --help")
        return 0
    from slurmdl.launch import srun

    return srun.run_srun(argv, os.environ)
