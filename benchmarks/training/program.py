"""One rank of a training whose result one process can compute, too: `python -m benchmarks.training.program FILE`.

The workers' batches of a step are together the batch of the one process. Writes the final parameters to FILE.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from slurmdl.train import init

STEPS, BATCH, FEATURES, CLASSES = 50, 48, 32, 10


def make_model() -> tuple[Any, Any]:
    """A network and plain SGD: averaging models after each step is then averaging gradients."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.2)


def train_step(model: Any, opt: Any, step: int, samples: slice) -> None:
    """One step on some samples of its batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x[samples]), y[samples]).backward()
    opt.step()


def flat(model: Any) -> Any:
    """All parameters, shape (D,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]).numpy()


def one_process() -> Any:
    """Final parameters of one process."""
    model, opt = make_model()
    for step in range(STEPS):
        train_step(model, opt, step, slice(None))
    return flat(model)


def train_rank(run: Any, same_samples: bool = False) -> Any:
    """Final parameters of one rank, None of a server; with `same_samples` all workers compute the first one's."""
    model, opt = make_model()
    run.attach(model, opt)
    if run.is_server:
        run.serve()
        run.close()
        return None
    size = BATCH // run.worker_count
    start = 0 if same_samples else run.worker_rank * size
    for step in range(STEPS):
        train_step(model, opt, step, slice(start, start + size))
    run.finish()
    run.close()
    return flat(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = init(check_every=0)
    result = train_rank(rank, "same" in sys.argv[2:])
    if rank.is_main:
        np.save(sys.argv[1], result)
