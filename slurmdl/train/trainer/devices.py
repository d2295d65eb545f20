"""The device of a rank's model."""

from __future__ import annotations

import argparse
import re
from typing import Any

from slurmdl.errors import InvalidOptionsError


def parse_device(text: str) -> str:
    """Check the form of a device name: auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, cpu, cuda or cuda:N")
    return text


def choose_device(name: str, local_rank: int) -> Any:
    """The torch.device of a name that `parse_device` accepts.

    `cuda` is a GPU for each rank of a node in turn; `auto` is the same if PyTorch sees a GPU, else the CPU. AMD's are
    `cuda`, too (PyTorch documentation, HIP semantics). Raises InvalidOptionsError if there is no such GPU.

    Args:
        local_rank: index of this rank among the ranks of its node.
    """
    import torch

    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise InvalidOptionsError(f"--device {name}: PyTorch {torch.__version__} sees no GPU; expected auto or cpu")
    index = int(name.partition(":")[2] or local_rank % count)
    if index >= count:
        raise InvalidOptionsError(f"--device {name}: no such GPU; expected cuda:0 to cuda:{count - 1}, or auto")
    return torch.device("cuda", index)
