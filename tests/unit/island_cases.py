"""What scripts share that run one case after the other on two islands of two ranks, under torchrun."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_islands() -> DeviceMesh:
    """The ranks, with the dimensions `islands` and `inside`."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("islands", "inside"))


def run_cases(train: Callable[[str], Any]) -> NoReturn:
    """Train the cases of the command line; rank 0 prints a line with each case and the results of all ranks."""
    for case in sys.argv[1:]:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, train(case))
        dist.barrier()
        if dist.get_rank() == 0:
            print((case, results), flush=True)
    os._exit(0)


def end_with_error(error: Exception) -> NoReturn:
    """Print an error on each rank, in one write: they share an unbuffered stdout, and print writes twice."""
    os.write(1, f"{type(error).__name__}: {error}\n".encode())
    os._exit(0)
