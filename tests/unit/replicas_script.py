"""User script for test_train_replicas.py; the argument selects how ranks differ."""

import sys
import zlib

import torch
from torch.utils.checkpoint import checkpoint

from slurmdl import comm_layout
from slurmdl.train import init

case = sys.argv[1]
comm_layout.MAX_BUCKET_ELEMENTS = 3  # several buckets in this small model
run = init()
torch.manual_seed(1)
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
model = torch.nn.Sequential(first, second)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run.wrap(model, opt)
for step in range(6):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + run.rank))
    opt.zero_grad()
    if case == "checkpoints":
        hidden = checkpoint(first, x.requires_grad_(), use_reentrant=True)
        checkpoint(second, hidden, use_reentrant=True).square().mean().backward()
    else:
        loss = model(x).square().mean()
        loss.backward(inputs=list(second.parameters()), retain_graph=True)
        loss.backward(inputs=list(first.parameters()))
        if case == "passes" and run.rank == 0 and step == 1:
            model(x).square().mean().backward()
    if case == "differs" and run.rank == 1 and step == 2:
        second.bias.data += 1e-3
    opt.step()
run.finish()
print(f"worker {run.worker_rank}: {zlib.crc32(run.replica.parameters)} after {run.strategy.exchanges} exchanges",
      flush=True)
