"""Measurements that an MPI program makes within a sandbox: how they are asked for, and how the program answers.

The program reads WORK.json, whose `jobs` it measures one after the other, in one step for all of them, and writes
RESULT.json: a list, for each job what was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import SandboxError

if TYPE_CHECKING:
    from slurmdl.sandbox.cluster import Sandbox
    from slurmdl.train.transports.transport import Transport

#: Open MPI 4.1.4 crashes now and then in MPI_Init on a busy machine: so often a step is started
STARTS = 4
#: longest time of a step, s
LIMIT = 900.0


def ask(box: Sandbox, module: str, work: Mapping[str, Any]) -> list[Any]:
    """Run a program, a module of slurmdl.bench, with one rank on each node of the sandbox, and return its answer.

    Raises
    ------
    SandboxError : it fails again and again.
    """
    folder = box.shared / module
    call(box, ["mkdir", "-p", str(folder)])
    (folder / "work.json").write_text(json.dumps(work))
    nodes = str(len(box.spec.topology.nodes))
    start = ["salloc", "-Q", "-N", nodes, "srun", "--mpi=pmix", "-K", "-n", nodes, "python", "-m",
             f"slurmdl.bench.{module}", f"{folder}/work.json", f"{folder}/result.json"]
    for attempt in range(STARTS):
        try:
            call(box, start)
            break
        except SandboxError as error:
            if attempt + 1 == STARTS:
                raise
            print(f"started again: {error}", file=sys.stderr)
    found: list[Any] = json.loads((folder / "result.json").read_text())
    return found


def call(box: Sandbox, argv: Sequence[str]) -> str:
    """Run a command on the login host as the ordinary user; returns its stdout."""
    done = subprocess.run(box.command(argv, directory=str(box.shared)), capture_output=True, text=True, timeout=LIMIT,
                          check=False)
    if done.returncode:
        raise SandboxError(f"{' '.join(argv[:3])}: exit status {done.returncode}: "
                           f"{' '.join(done.stderr.split())[-500:]}")
    return done.stdout


def answer(measure: Callable[[Transport, Mapping[str, Any], Mapping[str, Any]], Any]) -> None:
    """The program's side, on each rank: measure(ranks of the job, job, work) for each job.

    Entry i of a job's `nodes` is the node of its rank i; ranks that a job leaves out wait, asleep.
    """
    from mpi4py import MPI

    from slurmdl.train import runtime
    from slurmdl.train.transports.mpi import Mpi

    work_file, result_file = sys.argv[1:]
    everyone = runtime.connect()
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    here = runtime.node_name()
    found = []
    for job in work["jobs"]:
        mine = job["nodes"].index(here) if here in job["nodes"] else None
        # 1: the ranks of the job, in its order; the others wait at the end of the loop
        part = MPI.COMM_WORLD.Split(int(mine is not None), mine or 0)
        figures = None if mine is None else measure(Mpi(part), job, work)
        everyone.meet()
        found.append(next(figure for figure in everyone.allgather(figures) if figure))
        part.Free()
    if everyone.rank == 0:
        with open(result_file, "w", encoding="utf-8") as file:
            json.dump(found, file)
