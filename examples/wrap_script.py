"""Train a small network on handwritten digits with any strategy, from a PyTorch script.

    mpirun -n 2 python examples/wrap_script.py
    SLURMDL_TRAIN_STRATEGY=gossip mpirun -n 4 python examples/wrap_script.py
    slurmdl srun python examples/wrap_script.py      (inside a job; `#DL --dl-strategy` sets the strategy)

Only four lines differ from plain PyTorch: init, wrap, loader and finish. With SLURMDL_TRAIN_CHECKPOINT_DIR=DIR a
restarted script resumes from its last checkpoint.
"""

import torch
from sklearn.datasets import load_digits

from slurmdl.train import init

run = init()

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
training, test = slice(0, 1437), slice(1437, None)

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, opt = run.wrap(model, opt)  # parameter servers serve in here and do not return

loader = run.loader((images[training], labels[training]), batch_size=32)
for epoch in range(loader.epoch, 20):
    for batch, target in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        opt.step()
    run.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

run.finish()  # all workers now hold the same model
with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
run.print(f"accuracy {accuracy:.1%}")
