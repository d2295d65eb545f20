"""PyTorch's post-local SGD: steps of each rank's own, and in every 4th the average of all models.

T. Lin, S. Stich, K. Patel, M. Jaggi: Don't use large mini-batches, use local SGD. ICLR 2020. arXiv:1808.07217
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmdl.bench.frameworks import ddp
from slurmdl.bench.frameworks.framework import Training
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("local-sgd",)
#: steps from one average to the next
PERIOD = 4

missing = ddp.missing


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    close = ddp.join(transport)
    return Training(module, optimizer, after=averaging(module), close=close)


def averaging(module: Any) -> Callable[[], None]:
    """What follows each step, once the process group is there: nothing, and in every PERIOD-th the average."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    # its warm-up is steps without an average
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    return lambda: averager.average_parameters(module.parameters())
