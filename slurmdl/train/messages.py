"""Messages between ranks, point to point, with a meter of bytes by level and of time.

Training data moves by these messages alone, never by a library's collective: only so is it known which
bytes crossed which link.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.transports.transport import Transport

FloatArray = npt.NDArray[np.float32]

#: how far a message goes: within the node, to another node of the zone, to another zone
LEVELS = ("node", "zone", "across")

#: elements in one chunk of a streamed message (1 MiB)
CHUNK = 1 << 18


class Messages:
    """The messages of one rank.

    Parameters
    ----------
    levels : entry i is the level, one of LEVELS, of a message from this rank to rank i.

    Attributes
    ----------
    sent : level -> payload bytes sent by this rank.
    seconds : time spent in posting messages and in waiting for them.
    """

    def __init__(self, transport: Transport, levels: Sequence[str]) -> None:
        self.transport = transport
        self._levels = tuple(levels)
        self.rank = transport.rank
        self.sent = dict.fromkeys(LEVELS, 0)
        self.seconds = 0.0

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], tag: int = 0) -> None:
        """Send and receive contiguous arrays (peer, array), all at once, and wait until all are done."""
        start = time.perf_counter()
        requests = [self.transport.receive(peer, array, tag) for peer, array in receives]
        requests += [self.send(peer, array, tag) for peer, array in sends]
        self.transport.wait(requests)
        self.seconds += time.perf_counter() - start

    def stream(self, sends: Sequence[tuple[int, FloatArray]],
               receives: Sequence[tuple[int, FloatArray]]) -> Iterator[tuple[int, slice]]:
        """Send and receive contiguous arrays (peer, array), all at once, in chunks.

        Yields the index in `receives` and the slice of each chunk received, when it is there: what the caller does
        with a chunk overlaps with the transfer of the next ones. Of several arrays between the same two ranks both
        name them in the same order.
        """
        start = time.perf_counter()
        arriving = [(index, part, self.transport.receive(peer, array[part]))
                    for index, (peer, array) in enumerate(receives) for part in _chunks(array.size)]
        leaving = [self.send(peer, array[part]) for peer, array in sends for part in _chunks(array.size)]
        for index, part, request in arriving:
            self.transport.wait([request])
            self.seconds += time.perf_counter() - start
            yield index, part
            start = time.perf_counter()
        self.transport.wait(leaving)
        self.seconds += time.perf_counter() - start

    def send(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Begin to send an array, as Transport.send, and count its bytes."""
        self.sent[self._levels[peer]] += array.nbytes
        return self.transport.send(peer, array, tag)


def bounds(size: int, parts: int) -> list[int]:
    """Where `parts` nearly equal parts of `size` elements begin; the last entry is `size`."""
    return [size * part // parts for part in range(parts + 1)]


def _chunks(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]
