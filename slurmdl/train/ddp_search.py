"""Finds the DistributedDataParallel of a model, which averages gradients in each backward pass."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any


def find_ddp(tensors: Iterable[Any]) -> list[Any]:
    """All DistributedDataParallel that average gradients of these parameters, whichever module the caller has.

    It may be the model, inside of it (torch.compile), or around it (the caller has `ddp.module`).
    """
    distributed = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return []
    from torch.nn.parallel import DistributedDataParallel

    gc.collect()  # not one that the script has dropped
    ids = {id(tensor) for tensor in tensors}
    # not isinstance, which runs code of proxy objects
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)
            and any(id(tensor) in ids for tensor in found.module.parameters())]
