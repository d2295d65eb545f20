"""User script for test_watchdog.py: `stall_script.py CASE`."""

import os
import signal
import sys
import time

import torch

from slurmdl.train import init

case = sys.argv[1]
run = init()
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = run.wrap(model, opt)
for step in range(int(sys.argv[2]) if len(sys.argv) > 2 else 6):
    if step == 3 and run.rank == 1:
        if case == "sleep":
            time.sleep(60)
        elif case == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif case == "late":
            time.sleep(4)
        elif case == "call":
            run.all_gather_object("only this rank")
    opt.zero_grad()
    model(torch.full((3, 4), run.rank + 0.1 * step)).sum().backward()
    opt.step()
run.finish()
print(f"rank {run.rank} done", flush=True)
