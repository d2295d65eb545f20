"""Scripts of users for test_train_processes.py and test_preemption.py: `library_programs.py NAME ARGUMENTS...`."""

import glob
import importlib
import os
import signal
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slurmdl import comm_layout
from slurmdl.train import init, sync_islands
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import torch_distributed


def fault(kind):
    """A run over a data set, with a fault of one worker, or an unusual end."""
    if kind == "buckets":
        comm_layout.MAX_BUCKET_ELEMENTS = 3  # several buckets in this small model
    if kind == "own-group":
        dist.init_process_group("cuda:gloo")  # like NCCL, it has no messages for the CPU
    run = init()
    if kind == "destroy":
        importlib.import_module("torch.distributed.nn.functional")  # as the first optimizer does, unless fast_start
    torch.manual_seed(run.rank)
    model = torch.nn.Linear(4, 3 if kind == "model" and run.rank == 1 else 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "ddp-inside":
        ddp = torch.nn.parallel.DistributedDataParallel(model)  # noqa: F841 it exists
    if kind == "ddp":
        model = torch.compile(torch.nn.parallel.DistributedDataParallel(model))
    model, opt = run.wrap(model, opt)
    if kind == "ddp-late":
        model = torch.nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 40, backoff_factor=2.0 ** -15, enabled=kind == "float16")
    for step, batch in enumerate(run.loader(torch.ones(40, 4) * torch.arange(40)[:, None] / 40, batch_size=2)):
        if run.worker_rank == 1 and step == 2:
            if kind == "early":
                break
            if kind == "exception":
                raise KeyError("of the user's own")
            if kind == "exit":
                sys.exit(3)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=kind == "float16"):
            loss = model(batch).square().mean() * (float("inf") if kind == "nan" and run.worker_rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if kind == "gather":
            assert run.all_gather_object(step) == [step] * run.worker_count
        if kind == "metrics":
            dist.all_reduce(torch.ones(1))
    assert kind != "float16" or 1 <= scaler.get_scale() < 2.0 ** 40
    if kind == "open":
        list(torch.utils.data.DataLoader([0], num_workers=1))  # its process ends like this one, but is no rank
        return run
    if kind == "destroyed":
        dist.destroy_process_group()
        return run
    run.finish()
    if kind == "alone" and run.worker_rank == 0:
        model(torch.ones(3, 4)).sum().backward()
    if kind == "gather":
        assert run.all_gather_object(run.worker_rank) == list(range(run.worker_count))
    print(f"worker {run.worker_rank}: {run.step} steps, {model.weight.detach().flatten().tolist()}", flush=True)
    if kind == "destroy":
        assert len(run.all_gather_object(run.rank)) == run.worker_count
        dist.destroy_process_group()
        # a thread of gloo that drops a tensor during the shutdown of the interpreter aborts the process
        names = [Path(path).read_text() for path in glob.glob("/proc/self/task/*/comm")]
        assert not [name for name in names if "gloo" in name and "slurmdl" not in name], names
    return run


def passes(kind):
    """Several backward passes per step, or replicas that differ."""
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
        if kind == "checkpoints":
            hidden = checkpoint(first, x.requires_grad_(), use_reentrant=True)
            checkpoint(second, hidden, use_reentrant=True).square().mean().backward()
        else:
            loss = model(x).square().mean()
            loss.backward(inputs=list(second.parameters()), retain_graph=True)
            loss.backward(inputs=list(first.parameters()))
            if kind == "unequal" and run.rank == 0 and step == 1:
                model(x).square().mean().backward()
        if kind == "differs" and run.rank == 1 and step == 2:
            second.bias.data += 1e-3
        opt.step()
    run.finish()
    print(f"worker: {zlib.crc32(run.replica.parameters)} after {run.strategy.exchanges} exchanges", flush=True)
    return run


def step_of(model, opt, x):
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()


def stall(kind, steps="6"):
    """Rank 1 does not answer for a while, or makes a call alone."""
    run = init()
    model = torch.nn.Linear(4, 2)
    model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(int(steps)):
        if step == 3 and run.rank == 1:
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "call":
                run.all_gather_object("only this rank")
            else:
                time.sleep(60 if kind == "sleep" else 4)
        step_of(model, opt, torch.full((3, 4), run.rank + 0.1 * step))
    run.finish()
    print("worker: done", flush=True)
    return run


def long_run(kind):
    """A run that lasts longer than the limits of its process groups.

    Rank 0 evaluates for that long, so that the others wait for it, and no messages arrive meanwhile.
    """
    limit_s = 5  # longer than the ranks, which start together, differ on a busy machine
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.step()  # PyTorch is loaded
    dist.barrier()
    torch_distributed._EXTRA_TIMEOUT_S = limit_s - float(os.environ["SLURMDL_TRAIN_TIMEOUT"])
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=limit_s)
    if kind == "library":
        run = init(StrategyConfig("gossip"))
        model, opt = run.wrap(model, opt)
    else:
        islands = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        run = sync_islands(model, opt, islands[dist.get_rank()], StrategyConfig("local-sgd", period=1))
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            time.sleep(limit_s + 2)
        step_of(model, opt, torch.full((3, 4), dist.get_rank() + 0.1 * step))
    run.finish()
    os.write(1, f"worker: {model.weight.tolist()}\n".encode())
    return run


