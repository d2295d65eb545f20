"""Start of a rank without MPI: the process group of torch.distributed, from the variables of the launcher."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import zlib
from collections.abc import Mapping
from datetime import timedelta

from slurmdl.errors import InvalidRunError, UnavailableError
from slurmdl.text import pluralize
from slurmdl.train.transports.torch_distributed import NO_LIMIT, TorchTransport

#: seconds in which all ranks must have started, and a collective must end, beyond the limit of the watchdog
_EXTRA_TIMEOUT_S = 300.0
#: ports of rank 0 under plain srun, below those of outgoing connections (ip_local_port_range in ip(7))
_FIRST_PORT, _PORT_COUNT = 12_000, 20_000
_PR_SET_PDEATHSIG = 1

_open_transports: list[TorchTransport] = []


def init_torch(environ: Mapping[str, str] = os.environ, wait_limit_s: float = 0.0) -> TorchTransport:
    """Connect to the other ranks by torch.distributed with gloo.

    Rank and world size are RANK and WORLD_SIZE, as torchrun sets them, or SLURM_PROCID and the number of tasks of the
    step. `wait_limit_s` is that of the watchdog, 0 for none. Raises UnavailableError without PyTorch, InvalidRunError
    if the ranks do not find each other.
    """
    try:
        from torch import distributed
    except ImportError as error:
        raise UnavailableError(f"no PyTorch: {error} (needed: pip install 'slurmdl[train]')") from error
    if is_torchrun(environ):
        _end_with_parent()
    timeout, group = collective_timeout(wait_limit_s), None
    if distributed.is_initialized():  # by the script, perhaps for NCCL, and for messages of its own
        group = distributed.new_group(timeout=timeout, backend="gloo")
    else:
        # this module keeps the default group that exists at its import, e.g. by the first optimizer, as a default
        # argument: then the threads of the group do not end with it, and may abort the process (pytorch#190489)
        import torch.distributed.nn.functional  # noqa: F401

        rank, size = rank_and_size(environ)
        address, port = rank_zero_address(environ)
        try:
            if size == 1:
                distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            elif "RANK" in environ and "MASTER_PORT" in environ:
                distributed.init_process_group("gloo", timeout=timeout)  # reads the variables of torchrun
            else:
                distributed.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank,
                                               world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            if "EADDRINUSE" in str(error):
                raise InvalidRunError(
                    f"rank {rank}: another program, perhaps of another user, listens on port {port} of {address}; "
                    "expected a free MASTER_PORT, or `slurmdl srun`") from error
            raise InvalidRunError(f"rank {rank} does not find the other {pluralize(size - 1, 'rank')} by "
                                  f"{address}:{port} ({str(error).splitlines()[0][:150]})") from error
    transport = TorchTransport(group)
    _open_transports.append(transport)
    atexit.register(finalize_process_group if group else _end_process_group)
    return transport


def is_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, perhaps through another launcher."""
    return "TORCHELASTIC_RUN_ID" in environ


def _end_with_parent() -> None:
    """Get SIGTERM when the parent ends, as torchrun does at a signal it does not handle, e.g. SIGUSR1.

    This rank would train on, without a launcher that ends it if another rank fails.

    Reference: prctl(2), PR_SET_PDEATHSIG.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def finalize_process_group() -> None:
    """End the messages of this rank; waits until the others have ended theirs, too."""
    while _open_transports:
        _open_transports.pop().close()


def _end_process_group() -> None:
    """End the messages of this rank, then the process group that this module has made, with its threads."""
    import torch
    from torch import distributed

    transports = tuple(_open_transports)
    finalize_process_group()
    # groups of GPUs are left to the end of the process
    if all(transport.has_ended for transport in transports) and distributed.is_initialized() and \
            not torch.cuda.is_initialized():
        distributed.destroy_process_group()


def collective_timeout(wait_limit_s: float) -> timedelta:
    """Time limit of a collective for a limit of the watchdog, which reports first; 0 for none."""
    return timedelta(seconds=wait_limit_s + _EXTRA_TIMEOUT_S) if wait_limit_s else NO_LIMIT


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of ranks by the variables of torchrun, else of Slurm; (0, 1) without either."""
    # not SLURM_NTASKS, which a batch script has, too
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        rank, size = (environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
    return 0, 1


def rank_zero_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Node and port of rank 0: MASTER_ADDR and MASTER_PORT, else the first node of the step, and a port by its ID."""
    from slurmdl.slurm import hostlist  # imported only when needed

    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    port = environ.get("MASTER_PORT", "")
    nodes = hostlist.expand_hostlist(environ.get("SLURM_STEP_NODELIST", "")) or ["localhost"]
    return (environ.get("MASTER_ADDR") or nodes[0],
            int(port) if port.isdecimal() else _FIRST_PORT + zlib.crc32(step.encode()) % _PORT_COUNT)
