"""Ends a worker that waits in a collective of torch.distributed for parameter servers, which would be forever.

Servers do not run the code of the script below `Run.wrap`, so a group that contains one does not complete there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from slurmdl.errors import TrainError
from slurmdl.train.transports.transport import CHECK_INTERVAL_S
from slurmdl.train.world import World

_MODULE = "torch.distributed.distributed_c10d"
_COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list")


def watch(world: World, is_over: Callable[[], bool], on_wait: Callable[[TrainError], None]) -> None:
    """Look at the calls of all threads until the run is over, and call `on_wait` with an error if one waits so."""
    servers = set(world.ranks_with_role("ps"))

    def run() -> None:
        while not is_over():
            time.sleep(CHECK_INTERVAL_S)
            for frame in sys._current_frames().values():
                name, ranks = _collective_of(frame)
                if servers & ranks and not is_over():  # then the servers end, too
                    on_wait(TrainError(
                        f"torch.distributed.{name}() waits for {world.format_rank(min(servers & ranks))}, a "
                        "parameter server, which does not run the script; expected run.all_gather_object(), or a "
                        "group of the workers, made by new_group() before run.wrap()"))
                    return
    threading.Thread(target=run, daemon=True).start()


def _collective_of(frame: FrameType | None) -> tuple[str, set[int]]:
    """Name and ranks of the collective that a thread of the script calls; ("", set()) without one."""
    call: FrameType | None = None
    while frame:
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name in _COLLECTIVES:
            call = frame
        elif call and str(frame.f_globals.get("__name__")).startswith("slurmdl."):
            return "", set()
        frame = frame.f_back
    return (call.f_code.co_name, _ranks_of(call.f_locals.get("group"))) if call else ("", set())


def _ranks_of(group: Any) -> set[int]:
    distributed = sys.modules["torch.distributed"]
    if not hasattr(distributed, "get_process_group_ranks"):  # PyTorch before 2.0
        return set() if group else set(range(distributed.get_world_size()))
    return set(distributed.get_process_group_ranks(group or distributed.group.WORLD))
