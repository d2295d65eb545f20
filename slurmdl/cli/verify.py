"""check that every rank of a step runs on its planned node

Run it as the program of a step: `slurmdl srun slurmdl verify`, or behind a launcher, e.g. `slurmdl srun torchrun
--nnodes=6 --nproc-per-node=4 --no-python slurmdl verify`. Rank 0 prints one line on stderr and exits with status 1 if
a rank runs elsewhere.
"""

from __future__ import annotations

import os

from slurmdl.cli.arguments import CliParser
from slurmdl.launch.rank_check import verify_rank


def run(argv: list[str]) -> int:
    CliParser(prog="slurmdl verify", description=__doc__).parse_args(argv)
    return 0 if verify_rank(os.environ) else 1
