"""Time of a step of `hostname` on eight nodes: plain srun, srun with PMIx, and `slurmdl srun`, alternating."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from benchmarks import sandbox_mpi
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, REPEATS = 8, 15
#: seconds that `slurmdl srun` may add to a plain srun; --mpi=pmix is what the user of an MPI program would give, too
TARGET_S = 0.150
COMMANDS = {"srun": "srun", "srun --mpi=pmix": "srun --mpi=pmix", "slurmdl srun": "slurmdl srun",
            "slurmdl srun --mpi=none": "slurmdl srun --mpi=none"}


def rows(seed: int) -> Iterator[Row]:
    """Rows of each command, in seconds."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"launchers-{os.getpid()}", round_robin_topology(NODES, 2)))
    try:
        lines = [f"start=$(date +%s%N); {command} hostname > /dev/null 2>&1; echo {name.replace(' ', '_')} "
                 "$(($(date +%s%N) - start))" for _ in range(REPEATS) for name, command in COMMANDS.items()]
        text = sandbox_mpi.call(sandbox, ["salloc", "-Q", f"-N{NODES}", "--exclusive", "bash", "-c",
                                          "; ".join(lines)])
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    seconds = {name: [int(ns) / 1e9 for ns in re.findall(rf"^{re.escape(name.replace(' ', '_'))} (\d+)$", text, re.M)]
               for name in COMMANDS}
    plain, pmix = (sorted(seconds[name])[REPEATS // 2] for name in ("srun", "srun --mpi=pmix"))
    for name, values in seconds.items():
        baseline = pmix if name in ("slurmdl srun", "srun --mpi=pmix") else plain
        added = sorted(values)[REPEATS // 2] - baseline
        judged = name.startswith("slurmdl")
        yield make_row(f"hostname on {NODES} nodes: {name}", values, "s", baseline=baseline,
                       target=f"at most {TARGET_S * 1e3:.0f} ms more than srun with the same PMI" if judged else "",
                       met=added <= TARGET_S if judged else None)
