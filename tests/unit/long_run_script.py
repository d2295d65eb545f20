"""A run that lasts longer than the limits of its process groups: `long_run_script.py library|outer`, under torchrun.

Rank 0 evaluates for that long, so that the others wait for it, and all listen for messages that nobody sends.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmdl.train import init, outer
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import torch_distributed

#: of the groups; longer than the ranks, which start together, differ on a busy machine
LIMIT_S = 5
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.step()  # PyTorch is loaded
dist.barrier()
torch_distributed._EXTRA_TIMEOUT_S = LIMIT_S - float(os.environ["SLURMDL_TRAIN_TIMEOUT"])
dist.distributed_c10d.default_pg_timeout = timedelta(seconds=LIMIT_S)
if sys.argv[1] == "library":
    run = init(StrategyConfig("gossip"))
    model, opt = run.wrap(model, opt)
else:
    islands = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    run = outer(model, opt, islands[dist.get_rank()], StrategyConfig("local-sgd", period=1))
for step in range(4):
    if step == 2 and dist.get_rank() == 0:
        time.sleep(LIMIT_S + 2)
    opt.zero_grad()
    model(torch.full((3, 4), dist.get_rank() + 0.1 * step)).sum().backward()
    opt.step()
run.finish()
os.write(1, f"done {model.weight.tolist()}\n".encode())
