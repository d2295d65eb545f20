"""Seconds of a training step, and bytes between zones: an MPI program with one rank on each node.

    srun --mpi=pmix python -m benchmarks.islands.step_time_worker WORK.json RESULT.json

All methods train the trainer's synthetic workload, whose gradients become ready one by one while the rank sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import sandbox_mpi
from slurmdl.bench.frameworks import init_process_group
from slurmdl.train import init
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.workloads import SyntheticWorkload
from slurmdl.train.transports.transport import Transport

SEED = 1


def main() -> None:
    """Measure each job of WORK.json (see benchmarks.sandbox_mpi).

    A job is {"nodes", "zones": [zone of each rank], "options": of `slurmdl train`, or [] for DistributedDataParallel,
    "parameters", "seconds": computation of a step, "steps", "repeats"}. Its result is {"seconds": [per step, of the
    slowest rank, in each repeat], "inter_zone_bytes": per step, of all ranks, 0 for DistributedDataParallel}.
    """
    sandbox_mpi.measure_jobs(measure)


def measure(transport: Transport, job: Mapping[str, Any], work: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one method; each repeat makes whole periods."""
    import torch

    torch.set_num_threads(1)
    workload = SyntheticWorkload(job["parameters"], lambda samples: float(job["seconds"]), time.sleep, SEED)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=1e-4, fused=True)
    start, sent_bytes, close = (_start_slurmdl if job["options"] else _start_ddp)(transport, job, workload, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        start().backward()
        optimizer.step()

    for _ in range(job["steps"]):
        step()  # the first exchange allocates memory
    seconds, before = [], sent_bytes()
    for _ in range(job["repeats"]):
        transport.barrier()
        begin = time.perf_counter()
        for _ in range(job["steps"]):
            step()
        seconds.append(float(max(transport.allgather((time.perf_counter() - begin) / job["steps"]))))
    total = sum(transport.allgather(sent_bytes() - before))
    close()
    return {"seconds": seconds, "inter_zone_bytes": total / (job["steps"] * job["repeats"])}


#: forward pass, bytes between zones sent so far, and what ends the method
Started = tuple[Callable[[], Any], Callable[[], int], Callable[[], Any]]


def _start_slurmdl(transport: Transport, job: Mapping[str, Any], workload: SyntheticWorkload,
                   optimizer: Any) -> Started:
    zone, node = job["zones"][transport.rank], job["nodes"][transport.rank]
    environ = {"SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
               "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    run = init(parse_train_options(job["options"], {}).strategy_config, transport=transport, environ=environ,
               check_every=0)
    run.wrap(workload.module, optimizer)
    return lambda: workload.loss(1), lambda: run.p2p.bytes_sent["inter_zone"], run.close


def _start_ddp(transport: Transport, job: Mapping[str, Any], workload: SyntheticWorkload, optimizer: Any) -> Started:
    from torch.nn.parallel import DistributedDataParallel

    workload.loss(1)  # sets the batch size
    close = init_process_group(transport)
    return DistributedDataParallel(workload.module), lambda: 0, close


if __name__ == "__main__":
    main()
