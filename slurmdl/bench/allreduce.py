"""Training steps by several frameworks, by turns in one step of MPI: a program with one rank on each node.

    srun --mpi=pmix python -m slurmdl.bench.allreduce WORK.json RESULT.json

All train the trainer's own stand-in for a network: its gradients are ready one after the other while time goes by,
asleep, so that ranks which outnumber cores do not compute at each other's expense. The messages are real, and all
frameworks have the same ranks on the same nodes.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from slurmdl.bench import within
from slurmdl.train import init
from slurmdl.train.method import Method
from slurmdl.train.trainer.task import StandIn
from slurmdl.train.transports.transport import Transport

SEED, RATE = 1, 1e-4
#: steps from one average to the next in post-local SGD
LOCAL = 4
Step = Callable[[], None]


def main() -> None:
    """Measure each job of WORK.json (see slurmdl.bench.within).

    WORK.json is {"zones": {node: zone}, "jobs": [{"nodes", "parameters", "seconds", "variants", "repeats",
    "steps"}]}: `seconds` are those of a step's computation. For each job the answer is {variant: [seconds per step,
    one figure for each repeat]}, those of the slowest rank.
    """
    within.answer(lambda transport, job, work: measure(transport, job, work["zones"]))


def measure(transport: Transport, job: Mapping[str, Any], zones: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds per step of each variant, the slowest rank's, one figure for each repeat."""
    import torch

    torch.set_num_threads(1)
    node = job["nodes"][transport.rank]
    rival = Rival(transport, job)
    makers: dict[str, Callable[[], tuple[Step, Step]]] = {
        "none": rival.alone, "ddp": rival.ddp, "post-local": rival.post_local,
        "ring": lambda: ours(transport, job, "ring", node, zones[node]),
        "hierarchical": lambda: ours(transport, job, "hierarchical", node, zones[node])}
    made = {name: makers[name]() for name in job["variants"]}
    found: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(job["repeats"]):
        for name in list(made)[::-1 if repeat % 2 else 1]:
            # post-local SGD exchanges in the last of so many steps
            steps = LOCAL if name == "post-local" else job["steps"]
            transport.meet()
            begun = time.perf_counter()
            for _ in range(steps):
                made[name][0]()
            taken = (time.perf_counter() - begun) / steps
            found[name].append(float(max(transport.allgather(taken))))
    for _, close in made.values():
        close()
    rival.close()
    del made, makers
    gc.collect()
    return found


def task(job: Mapping[str, Any]) -> tuple[Any, Any]:
    """A stand-in for a network, and its optimizer."""
    import torch

    its = StandIn(job["parameters"], lambda samples: float(job["seconds"]), time.sleep, SEED)
    return its, torch.optim.SGD(its.module.parameters(), lr=RATE)


def stepping(loss: Callable[[], Any], optimizer: Any) -> Step:
    """A training step as a script writes it."""
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return step


def ours(transport: Transport, job: Mapping[str, Any], traffic: str, node: str, zone: str) -> tuple[Step, Step]:
    """A step by the library, and what ends it."""
    its, optimizer = task(job)
    run = init(Method("allreduce", traffic), transport=transport, environ={
        "SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"})
    run.wrap(its.module, optimizer)
    return stepping(lambda: its.loss(1), optimizer), run.close


class Rival:
    """PyTorch's own ways, over gloo between the same ranks."""

    def __init__(self, transport: Transport, job: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self._job = job
        with socket.create_server(("", 0)) as free:
            port = transport.broadcast(free.getsockname()[1])
        dist.init_process_group("gloo", init_method=f"tcp://{job['nodes'][0]}:{port}", rank=transport.rank,
                                world_size=transport.size)
        self._plain: tuple[Any, Any] | None = None

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def alone(self) -> tuple[Step, Step]:
        """No communication at all."""
        its, optimizer = self._shared()
        return stepping(lambda: its.loss(1), optimizer), lambda: None

    def post_local(self) -> tuple[Step, Step]:
        """Steps of its own, and in every LOCAL-th the average of all models.

        T. Lin, S. Stich, K. Patel, M. Jaggi: Don't use large mini-batches, use local SGD. ICLR 2020. arXiv:1808.07217
        """
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        its, optimizer = self._shared()
        averager = PeriodicModelAverager(period=LOCAL, warmup_steps=LOCAL - 1)
        plain = stepping(lambda: its.loss(1), optimizer)

        def step() -> None:
            plain()
            averager.average_parameters(its.module.parameters())

        return step, lambda: None

    def ddp(self) -> tuple[Step, Step]:
        """DistributedDataParallel, with its own buckets and overlap."""
        from torch.nn.parallel import DistributedDataParallel

        its, optimizer = task(self._job)
        model = DistributedDataParallel(its.module)
        return stepping(model, optimizer), lambda: None

    def _shared(self) -> tuple[Any, Any]:
        self._plain = self._plain or task(self._job)
        return self._plain


if __name__ == "__main__":
    main()
