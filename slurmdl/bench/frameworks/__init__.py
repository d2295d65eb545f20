"""Adapters of the frameworks that `slurmdl bench run` compares: one module each, or any Python file.

An adapter has the members of `Framework`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from slurmdl.errors import UsageError
from slurmdl.train.transports.transport import Transport

#: name -> module
FRAMEWORKS = {name: f"slurmdl.bench.frameworks.{name.replace('-', '_')}" for name in ("slurmdl", "ddp", "post-local")}


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
    """An adapter, which is a module."""

    #: strategies of the framework, by its own names; the first is the default
    STRATEGIES: tuple[str, ...]

    def unavailable_reason(self) -> str:
        """Return why the framework cannot be used; "" if it can."""

    def setup(self, transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession | None:
        """Start training on all ranks of `transport` (collective); return None on a rank that only served."""


def load(name: str) -> Framework:
    """Return the framework with this name, or the adapter in this Python file; UsageError if there is none."""
    if name in FRAMEWORKS:
        return cast(Framework, import_module(FRAMEWORKS[name]))
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
