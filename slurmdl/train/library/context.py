"""State that the parts of a run share: an immutable context and a few counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.replica import Replica
from slurmdl.train.meters import StepMeter
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.world import World

if TYPE_CHECKING:
    from slurmdl.train.library.loader import Loader
    from slurmdl.train.library.stream_loader import StreamLoader


@dataclass(frozen=True)
class RunContext:
    """Objects of one rank that exist from `Run.attach` to the end of the run.

    `device_backend` : see StrategyContext.
    """

    world: World
    p2p: MeteredP2P
    comm_thread: CommThread
    replica: Replica
    model: Any
    optimizer: Any
    meter: StepMeter
    device_backend: str

    def all_gather_object(self, obj: Any, on_poll: Callable[[], None] | None = None) -> list[Any]:
        """Gather an object from all ranks, in rank order; for `on_poll` see Transport.barrier. Collective."""
        transport = self.world.transport

        def op() -> list[Any]:
            transport.barrier(on_poll)  # gathering calls no `on_poll`
            return transport.allgather(obj)
        return list(self.comm_thread.call(op))


@dataclass
class RunState:
    """Counters of one rank.

    Attributes:
        step: optimizer steps made, including those before a checkpoint.
        first_step, last_checkpoint_check: step at which this process started, and of the last checkpoint opportunity.
        batch_size: samples per worker and step; 0 if unknown.
        closed: whether the summary was made, or the run was stopped.
    """

    step: int = 0
    first_step: int = 0
    last_checkpoint_check: int = 0
    batch_size: int = 0
    finished: bool = False
    closed: bool = False
    loaders: list[Loader | StreamLoader] = field(default_factory=list)
