"""PyTorch's post-local SGD: local steps, and an average of all models in every 4th step.

T. Lin, S. Stich, K. Patel, M. Jaggi: Don't use large mini-batches, use local SGD. ICLR 2020. arXiv:1808.07217
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmdl.bench.frameworks import TrainingSession, ddp
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("local-sgd",)
PERIOD = 4

unavailable_reason = ddp.unavailable_reason


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
    close = ddp.init_process_group(transport)
    return TrainingSession(module, optimizer, after_step=averaging(module), close=close)


def averaging(module: Any) -> Callable[[], None]:
    """Return a function for the end of each step, which averages the models in every PERIOD-th step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    # steps before the first average
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    return lambda: averager.average_parameters(module.parameters())
