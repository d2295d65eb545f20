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
CommCoroutine = Iterator[tuple[Sequence[Any], bool]]

#: how far a message goes: within the node, to another node of the zone, to another zone
LOCALITY_LEVELS = ("intra_node", "intra_zone", "inter_zone")

#: bytes in one chunk of a streamed message, by how far it goes: so few that the work on one hides behind the way of
#: the next, so many that a message's own cost does not count. Open MPI is told to send as many at once
#: (runtime.connect). Between zones they are fewer, and below its own limit of 64 KiB: on slow links that several
#: pairs share gossip is quicker so
CHUNK_BYTES = {"intra_node": 1 << 20, "intra_zone": 1 << 20, "inter_zone": 60_000}
#: bytes of an array that is sent before the other rank is known to be there; see `invited`
EAGER_MAX_BYTES = 60_000


class MeteredP2P:
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
        self.bytes_sent = dict.fromkeys(LOCALITY_LEVELS, 0)
        self._peer_wait, self._wait_start = 0.0, math.inf

    def peer_wait_seconds(self) -> float:
        """How long, until now, nothing was there yet of what was expected next, in s."""
        return self._peer_wait + max(self.transport.now() - self._wait_start, 0.0)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], tag: int = 0) -> None:
        """Send and receive contiguous arrays (peer, array), all at once, and wait until all are done."""
        requests = [self.transport.irecv(peer, array, tag) for peer, array in receives]
        leaving = [self.isend(peer, array, tag) for peer, array in sends]
        self._wait_first_chunk(requests[:1])
        self.transport.waitall(requests + leaving)

    def rendezvous_handshake(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
                receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """Before an exchange: wait until those who are to be sent more than UNINVITED bytes are there for it.

        A message leaves when its sender is ready, and takes its share of the links from those that are still under
        way, although nobody waits for it yet. All ranks of the exchange call this, with the same arrays.
        """
        nothing = np.empty(0, np.uint8)
        self.exchange([(peer, nothing) for peer, array in receives if array.nbytes > EAGER_MAX_BYTES],
                      [(peer, nothing) for peer, array in sends if array.nbytes > EAGER_MAX_BYTES])

    def post(self, sends: Sequence[tuple[int, npt.NDArray[Any]]], receives: Sequence[tuple[int, npt.NDArray[Any]]],
             tag: int = 0) -> tuple[list[tuple[int, slice, Any]], list[Any]]:
        """Begin to send and receive contiguous arrays (peer, array), all at once, in chunks.

        Of several arrays between the same two ranks with the same tag both name them in the same order.

        Returns
        -------
        For each chunk to come, in its order, the index in `receives`, the slice and the request; and the requests of
        what goes.
        """
        arriving = [(index, part, self.transport.irecv(peer, array[part], tag))
                    for index, (peer, array) in enumerate(receives) for part in self._chunk_slices(peer, array)]
        leaving = [self.isend(peer, array[part], tag)
                              for peer, array in sends for part in self._chunk_slices(peer, array)]
        return arriving, leaving

    def iter_chunks(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
               receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> Iterator[tuple[int, slice]]:
        """Send and receive contiguous arrays (peer, array), all at once, in chunks.

        Yields the index in `receives` and the slice of each chunk received, when it is there: what the caller does
        with a chunk overlaps with the transfer of the next ones. For the order see `post`.
        """
        arriving, leaving = self.post(sends, receives)
        self._wait_first_chunk([request for _, _, request in arriving[:1]])
        for index, part, request in arriving:
            self.transport.waitall([request])
            yield index, part
        self.transport.waitall(leaving)

    def exchange_chunked(self, sends: Sequence[tuple[int, npt.NDArray[Any]]],
             receives: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """As `stream`, for those who need the arrays only when they are whole."""
        for _ in self.iter_chunks(sends, receives):
            pass

    def run_to_completion(self, coroutine: CommCoroutine) -> None:
        """Carry on a flow to its end."""
        for requests, first in coroutine:
            if first:
                self._wait_first_chunk(requests)
            else:
                self.transport.waitall(requests)

    @contextmanager
    def timing_wait(self) -> Iterator[None]:
        """Around what only waits for another rank: counts as waited."""
        self._wait_start = begun = self.transport.now()
        try:
            yield
        finally:
            self._wait_start = math.inf
            self._peer_wait += self.transport.now() - begun

    def _wait_first_chunk(self, requests: Sequence[Any]) -> None:
        if requests:
            with self.timing_wait():
                self.transport.waitall(requests)

    def _chunk_slices(self, peer: int, array: npt.NDArray[Any]) -> list[slice]:
        length = CHUNK_BYTES[self._levels[peer]] // array.itemsize
        return [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]

    def allreduce(self, vector: FloatArray) -> None:
        """Replace a vector by its sum over all ranks, by the library's own call.

        What the library sends to whom it does not tell: counted is what a ring sends, which is the least there can
        be, 2 (n - 1) / n of the vector to the next rank.
        """
        count = self.transport.size
        self.transport.allreduce(vector)
        self.bytes_sent[self._levels[(self.rank + 1) % count]] += 2 * vector.nbytes * (count - 1) // count

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Begin to send an array, as Transport.send, and count its bytes."""
        self.bytes_sent[self._levels[peer]] += array.nbytes
        return self.transport.isend(peer, array, tag)


def split_offsets(size: int, parts: int) -> list[int]:
    """Where `parts` nearly equal parts of `size` elements begin; the last entry is `size`."""
    return [size * part // parts for part in range(parts + 1)]
