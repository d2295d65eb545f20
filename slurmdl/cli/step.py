"""Commands of steps besides `slurmdl srun`: `slurmdl env` and `slurmdl verify`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from slurmdl.errors import UsageError
from slurmdl.text import print_escaped

ENV_HELP = """\
usage: slurmdl env [options of srun and --dl-*]

print the planned ranks as shell variables, for launchers that you start yourself

In a job script, `eval "$(slurmdl env)"` exports the plan and the address of rank 0 (MASTER_ADDR, MASTER_PORT). It
takes the layout options of srun and the --dl-* options, e.g. --dl-launcher=auto:4. In a task of plain srun the same
line exports RANK, WORLD_SIZE, LOCAL_RANK and NODE_RANK of the plan, SLURMDL_ROLE and SLURMDL_ROLE_RANK, and
PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT and PET_LOCAL_ADDR for torchrun:

    eval "$(slurmdl env --dl-launcher=auto:4)"
    srun bash -c 'eval "$(slurmdl env)"; torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 train.py'
"""


def env(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print_escaped(ENV_HELP)
        return 0
    from slurmdl.slurm import jobs

    if not jobs.is_srun_task(os.environ):
        from slurmdl.launch.srun import run_srun

        return run_srun([*argv, "--print-rank-map=env"])
    if argv:
        raise UsageError(f"env: {argv[0]}: options belong to the call in the job script; expected none in a task")
    for name, value in task_environ(os.environ).items():
        print_escaped(f"export {name}={shlex.quote(value)}")
    return 0


def task_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a task of plain srun. InputError if the plan is missing or has no rank for this task."""
    from slurmdl import plan as plans

    plan, rank = plans.planned_place(int(environ.get("SLURM_LOCALID", "0")), environ)
    node_rank = list(dict.fromkeys(plan.nodes)).index(plan.nodes[rank])
    address = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    # see task.sh: a c10d rendezvous sorts the nodes by this text
    order = f"~{1_000_000 + node_rank}-{plan.nodes[rank]}" if node_rank else address.get("MASTER_ADDR", plan.nodes[0])
    return {"RANK": str(rank), "WORLD_SIZE": str(len(plan)), "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
            "SLURMDL_ROLE": plan.roles[rank], "SLURMDL_ROLE_RANK": str(plan.roles[:rank].count(plan.roles[rank])),
            "NODE_RANK": str(node_rank), "PET_NODE_RANK": str(node_rank),
            **{f"PET_{name}": value for name, value in address.items()}, "PET_LOCAL_ADDR": order}


def verify(argv: list[str]) -> int:
    """check that every rank of a step runs on its planned node

    Run it as the program of a step: `slurmdl srun slurmdl verify`, or behind a launcher, e.g. `slurmdl srun torchrun
    --nnodes=6 --nproc-per-node=4 --no-python slurmdl verify`. Rank 0 prints one line on stderr and exits with status
    1 if a rank runs elsewhere.
    """
    from slurmdl.cli.arguments import CliParser
    from slurmdl.launch.rank_check import verify_rank

    CliParser(prog="slurmdl verify", description=verify.__doc__).parse_args(argv)
    return 0 if verify_rank(os.environ) else 1
