"""Where the generators of random numbers stand that scripts use without making them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def get_rng_state() -> dict[str, Any]:
    """Of all of them, as numbers, words and tensors; those of GPUs where there are some in use."""
    import torch

    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "torch": torch.get_rng_state(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def set_rng_state(rng_state: Mapping[str, Any]) -> None:
    """Let them go on from a state."""
    import torch

    kind, keys, *rest = rng_state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(rng_state["python"])
    torch.set_rng_state(rng_state["torch"])
    if rng_state["cuda"]:
        torch.cuda.set_rng_state_all(rng_state["cuda"])
