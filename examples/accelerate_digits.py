"""Train with Hugging Face Accelerate and any strategy of slurmdl, one process per rank.

    mpirun -n 2 python examples/accelerate_digits.py
    SLURMDL_TRAIN_STRATEGY=gossip torchrun --nproc-per-node=4 examples/accelerate_digits.py
    slurmdl srun python examples/accelerate_digits.py      (inside a job)

Accelerate sees a single process and does what it does there: devices, mixed precision, gradient accumulation. slurmdl
exchanges gradients or models.
"""

import os

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

from slurmdl.train import init

ACCUMULATION = 2
run = init(backward_passes_per_step=ACCUMULATION)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)  # or Accelerate wraps the model in DistributedDataParallel
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
training, test = slice(0, 1437), slice(1437, None)

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(accelerator.device)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, opt = run.wrap(model, opt)  # parameter servers serve in here and do not return
model, opt = accelerator.prepare(model, opt)

loader = run.loader((images[training], labels[training]), batch_size=16)
for _ in range(loader.epoch, 20):
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch.to(accelerator.device)),
                                                     target.to(accelerator.device))
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()

run.finish()  # all workers now hold the same model
with torch.no_grad():
    accuracy = (model(images[test].to(accelerator.device)).argmax(1).cpu() == labels[test]).float().mean().item()
run.print(f"accuracy {accuracy:.1%}")
