"""Messages between ranks, point to point, with a meter of bytes by level and of waiting.

Training data moves by these messages alone, never by a library's collective, unless that was asked for: only so is
it known which bytes crossed which link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.transports.transport import Transport

FloatArray = npt.NDArray[np.float32]

#: an algorithm of messages that can stop on its way: again and again it gives the requests that must be done before
#: it can go on, and whether they are the first that come of an exchange, of which nothing may be there yet
Flow = Iterator[tuple[Sequence[Any], bool]]

#: how far a message goes: within the node, to another node of the zone, to another zone
LEVELS = ("node", "zone", "across")

#: bytes in one chunk of a streamed message, by how far it goes: so few that the work on one hides behind the way of
#: the next, so many that a message's own cost does not count. Open MPI is told to send as many at once
#: (runtime.connect). Between zones they are fewer, and below its own limit of 64 KiB: on slow links that several
#: pairs share gossip is quicker so
CHUNK = {"node": 1 << 20, "zone": 1 << 20, "across": 60_000}
#: bytes of an array that is sent before the other rank is known to be there; see `invited`
UNINVITED = 60_000


class Messages:
    """The messages of one rank.

    Parameters
    ----------
    levels : entry i is the level, one of LEVELS, of a message from this rank to rank i.

    Attributes
    ----------
    sent : level -> payload bytes sent by this rank.
    """

    def __init__(self, transport: Transport, levels: Sequence[str]) -> None:
        self.transport = transport
        self._levels = tuple(levels)
        self.rank = transport.rank
        self.sent = dict.fromkeys(LEVELS, 0)
        self._waited, self._since = 0.0, math.inf

    def waited(self) -> float:
        """How long, until now, nothing was there yet of what was expected next, in s."""
        return self._waited + max(self.transport.now() - self._since, 0.0)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], tag: int = 0) -> None:
        """Send and receive contiguous arrays (peer, array), all at once, and wait until all are done."""
        requests = [self.transport.receive(peer, array, tag) for peer, array in receives]
        leaving = [self.send(peer, array, tag) for peer, array in sends]
        self._await_first(requests[:1])
        self.transport.wait(requests + leaving)

    def invited(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
                receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """Before an exchange: wait until those who are to be sent more than UNINVITED bytes are there for it.

        A message leaves when its sender is ready, and takes its share of the links from those that are still under
        way, although nobody waits for it yet. All ranks of the exchange call this, with the same arrays.
        """
        nothing = np.empty(0, np.uint8)
        self.exchange([(peer, nothing) for peer, array in receives if array.nbytes > UNINVITED],
                      [(peer, nothing) for peer, array in sends if array.nbytes > UNINVITED])

    def post(self, sends: Sequence[tuple[int, npt.NDArray[Any]]], receives: Sequence[tuple[int, npt.NDArray[Any]]],
             tag: int = 0) -> tuple[list[tuple[int, slice, Any]], list[Any]]:
        """Begin to send and receive contiguous arrays (peer, array), all at once, in chunks.

        Of several arrays between the same two ranks with the same tag both name them in the same order.

        Returns
        -------
        For each chunk to come, in its order, the index in `receives`, the slice and the request; and the requests of
        what goes.
        """
        arriving = [(index, part, self.transport.receive(peer, array[part], tag))
                    for index, (peer, array) in enumerate(receives) for part in self._chunks(peer, array)]
        leaving = [self.send(peer, array[part], tag) for peer, array in sends for part in self._chunks(peer, array)]
        return arriving, leaving

    def stream(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
               receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> Iterator[tuple[int, slice]]:
        """Send and receive contiguous arrays (peer, array), all at once, in chunks.

        Yields the index in `receives` and the slice of each chunk received, when it is there: what the caller does
        with a chunk overlaps with the transfer of the next ones. For the order see `post`.
        """
        arriving, leaving = self.post(sends, receives)
        self._await_first([request for _, _, request in arriving[:1]])
        for index, part, request in arriving:
            self.transport.wait([request])
            yield index, part
        self.transport.wait(leaving)

    def swap(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
             receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """As `stream`, for those who need the arrays only when they are whole."""
        for _ in self.stream(sends, receives):
            pass

    def follow(self, flow: Flow) -> None:
        """Carry on a flow to its end."""
        for requests, first in flow:
            if first:
                self._await_first(requests)
            else:
                self.transport.wait(requests)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Around what only waits for another rank: counts as waited."""
        self._since = begun = self.transport.now()
        try:
            yield
        finally:
            self._since = math.inf
            self._waited += self.transport.now() - begun

    def _await_first(self, requests: Sequence[Any]) -> None:
        if requests:
            with self.awaiting():
                self.transport.wait(requests)

    def _chunks(self, peer: int, array: npt.NDArray[Any]) -> list[slice]:
        length = CHUNK[self._levels[peer]] // array.itemsize
        return [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]

    def total(self, vector: FloatArray) -> None:
        """Replace a vector by its sum over all ranks, by the library's own call.

        What the library sends to whom it does not tell: counted is what a ring sends, which is the least there can
        be, 2 (n - 1) / n of the vector to the next rank.
        """
        count = self.transport.size
        self.transport.total(vector)
        self.sent[self._levels[(self.rank + 1) % count]] += 2 * vector.nbytes * (count - 1) // count

    def send(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Begin to send an array, as Transport.send, and count its bytes."""
        self.sent[self._levels[peer]] += array.nbytes
        return self.transport.send(peer, array, tag)


def bounds(size: int, parts: int) -> list[int]:
    """Where `parts` nearly equal parts of `size` elements begin; the last entry is `size`."""
    return [size * part // parts for part in range(parts + 1)]
