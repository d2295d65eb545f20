"""Run an MPI program on the nodes of a sandbox; `measure_jobs` is the main function of such a program.

The program reads WORK.json, measures its `jobs` one after the other in one step, and writes RESULT.json: a list with
the result of each job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmdl.errors import SandboxError

if TYPE_CHECKING:
    from slurmdl.sandbox.lifecycle import Sandbox
    from slurmdl.train.transports.transport import Transport

#: attempts to start a step: Open MPI 4.1.4 sometimes crashes in MPI_Init on a busy machine
STARTS = 4
#: time limit of a step, in seconds
STEP_TIMEOUT_S = 900.0
#: directory of `benchmarks` and `slurmdl`; ranks start in other directories
ROOT = Path(__file__).resolve().parents[1]


def run_program(sandbox: Sandbox, module: str, work: Mapping[str, Any]) -> list[Any]:
    """Run a module of `benchmarks` with one rank on each node of the sandbox, and return its results.

    Raises:
        SandboxError: every attempt failed.
    """
    folder = sandbox.shared / module
    call(sandbox, ["mkdir", "-p", str(folder)])
    (folder / "work.json").write_text(json.dumps(work))
    nodes = str(len(sandbox.spec.topology.nodes))
    start = ["env", f"PYTHONPATH={ROOT}", "salloc", "-Q", "-N", nodes, "srun", "--mpi=pmix", "-K", "-n", nodes,
             "python", "-m", f"benchmarks.{module}", f"{folder}/work.json", f"{folder}/result.json"]
    for attempt in range(STARTS):
        try:
            call(sandbox, start)
            break
        except SandboxError as error:
            if attempt + 1 == STARTS:
                raise
            print(f"retry: {error}", file=sys.stderr)
    result: list[Any] = json.loads((folder / "result.json").read_text())
    return result


def call(sandbox: Sandbox, argv: Sequence[str]) -> str:
    """Run a command on the login host as the ordinary user and return its stdout."""
    done = subprocess.run(sandbox.command(argv, directory=str(sandbox.shared)), capture_output=True, text=True,
                          timeout=STEP_TIMEOUT_S, check=False)
    if done.returncode:
        raise SandboxError(f"{' '.join(argv[:3])}: exit status {done.returncode}: "
                           f"{' '.join(done.stderr.split())[-500:]}")
    return done.stdout


def measure_jobs(measure: Callable[[Transport, Mapping[str, Any], Mapping[str, Any]], Any]) -> None:
    """Run on each rank of the program: call measure(transport, job, work) for each job, and write the results.

    Entry i of a job's `nodes` is the node of its rank i. Ranks that a job does not use sleep.
    """
    from mpi4py import MPI

    from slurmdl.train import world as world_module
    from slurmdl.train.transports.mpi import MpiTransport

    work_file, result_file = sys.argv[1:]
    world = world_module.init_mpi()
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    node = world_module.node_name()
    results = []
    for job in work["jobs"]:
        rank = job["nodes"].index(node) if node in job["nodes"] else None
        # color 1: the ranks of the job, in its order; the other ranks wait in world.barrier()
        part = MPI.COMM_WORLD.Split(int(rank is not None), rank or 0)
        job_result = None if rank is None else measure(MpiTransport(part), job, work)
        world.barrier()
        results.append(next(rank_result for rank_result in world.allgather(job_result) if rank_result))
        part.Free()
    if world.rank == 0:
        with open(result_file, "w", encoding="utf-8") as file:
            json.dump(results, file)
