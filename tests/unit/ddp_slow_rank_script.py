"""A plain DistributedDataParallel script for test_slow_rank_runs.py.

Arguments: slow rank, backward passes per step.
"""

import copy
import io
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurmdl.train import watch_slow_ranks

slow_rank, passes = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)


class Network(torch.nn.Module):
    """Sleeps in the forward pass, a slow rank four times as long; has buffers, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.08 if rank == slow_rank else 0.02)
        return self.layers(batch)


torch.manual_seed(1)
network = Network()
model = DistributedDataParallel(network)
watch_slow_ranks(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(105):
    for number in range(passes):
        with nullcontext() if number == passes - 1 else model.no_sync():
            model(torch.ones(4, 8) * (rank + 1)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 0:
        # neither evaluations nor copies of the model count
        with torch.no_grad():
            model(torch.ones(4, 8))
        model.eval()
        model(torch.ones(4, 8)).sum().backward()
        model.train()
        opt.zero_grad()
        copy.deepcopy(network)(torch.ones(4, 8)).sum().backward()
        torch.save(network, io.BytesIO())
# one write, which the lines of other ranks cannot split
sys.stdout.write(f"rank {rank}: {sum(tensor.sum().item() for tensor in network.parameters()):.6f}\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # see examples/ddp.py
