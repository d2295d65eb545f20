"""PyTorch's post-local SGD: steps of each rank's own, and in every 4th the average of all models.

T. Lin, S. Stich, K. Patel, M. Jaggi: Don't use large mini-batches, use local SGD. ICLR 2020. arXiv:1808.07217
"""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import ddp
from slurmdl.bench.frameworks.framework import Training
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("local-sgd",)
#: steps from one average to the next, and of the beginning, in which all are averaged
PERIOD, WARM_UP = 4, 4

missing = ddp.missing


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    close = ddp.join(transport)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP)
    return Training(module, optimizer, after=lambda: averager.average_parameters(module.parameters()), close=close)
