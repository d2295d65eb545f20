"""State that the parts of a run share: an immutable context, a few counters, and the positions of loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmdl.train.library.replica import Replica
from slurmdl.train.meters import StepMeter
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.world import World


@dataclass(frozen=True)
class Context:
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


class EpochPosition:
    """Position of a loader, for checkpoints.

    Attributes:
        epoch: number of the next epoch; incremented by each iteration.
    """

    def __init__(self) -> None:
        self.epoch = self._cursor = 0
        self._position, self._restored = (0, 0), False

    def state_dict(self) -> dict[str, int]:
        """The epoch, and its `cursor`, the number of its samples assigned to all workers so far.

        With --load-balance and --async it is exact on the first worker only.
        """
        return dict(zip(("epoch", "cursor"), self._position, strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position with the next iteration; the number of workers may have changed."""
        self._position = self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._restored = True

    def _start_epoch(self) -> tuple[int, int, bool]:
        """Return an epoch's number, the cursor to start from, and whether this is a restored position."""
        started = self.epoch, self._cursor, self._restored
        # the previous iteration need not have passed its last batch: Lightning counts batches
        self._position = started[:2]
        self.epoch, self._cursor, self._restored = self.epoch + 1, 0, False
        return started


@dataclass
class Counters:
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
    loaders: list[EpochPosition] = field(default_factory=list)
