"""Training steps with several frameworks, alternating in one step: an MPI program with one rank on each node.

    srun --mpi=pmix python -m benchmarks.strategies.allreduce_vs_ddp_worker WORK.json RESULT.json

All train the trainer's synthetic workload: its gradients become ready one by one while the rank sleeps, so that ranks
do not slow each other down if they outnumber the cores. The messages are real.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import sandbox_mpi
from slurmdl.bench import frameworks
from slurmdl.bench.host_meters import CpuIdleMeter
from slurmdl.train import init
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.workloads import SyntheticWorkload
from slurmdl.train.transports.transport import Transport

SEED, RATE = 1, 1e-4
Step = Callable[[], None]


def main() -> None:
    """Measure each job of WORK.json (see benchmarks.sandbox_mpi).

    WORK.json is {"zones": {node: zone}, "jobs": [{"nodes", "parameters", "seconds", "variants", "repeats",
    "steps"}]}; `seconds` is the computation of a step. The result of a job is {variant: {"seconds": [step time of
    the slowest rank in each repeat], "idle": [idle share of the CPUs in each repeat]}}.
    """
    sandbox_mpi.measure_jobs(lambda transport, job, work: measure(transport, job, work["zones"]))


def measure(transport: Transport, job: Mapping[str, Any],
            zones: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
    """Measure each variant once per repeat: step time of the slowest rank, and idle share of the CPUs."""
    import torch

    torch.set_num_threads(1)
    node = job["nodes"][transport.rank]
    torch_methods = TorchMethods(transport, job)
    makers: dict[str, Callable[[], tuple[Step, Step]]] = {
        "none": torch_methods.no_communication, "barrier": torch_methods.barrier,
        "ddp": torch_methods.ddp, "post-local": torch_methods.post_local,
        "ring": lambda: slurmdl_step(transport, job, "ring", node, zones[node]),
        "hierarchical": lambda: slurmdl_step(transport, job, "hierarchical", node, zones[node]),
        **{f"gloo-{pattern}": partial(gloo_step, job, pattern, node, zones[node])
           for pattern in ("ring", "hierarchical")}}
    variants = {name: makers[name]() for name in job["variants"]}
    for step, _ in variants.values():
        step()  # the first step allocates memory
    measurements: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "idle": []} for name in variants}
    for repeat in range(job["repeats"]):
        for name in list(variants)[::-1 if repeat % 2 else 1]:
            # post-local SGD exchanges once in PERIOD steps
            steps = frameworks.PERIOD if name == "post-local" else job["steps"]
            transport.barrier()
            start, cpu_idle = time.perf_counter(), CpuIdleMeter()
            for _ in range(steps):
                variants[name][0]()
            seconds = (time.perf_counter() - start) / steps
            measurements[name]["seconds"].append(float(max(transport.allgather(seconds))))
            measurements[name]["idle"].append(cpu_idle.idle_share())
    for _, close in variants.values():
        close()
    torch_methods.close()
    del variants, makers
    gc.collect()
    return measurements


def task(job: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a synthetic workload and its optimizer."""
    import torch

    workload = SyntheticWorkload(job["parameters"], lambda samples: float(job["seconds"]), time.sleep, SEED)
    return workload, torch.optim.SGD(workload.module.parameters(), lr=RATE)


def stepping(loss: Callable[[], Any], optimizer: Any) -> Step:
    """Return a training step as in a user script."""
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return step


def slurmdl_step(transport: Transport, job: Mapping[str, Any], comm_pattern: str, node: str,
                 zone: str) -> tuple[Step, Step]:
    """Return a step with the library of slurmdl, and a function that closes it."""
    workload, optimizer = task(job)
    run = init(StrategyConfig("allreduce", comm_pattern), transport=transport, environ={
        "SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"})
    run.wrap(workload.module, optimizer)
    return stepping(lambda: workload.loss(1), optimizer), run.close


def gloo_step(job: Mapping[str, Any], comm_pattern: str, node: str, zone: str) -> tuple[Step, Step]:
    """As `slurmdl_step`, over a process group of torch.distributed."""
    from torch import distributed

    from slurmdl.train.transports.torch_distributed import TorchTransport

    transport = TorchTransport(distributed.new_group())
    step, close_run = slurmdl_step(transport, job, comm_pattern, node, zone)

    def close() -> None:
        close_run()
        transport.close()

    return step, close


class TorchMethods:
    """PyTorch's own methods, over Gloo between the same ranks."""

    def __init__(self, transport: Transport, job: Mapping[str, Any]) -> None:
        self._transport, self._job = transport, job
        self.close = frameworks.init_process_group(transport)
        self._plain: tuple[Any, Any] | None = None

    def no_communication(self) -> tuple[Step, Step]:
        """Return a step without communication."""
        workload, optimizer = self._shared()
        return stepping(lambda: workload.loss(1), optimizer), lambda: None

    def barrier(self) -> tuple[Step, Step]:
        """Return a step without communication, followed by a barrier."""
        step, close = self.no_communication()

        def step_and_barrier() -> None:
            step()
            self._transport.barrier()

        return step_and_barrier, close

    def post_local(self) -> tuple[Step, Step]:
        """Return a local step; every PERIOD-th one averages all models."""
        workload, optimizer = self._shared()
        local_step = stepping(lambda: workload.loss(1), optimizer)
        average = frameworks.model_averaging(workload.module)

        def step() -> None:
            local_step()
            average()

        return step, lambda: None

    def ddp(self) -> tuple[Step, Step]:
        """Return a step with DistributedDataParallel, its own buckets and overlap."""
        from torch.nn.parallel import DistributedDataParallel

        workload, optimizer = task(self._job)
        model = DistributedDataParallel(workload.module)
        return stepping(model, optimizer), lambda: None

    def _shared(self) -> tuple[Any, Any]:
        self._plain = self._plain or task(self._job)
        return self._plain


if __name__ == "__main__":
    main()
