"""What a framework is to the bench: how it joins the ranks, and what it makes of a model and its optimizer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from slurmdl.train.transports.transport import Transport


@dataclass(frozen=True)
class Training:
    """A model that is trained by several ranks.

    Attributes
    ----------
    module : what is called with a batch.
    optimizer : whose steps train it.
    after : communication that follows each step.
    apart : around a backward pass without communication, so that it can be timed by itself.
    phases : seconds that the training thread has spent so far, by phase (train.report.meters.PHASES); None where the
        framework does not meter itself.
    hidden : seconds so far in which messages were on their way while the training thread did something else; None
        where the framework does not tell.
    close : ends it on all ranks, and gives what else it knows: `bytes` by level, of all ranks.
    """

    module: Any
    optimizer: Any
    after: Callable[[], None] = lambda: None
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    phases: Callable[[], Mapping[str, float]] | None = None
    hidden: Callable[[], float] | None = None
    close: Callable[[], Mapping[str, Any]] = dict


class Framework(Protocol):
    """A module.

    Attributes
    ----------
    STRATEGIES : what it can do, in words of its own; the first is the default.
    """

    STRATEGIES: tuple[str, ...]

    def missing(self) -> str:
        """What is not installed, "" where nothing is missing."""

    def start(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training | None:
        """A call of all ranks, which can talk by `transport`; None on a rank that only serves, once it has ended."""


def missing_module(name: str, title: str) -> str:
    """Why a framework cannot be used, "" where its module can be imported."""
    try:
        import_module(name)
    except ImportError as error:
        return f"{title} is not installed ({error})"
    return ""


def rendezvous(transport: Transport) -> str:
    """An address where rank 0 can listen, for frameworks that meet by TCP; the same on all ranks."""
    with socket.create_server(("", 0)) as free:
        return str(transport.broadcast(f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"))
