"""User script for test_preemption.py, with state that is hard to restore.

Dropout, a schedule, random batches of a DataLoader. Arguments: RANK@STEP of each signal that a rank sends to itself.
"""

import os
import signal
import sys
import time
import zlib

import torch

from slurmdl.train import init

signal_steps = dict([map(int, word.split("@")) for word in sys.argv[1:]])


class Noisy(torch.utils.data.Dataset):
    """Random samples."""

    def __len__(self):
        return 72

    def __getitem__(self, index):
        return torch.randn(4) + index / 72


run = init()
torch.manual_seed(run.rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8),
                            torch.nn.Linear(8, 2))
opt = torch.optim.Adam(model.parameters(), lr=0.1)
model, opt = run.wrap(model, opt)
schedule = torch.optim.lr_scheduler.StepLR(opt, 10, 0.7)
run.register_for_checkpointing("schedule", schedule)
loader = run.loader(Noisy(), batch_size=2)
for _epoch in range(loader.epoch, 4):
    for batch in loader:
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
        schedule.step()
        time.sleep(0.02)
        if signal_steps.get(run.rank) == run.step:
            os.kill(os.getpid(), signal.SIGUSR1)
run.finish()
flat = torch.cat([tensor.detach().reshape(-1) for tensor in [*model.parameters(), *model.buffers()]])
print(f"worker {run.worker_rank}: {run.step} steps, {zlib.crc32(flat.numpy()):08x}, {schedule.last_epoch}",
      flush=True)