def two_runs(end):
    """Two runs at a time, over MPI with own messages."""
    runs = [init(StrategyConfig("gossip", asynchronous=True)) for _ in range(2)]
    comm = sys.modules["mpi4py.MPI"].COMM_WORLD if "mpi4py.MPI" in sys.modules else None
    if comm:
        peer, sent, received = 1 - comm.Get_rank(), bytes([7] * 64), bytearray(64)
        sends = [comm.Isend(sent, peer, tag) for tag in range(12)]  # noqa: F841 they exist
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, outputs) for outputs in (2, 3000)]
    opts = [run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
            for run, model in zip(runs, models, strict=True)]
    for _ in range(50):
        for model, opt in zip(models, opts, strict=True):
            step_of(model, opt, torch.ones(2, 4))
    for tag in range(12) if comm else ():
        comm.Recv(received, peer, tag)
        assert received == sent
    for run in runs if end == "finish" else ():
        run.finish()
        assert run.all_gather_object(run.rank) == [0, 1]
    return runs


class Rows(torch.utils.data.Dataset):
    """Row i is i four times."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class NoisyRows(Rows):
    def __getitem__(self, index):
        return torch.randn(4) + index / self.count


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.full((4,), float(index)) for index in range(start, 64, stride))


def loaders():
    """With DataLoader processes batches have the same samples as without them."""
    run = init(check_every=1)
    model = torch.nn.Linear(4, 2)
    model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-6))

    def train(loader):
        seen = []
        for batch in loader:
            step_of(model, opt, batch)
            seen.append(batch[:, 0].tolist())
        return seen

    for data, same_order in ((Rows(61), True), (Stream(), False)):
        alone, helped = (train(run.loader(data, batch_size=4, num_workers=number)) for number in (0, 2))
        if not same_order:
            alone, helped = (sorted(number for batches in run.all_gather_object(seen) for batch in batches
                                    for number in batch) for seen in (alone, helped))
        assert alone == helped, (alone, helped)
    run.finish()
    print("worker: equal", flush=True)
    return run


def train_spawned(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    run = init()
    model = torch.nn.Linear(2, 1)
    run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    print(f"worker: one of {run.worker_count}", flush=True)
    run.finish()


def spawn(port):
    """Two ranks of torch.multiprocessing.spawn with a process group of the script."""
    torch.multiprocessing.spawn(train_spawned, (port,), 2)


def noisy(*signals):
    """State that is hard to restore: dropout, a schedule, random batches of a DataLoader.

    Arguments: RANK@STEP of each signal that a rank sends to itself.
    """
    signal_steps = dict([map(int, word.split("@")) for word in signals])
    run = init()
    torch.manual_seed(run.rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8),
                                torch.nn.Linear(8, 2))
    model, opt = run.wrap(model, torch.optim.Adam(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 10, 0.7)
    run.register_for_checkpointing("schedule", schedule)
    loader = run.loader(NoisyRows(72), batch_size=2)
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
    return run


if __name__ == "__main__":
    kept = globals()[sys.argv[1]](*sys.argv[2:])  # as the variables of a script, until Python ends
