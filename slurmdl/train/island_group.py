"""Islands of a script on torch.distributed: groups of ranks that DistributedDataParallel or FSDP2 keeps together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InvalidRunError, TrainError, UnavailableError
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library import startup
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies.strategy import DeviceCopies, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig, run_options
from slurmdl.train.transports.torch_distributed import TorchTransport, collective_timeout
from slurmdl.train.world import message_levels, node_name, zone_path


class IslandGroup:
    """This rank's island and its messages to others. Collective over all ranks.

    Raises UnavailableError without torch.distributed, and InvalidRunError on all ranks unless the groups have the
    same size, each rank is in one of them, and `contents` of the ranks at the same position are equal.

    Args:
        caller: function that the user called, for errors.
        group: process group of this rank's island.
        contents: description of what this rank exchanges with its peers.
        expected: what makes the contents equal, for errors.

    Attributes:
        islands: global ranks of each island, in the order of their first ranks.
        group: process group of this rank's island.
        position: this rank's index in its island.
        size: ranks of an island.
        peers: the ranks at this position in all islands.
        p2p: messages of this rank; `p2p.bytes_sent` counts their bytes by distance.
        comm_thread: thread that exchanges messages.
    """

    def __init__(self, caller: str, group: Any, contents: object, expected: str) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError(f"{caller}(): torch.distributed is not initialized; expected init_process_group() "
                                   "before")
        # a group of its own: the messages of the framework stay as they are, and gloo leaves GPUs alone
        limit_s = run_options(os.environ).timeout
        self._transport = TorchTransport(dist.new_group(timeout=collective_timeout(limit_s), backend="gloo"))
        startup.watch_waits(self._transport, limit_s)
        self.group, own_ranks = group, tuple(dist.get_process_group_ranks(group))
        places = self._transport.allgather((own_ranks, contents, node_name(), "".join(zone_path()[-1:])))
        self.islands = _islands(caller, [place[0] for place in places])
        self.position, self.size = own_ranks.index(self._transport.rank), len(own_ranks)
        self.peers = tuple(island[self.position] for island in self.islands)
        for peer in self.peers:
            if places[peer][1] != places[self.peers[0]][1]:
                raise InvalidRunError(f"{caller}(): ranks {self.peers[0]} and {peer} do not exchange the same; "
                                      f"expected {expected}")
        self._nodes, self._zones = (tuple(place[index] for place in places) for index in (2, 3))
        self.p2p = MeteredP2P(self._transport, message_levels(self._transport.rank, self._nodes, self._zones))
        self.comm_thread = CommThread(True)

    def context(self, vector: npt.NDArray[np.float32], config: StrategyConfig, seed: int,
                learning_rate: Callable[[], float] = float, device_copies: DeviceCopies | None = None,
                ) -> StrategyContext:
        """Context of exchanges of `vector`, shape (elements,), with the peers."""
        return StrategyContext(
            self.p2p, self.comm_thread, self.peers, (), vector, np.empty(0, np.float32), (vector.size,), config, seed,
            self._nodes, self._zones, {}, learning_rate, _no_servers, device_copies=device_copies or DeviceCopies())

    def gather(self, part: Any) -> Any:
        """Concatenate the parts of the island's ranks, one-dimensional tensors of equal size. Collective in it."""
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.clone(), group=self.group)
        return torch.cat(parts)

    def close(self) -> None:
        """End the exchanges. Collective over all ranks."""
        self.comm_thread.close()
        self._transport.close()


def _islands(caller: str, group_of_rank: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The distinct groups, in the order of their first ranks.

    Raises InvalidRunError unless they have the same size, and each rank is in one of them.
    """
    islands = sorted(set(group_of_rank))
    members = sorted(rank for island in islands for rank in island)
    if members != list(range(len(group_of_rank))) or len({len(island) for island in islands}) != 1:
        raise InvalidRunError(f"{caller}(): groups of the ranks {', '.join(map(str, islands))}; expected groups of "
                              f"equal size that divide the ranks 0 to {len(group_of_rank) - 1}")
    return islands


def _no_servers(part: slice) -> NoReturn:
    raise TrainError("these exchanges have no parameter servers")
