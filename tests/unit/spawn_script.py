"""Two ranks of torch.multiprocessing.spawn with a process group of the script; each prints its rank."""

import sys

import torch

from slurmdl.train import init


def train(rank, port):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    run = init()
    model = torch.nn.Linear(2, 1)
    run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    print(f"rank {run.rank} of {run.worker_count}", flush=True)
    run.finish()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), 2)
