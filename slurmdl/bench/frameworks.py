"""The frameworks that `slurmdl bench run` compares: adapters, or Python files with the members of `Framework`."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from slurmdl import plan
from slurmdl.errors import UsageError
from slurmdl.train.transports.transport import Transport

PERIOD = 4  # steps between two averages of post-local SGD


@dataclass(frozen=True)
class TrainingSession:
    """A model and an optimizer that several ranks train together.

    Attributes:
        module: called with a batch; returns the model's output.
        optimizer: its step() trains the module.
        after_step: communication after each step.
        no_sync: context of a backward pass without communication, which is timed by itself.
        phase_seconds: seconds of the training thread so far, by phase (train.meters.PHASES); None if the
            framework has no meter of its own.
        overlapped_comm: seconds so far in which messages were in flight while the training thread did something else;
            None if the framework does not measure them.
        close: ends the session on all ranks; may return further metrics: `bytes_sent` of all ranks, by locality.
    """

    module: Any
    optimizer: Any
    after_step: Callable[[], None] = lambda: None
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    phase_seconds: Callable[[], Mapping[str, float]] | None = None
    overlapped_comm: Callable[[], float] | None = None
    close: Callable[[], Mapping[str, Any] | None] = lambda: None


class Framework(Protocol):
    """An adapter."""

    #: strategies of the framework, by its own names; the first is the default
    STRATEGIES: tuple[str, ...]

    def unavailable_reason(self) -> str:
        """Return why the framework cannot be used; "" if it can."""

    def setup(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession | None:
        """Start training on all ranks of `transport` (collective); return None on a rank that only served."""


class Slurmdl:
    """The strategies of slurmdl.train through its library; the plan of `slurmdl srun` selects the servers."""

    STRATEGIES: tuple[str, ...] = plan.STRATEGIES

    def unavailable_reason(self) -> str:
        return ""

    def setup(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession | None:
        from slurmdl.train import init

        run = init(transport=transport)
        run.attach(module, optimizer)

        def close() -> Any:
            run.finish()
            return transport.broadcast(run.summary())  # rank 0, which has the summary, may be a server

        if run.is_server:
            run.serve()
            close()
            return None
        return TrainingSession(module, optimizer, phase_seconds=lambda: dict(run.meter.phases),
                               overlapped_comm=lambda: run.meter.overlapped_comm, close=close)


class Ddp:
    """PyTorch's DistributedDataParallel, over NCCL if every rank has a GPU, else over gloo."""

    STRATEGIES: tuple[str, ...] = ("allreduce",)

    def unavailable_reason(self) -> str:
        import torch.distributed as dist

        return "" if dist.is_available() else "this PyTorch has no torch.distributed"

    def setup(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
        from torch.nn.parallel import DistributedDataParallel

        close = init_process_group(transport)
        model = DistributedDataParallel(module)
        return TrainingSession(model, optimizer, no_sync=model.no_sync, close=close)


class PostLocal(Ddp):
    """PyTorch's post-local SGD: local steps, and an average of all models in every 4th step.

    T. Lin, S. Stich, K. Patel, M. Jaggi: Don't use large mini-batches, use local SGD. ICLR 2020. arXiv:1808.07217
    """

    STRATEGIES: tuple[str, ...] = ("local-sgd",)

    def setup(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
        close = init_process_group(transport)
        return TrainingSession(module, optimizer, after_step=model_averaging(module), close=close)


def init_process_group(transport: Transport) -> Any:
    """Create the process group, with NCCL if all ranks have a GPU, else gloo, and return its destructor."""
    import torch
    import torch.distributed as dist

    with_gpus = dist.is_nccl_available() and all(transport.allgather(torch.cuda.is_available()))
    with socket.create_server(("", 0)) as free:  # a port on which rank 0 can listen
        address = transport.broadcast(f"tcp://{socket.gethostname()}:{free.getsockname()[1]}")
    dist.init_process_group("nccl" if with_gpus else "gloo", init_method=address, rank=transport.rank,
                            world_size=transport.size)
    return dist.destroy_process_group


def model_averaging(module: Any) -> Callable[[], None]:
    """Return a function for the end of each step, which averages the models in every PERIOD-th step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    # steps before the first average
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    return lambda: averager.average_parameters(module.parameters())


FRAMEWORKS: dict[str, Framework] = {"slurmdl": Slurmdl(), "ddp": Ddp(), "post-local": PostLocal()}


def load(name: str) -> Framework:
    """Return the framework with this name, or the adapter in this Python file; UsageError if there is none."""
    if name in FRAMEWORKS:
        return FRAMEWORKS[name]
    if not name.endswith(".py"):
        raise UsageError(f"framework {name!r}: unknown; expected {', '.join(FRAMEWORKS)}, or a file NAME.py")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec and spec.loader, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"framework {name}: cannot be loaded ({type(error).__name__}: {error})") from error
    absent = [member for member in ("STRATEGIES", "unavailable_reason", "setup") if not hasattr(module, member)]
    if absent:
        raise UsageError(f"framework {name}: has no {absent[0]}; expected STRATEGIES, unavailable_reason(), setup()")
    return cast(Framework, module)
