"""Training script for test_rank_failure.py: some ranks are killed while it runs.

Arguments: a directory for the results, and a JSON object with the fields of `method` (StrategyConfig), the number of
`steps`, `kill_steps`: rank -> step in which another rank kills it, and `zones`: a letter for each rank, or "".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from slurmdl.train import init
from slurmdl.train.strategy_config import StrategyConfig

torch.set_num_threads(1)
folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
kill_steps = {int(rank): step for rank, step in case["kill_steps"].items()}
if case["zones"]:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ |= {"SLURMD_NODENAME": f"n{rank}", "SLURM_TOPOLOGY_ADDR": f"{case['zones'][rank]}.n{rank}",
                   "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
run = init(StrategyConfig(**case["method"]))
(folder / f"pid-{run.rank}").write_text(str(os.getpid()))
run.world.transport.barrier()
# the surviving rank that kills the others
workers = run.world.ranks_with_role("worker")
killer = max(set(workers) - set(kill_steps))
torch.manual_seed(1)
module = torch.nn.Linear(50, 20)
opt = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
run.attach(module, opt)
target = torch.randn(50, 20)
random = torch.Generator().manual_seed(run.rank)
if run.is_server:
    run.serve()
for step in range(0 if run.is_server else case["steps"]):
    if step in kill_steps.values():
        (folder / f"at-{step}-{run.rank}").touch()
    for rank in [rank for rank, kill_step in kill_steps.items() if run.rank == killer and kill_step == step]:
        # a server has made its first backup only if all workers have come this far
        while rank not in workers and not all((folder / f"at-{step}-{worker}").exists() for worker in workers):
            time.sleep(0.01)
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
    samples = torch.randn(16, 50, generator=random)
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(module(samples), samples @ target)
    loss.backward()
    opt.step()
run.finish()
np.save(folder / f"model-{run.rank}.npy", run.replica.parameters)
summary = run.summary()
if summary:
    weight = module.weight.detach().T
    distance = float((weight - target).norm() / target.norm())
    (folder / "summary.json").write_text(json.dumps({**summary, "distance": distance, "by": run.rank}))
