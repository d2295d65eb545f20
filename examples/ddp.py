"""A plain PyTorch DistributedDataParallel script. It does not use slurmdl.

    slurmdl srun python examples/ddp.py      (inside a job, one task per replica)

`slurmdl srun` maps the ranks and sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1437], labels[:1437])

torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

sampler = DistributedSampler(training, seed=1)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for batch, target in DataLoader(training, batch_size=32, sampler=sampler):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        opt.step()

print(f"rank {rank} of {dist.get_world_size()} on {os.environ.get('SLURMD_NODENAME', 'this node')}", flush=True)
if rank == 0:
    with torch.no_grad():
        accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
    print(f"accuracy {accuracy:.1%}", flush=True)

# no rank exits while another may still need it, such as the store of rank 0
dist.barrier()
dist.destroy_process_group()
# PyTorch's gloo threads survive destroy_process_group(). A thread that drops a tensor during interpreter shutdown
# aborts the process, rarely and on busy machines (pytorch#190489): skip the shutdown.
os._exit(0)
