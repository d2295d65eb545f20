"""User script for test_train_scripts.py: two runs at a time, over MPI with own messages; `finish` ends them."""

import sys

import torch

from slurmdl.train import init
from slurmdl.train.strategy_config import StrategyConfig

runs = [init(StrategyConfig("gossip", asynchronous=True)) for _ in range(2)]
comm = sys.modules["mpi4py.MPI"].COMM_WORLD if "mpi4py.MPI" in sys.modules else None
if comm:
    peer, sent, received = 1 - comm.Get_rank(), bytes([7] * 64), bytearray(64)
    sends = [comm.Isend(sent, peer, tag) for tag in range(12)]
torch.manual_seed(0)
models = [torch.nn.Linear(4, outputs) for outputs in (2, 3000)]
opts = [run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
        for run, model in zip(runs, models, strict=True)]
for _ in range(50):
    for model, opt in zip(models, opts, strict=True):
        opt.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        opt.step()
for tag in range(12) if comm else ():
    comm.Recv(received, peer, tag)
    assert received == sent
for run in runs if "finish" in sys.argv else ():
    run.finish()
    assert run.all_gather_object(run.rank) == [0, 1]
