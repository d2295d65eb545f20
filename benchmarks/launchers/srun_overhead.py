"""Time of a step of `hostname` on eight nodes: plain srun, srun with PMIx, and `slurmdl srun`, alternating.

The time that `slurmdl srun` adds at 1,000 nodes is that until it starts srun, for which `true` stands in: the nodes
are names in the configuration of a real slurmctld, and the job is given by its environment. Control: a call that maps
nothing.
"""

from __future__ import annotations

import compileall
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import slurmdl
from benchmarks import sandbox_mpi
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.slurm import hostlist
from slurmdl.topology.source import tree_topology

NODES, REPEATS = 8, 15
#: seconds that `slurmdl srun` may add to a plain srun; --mpi=pmix is what the user of an MPI program would give, too
TARGET_S = 0.150
#: nodes and zones of the large cluster, and seconds that `slurmdl srun` may add there
LARGE, LARGE_ZONES, LARGE_TARGET_S = 1000, 20, 0.400
COMMANDS = {"srun": "srun", "srun --mpi=pmix": "srun --mpi=pmix", "slurmdl srun": "slurmdl srun",
            "slurmdl srun --mpi=none": "slurmdl srun --mpi=none"}


def rows(seed: int) -> Iterator[Row]:
    """Rows of each command, in seconds."""
    seconds = _small_cluster()
    plain, pmix = (_median(seconds[name]) for name in ("srun", "srun --mpi=pmix"))
    for name, values in seconds.items():
        baseline = pmix if name in ("slurmdl srun", "srun --mpi=pmix") else plain
        judged = name.startswith("slurmdl")
        yield make_row(f"hostname on {NODES} nodes: {name}", values, "s", baseline=baseline,
                       target=f"at most {TARGET_S * 1e3:.0f} ms more than srun with the same PMI" if judged else "",
                       met=_median(values) - baseline <= TARGET_S if judged else None)
    where = f"job environment of {LARGE} nodes, real slurmctld, true instead of srun"
    for name, values in _large_cluster().items():
        is_mapped = name == "slurmdl srun"
        yield make_row(f"until srun starts, {where}: {name}", values, "s",
                       target=f"at most {LARGE_TARGET_S * 1e3:.0f} ms" if is_mapped else "",
                       met=_median(values) <= LARGE_TARGET_S if is_mapped else None)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _small_cluster() -> dict[str, list[float]]:
    """Seconds of each command in a job on the small cluster."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"launchers-{os.getpid()}", round_robin_topology(NODES, 2)))
    try:
        return _measure(sandbox, COMMANDS, ["salloc", "-Q", f"-N{NODES}", "--exclusive"])
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def _large_cluster() -> dict[str, list[float]]:
    """Seconds until srun starts, on the large cluster."""
    topology = tree_topology((1, LARGE_ZONES, LARGE))
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"launchers-{os.getpid()}", topology, cloud_nodes=True))
    try:
        folder = sandbox.shared / "stand-in"
        sandbox_mpi.call(sandbox, ["sh", "-c", f"mkdir {folder} && ln -s /bin/true {folder}/srun"])
        job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": hostlist.fold_hostlist(topology.nodes),
               "SLURM_JOB_NUM_NODES": str(LARGE), "SLURM_NNODES": str(LARGE),
               "SLURM_JOB_CPUS_PER_NODE": f"2(x{LARGE})", "SLURM_TASKS_PER_NODE": f"1(x{LARGE})",
               "SLURM_NTASKS": str(LARGE)}
        commands = {"slurmdl srun": "slurmdl srun --dl-strict --mpi=none",
                    "slurmdl srun --version (control)": "slurmdl srun --version"}
        variables = [f"{name}={value}" for name, value in job.items()]
        return _measure(sandbox, commands, ["sh", "-c", f'PATH={folder}:$PATH exec env "$@"', "sh", *variables])
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def _measure(sandbox: lifecycle.Sandbox, commands: Mapping[str, str], job: list[str]) -> dict[str, list[float]]:
    """Run each command REPEATS times, alternating, in a shell that `job` starts."""
    lines = [f"start=$(date +%s%N); {command} hostname > /dev/null 2>&1 || echo failed; "
             f"echo '{name}:' $(($(date +%s%N) - start))" for name, command in commands.items()] * REPEATS
    # bytecode as after an installation: an ordinary user cannot write it into a source tree
    compileall.compile_dir(str(Path(slurmdl.__file__).parent), quiet=1)
    text = sandbox_mpi.call(sandbox, [*job, "bash", "-c", "; ".join(lines)])
    assert "failed" not in text, text
    return {name: [int(ns) / 1e9 for ns in re.findall(rf"^{re.escape(name)}: (\d+)$", text, re.M)]
            for name in commands}
