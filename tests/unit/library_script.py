"""User script for test_train_scripts.py; the argument selects a fault of one worker."""

import glob
import sys
from pathlib import Path

import torch

from slurmdl import comm_layout
from slurmdl.train import init

fault = sys.argv[1]
if fault == "buckets":
    comm_layout.MAX_BUCKET_ELEMENTS = 3  # several buckets in this small model
if fault == "own-group":
    torch.distributed.init_process_group("cuda:gloo")  # like NCCL, it has no messages for the CPU
run = init()
if fault == "destroy":
    import torch.distributed.nn.functional  # as the first optimizer does, except with fast_start
torch.manual_seed(run.rank)
model = torch.nn.Linear(4, 3 if fault == "model" and run.rank == 1 else 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if fault == "ddp-inside":
    ddp = torch.nn.parallel.DistributedDataParallel(model)
if fault == "ddp":
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(model))
model, opt = run.wrap(model, opt)
if fault == "ddp-late":
    model = torch.nn.parallel.DistributedDataParallel(model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 40, backoff_factor=2.0 ** -15, enabled=fault == "float16")
for step, batch in enumerate(run.loader(torch.ones(40, 4) * torch.arange(40)[:, None] / 40, batch_size=2)):
    if run.worker_rank == 1 and step == 2:
        if fault == "early":
            break
        if fault == "exception":
            raise KeyError("of the user's own")
        if fault == "exit":
            sys.exit(3)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=fault == "float16"):
        loss = model(batch).square().mean() * (float("inf") if fault == "nan" and run.worker_rank == 1 else 1)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if fault == "gather":
        assert run.all_gather_object(step) == [step] * run.worker_count
    if fault == "metrics":
        torch.distributed.all_reduce(torch.ones(1))
if fault == "float16":
    print(f"scale {scaler.get_scale()}", flush=True)
if fault == "open":
    list(torch.utils.data.DataLoader([0], num_workers=1))  # its process ends like this one, but is no rank
elif fault == "destroyed":
    torch.distributed.destroy_process_group()
else:
    run.finish()
    if fault == "alone" and run.worker_rank == 0:
        model(torch.ones(3, 4)).sum().backward()
    if fault == "gather":
        assert run.all_gather_object(run.worker_rank) == list(range(run.worker_count))
    print(f"worker {run.worker_rank}: {run.step} steps, {model.weight.detach().flatten().tolist()}", flush=True)
    if fault == "destroy":
        assert len(run.all_gather_object(run.rank)) == run.worker_count
        torch.distributed.destroy_process_group()
        # a thread of gloo that drops a tensor during the shutdown of the interpreter aborts the process
        names = [Path(path).read_text() for path in glob.glob("/proc/self/task/*/comm")]
        assert not [name for name in names if "gloo" in name and "slurmdl" not in name], names
