"""Seconds per step of data-parallel and pipeline programs, for each launch line and kind of launch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks import sandbox_mpi
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, REPEATS = 6, 2
C10D = "--rdzv-backend=c10d --rdzv-endpoint=$head:29500"
#: launch line -> what srun starts
LINES = {
    "one task per rank": "python step.py",
    "torchrun, c10d": f"torchrun --nnodes={NODES} --nproc-per-node=1 {C10D} step.py",
    "torchrun, elastic c10d": f"torchrun --nnodes={NODES - 1}:{NODES} {C10D} step.py",
    "torchrun, node rank SLURM_NODEID": f"bash -c 'torchrun --nnodes={NODES} --node-rank=$SLURM_NODEID "
                                        "--master-addr=$head --master-port=29501 step.py'",
}
#: its order cannot change: the rendezvous numbers the nodes by the names that the line gives it
CONTROL = f"bash -c 'torchrun --nnodes={NODES} {C10D} --local-addr=$SLURMD_NODENAME step.py'"
KINDS = {"plain": "srun", "before": "slurmdl srun --dl-launcher=none", "now": "slurmdl srun"}
#: slurmdl must take at most this share of the plain launch's time where plain srun orders nodes by name
TARGET_SHARE = 0.7
#: measures a step of both kinds, the median of five after a warm-up step
PROGRAM = '''
import json, os, statistics, time, torch
import torch.distributed as dist
# as in many scripts: ranks and master from Slurm's variables if no launcher has set them
for name, value in (("RANK", os.environ["SLURM_PROCID"]), ("WORLD_SIZE", os.environ["SLURM_NTASKS"]),
                    ("MASTER_ADDR", os.environ["head"]), ("MASTER_PORT", "29502")):
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data, result = torch.ones(500_000), {}
def reduce():
    dist.all_reduce(data)
def shift():
    requests = [dist.isend(data, rank + 1)] if rank + 1 < size else []
    if rank:
        requests.append(dist.irecv(torch.empty_like(data), rank - 1))
    for request in requests:
        request.wait()
for name, step in (("all-reduce", reduce), ("pipeline", shift)):
    seconds = []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    result[name] = statistics.median(seconds[1:])
if rank == 0:
    print("RESULT " + json.dumps(result), flush=True)
dist.barrier()
os._exit(0)
'''


def rows(seed: int) -> Iterator[Row]:
    """Rows of each launch line: seconds per step now, with the plain launch as the baseline."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"launchers-{os.getpid()}", round_robin_topology(NODES, 2)))
    try:
        for name, line in LINES.items():
            by_kind = {kind: measure(sandbox, f"{command} {line}") for kind, command in KINDS.items()}
            for step in by_kind["now"]:
                plain, before, now = (by_kind[kind][step] for kind in KINDS)
                share = median(now) / median(plain)
                yield make_row(f"{name}: {step}, --dl-launcher=none", before, "s", baseline=median(plain))
                yield make_row(f"{name}: {step}", now, "s", baseline=median(plain),
                               target=f"at most {TARGET_SHARE} of plain srun (baseline)", met=share <= TARGET_SHARE)
        control_plain, control = (measure(sandbox, f"{command} {CONTROL}") for command in ("srun", "slurmdl srun"))
        for step, seconds in control.items():
            share = median(seconds) / median(control_plain[step])
            yield make_row(f"torchrun, c10d with --local-addr: {step} (control)", seconds, "s",
                           baseline=median(control_plain[step]),
                           target=f"above {TARGET_SHARE} of plain srun", met=share > TARGET_SHARE)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(sandbox: lifecycle.Sandbox, command: str) -> dict[str, list[float]]:
    """Run a step REPEATS times in jobs of their own; return the seconds of each kind of step."""
    seconds: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, value in run_job(sandbox, command).items():
            seconds.setdefault(name, []).append(value)
    return seconds


def run_job(sandbox: lifecycle.Sandbox, command: str) -> dict[str, float]:
    folder = Path(sandbox.shared) / "step"
    sandbox_mpi.call(sandbox, ["mkdir", "-p", str(folder)])
    folder.chmod(0o777)
    (folder / "step.py").write_text(PROGRAM)
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\nexport head=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n1)\n"
                      f"export OMP_NUM_THREADS=1\ncd {folder}\n{command} > output 2> errors\n")
    sandbox_mpi.call(sandbox, ["sbatch", "-W", f"-N{NODES}", "--ntasks-per-node=1", "--exclusive", str(script)])
    line, = [line for line in (folder / "output").read_text().splitlines() if line.startswith("RESULT ")]
    result: dict[str, float] = json.loads(line[len("RESULT "):])
    return result
