"""Point-to-point messages between ranks, with meters of bytes by locality level and of waiting time.

Training data is exchanged by these messages alone, so the bytes on each link are known.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.transports.transport import CHUNK_BYTES, CommCoroutine, Transport

#: distance of a message: same node, another node of the zone, another zone
LOCALITY_LEVELS = ("intra_node", "intra_zone", "inter_zone")

#: largest array that is sent before the receiver is known to be ready; see `rendezvous_handshake`
EAGER_MAX_BYTES = 60_000

Arrays = Sequence[tuple[int, npt.NDArray[Any]]]


class MeteredP2P:
    """Messages of one rank.

    Args:
        levels: entry i is the locality level of a message to rank i.

    Attributes:
        bytes_sent: locality level -> payload bytes sent by this rank.
    """

    def __init__(self, transport: Transport, levels: Sequence[str]) -> None:
        self.transport = transport
        self._levels = tuple(levels)
        self._chunk_bytes = dict.fromkeys(LOCALITY_LEVELS, CHUNK_BYTES) | {
            "inter_zone": transport.inter_zone_chunk_bytes}
        self.rank = transport.rank
        self.bytes_sent = dict.fromkeys(LOCALITY_LEVELS, 0)
        self._lock = threading.Lock()
        self._peer_wait, self._wait_start = 0.0, math.inf

    def peer_wait_seconds(self) -> float:
        """Total time so far before the first chunk of an expected message arrived, in s."""
        return self._peer_wait + max(self.transport.now() - self._wait_start, 0.0)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], tag: int = 0) -> None:
        """Send and receive contiguous arrays (peer, array) concurrently, and wait for completion."""
        recv_requests = [self.transport.irecv(peer, array, tag) for peer, array in receives]
        send_requests = [self.isend(peer, array, tag) for peer, array in sends]
        self.wait_first_chunk(recv_requests[:1])
        self.transport.waitall(recv_requests + send_requests)

    def rendezvous_handshake(self, sends: Arrays, receives: Arrays) -> None:
        """Before an exchange: wait until the receivers of more than EAGER_MAX_BYTES are ready.

        An early message would take bandwidth from messages in flight. All ranks of the exchange pass the same arrays.
        """
        empty = np.empty(0, np.uint8)
        self.exchange([(peer, empty) for peer, array in receives if array.nbytes > EAGER_MAX_BYTES],
                      [(peer, empty) for peer, array in sends if array.nbytes > EAGER_MAX_BYTES])

    def post(self, sends: Arrays, receives: Arrays, tag: int = 0) -> tuple[list[tuple[int, slice, Any]], list[Any]]:
        """Start to send and receive contiguous arrays (peer, array) concurrently, in chunks.

        Two ranks list several arrays between them with the same tag in the same order. Return for each chunk to
        receive, in order, the index in `receives`, slice and request; and the send requests.
        """
        recv_chunks = [(index, chunk, self.transport.irecv(peer, array[chunk], tag))
                       for index, (peer, array) in enumerate(receives) for chunk in self._chunk_slices(peer, array)]
        send_requests = [self.isend(peer, array[chunk], tag)
                         for peer, array in sends for chunk in self._chunk_slices(peer, array)]
        return recv_chunks, send_requests

    def iter_chunks(self, sends: Arrays, receives: Arrays) -> Iterator[tuple[int, slice]]:
        """Send and receive arrays as `post`; yield the index in `receives` and the slice of each received chunk.

        The caller's work on a chunk overlaps with the transfer of the next ones.
        """
        recv_chunks, send_requests = self.post(sends, receives)
        self.wait_first_chunk([request for _, _, request in recv_chunks[:1]])
        for index, chunk, request in recv_chunks:
            self.transport.waitall([request])
            yield index, chunk
        self.transport.waitall(send_requests)

    def exchange_chunked(self, sends: Arrays, receives: Arrays) -> None:
        """As `iter_chunks`, and wait for completion."""
        for _ in self.iter_chunks(sends, receives):
            pass

    def run_to_completion(self, coroutine: CommCoroutine) -> None:
        for requests, first in coroutine:
            if first:
                self.wait_first_chunk(requests)
            else:
                self.transport.waitall(requests)

    @contextmanager
    def timing_wait(self) -> Iterator[None]:
        """Count the time inside as waiting for a peer."""
        self.set_peer_wait(True)
        try:
            yield
        finally:
            self.set_peer_wait(False)

    def set_peer_wait(self, waits: bool) -> None:
        """Count the time from now on as waiting for a peer, or no longer."""
        now = self.transport.now()
        if not waits and self._wait_start < math.inf:
            self._peer_wait += now - self._wait_start
        self._wait_start = min(self._wait_start, now) if waits else math.inf

    def wait_first_chunk(self, requests: Sequence[Any]) -> None:
        """Wait for the first part of expected messages, and count the time as waiting for a peer."""
        if requests:
            with self.timing_wait():
                self.transport.waitall(requests)

    def _chunk_slices(self, peer: int, array: npt.NDArray[Any]) -> list[slice]:
        length = self._chunk_bytes[self._levels[peer]] // array.itemsize
        return [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to send an array, as Transport.isend, and count its bytes."""
        self.count_bytes(peer, array.nbytes)
        return self.transport.isend(peer, array, tag)

    def count_bytes(self, peer: int, num_bytes: int) -> None:
        """Count bytes that this rank sends to another."""
        with self._lock:
            self.bytes_sent[self._levels[peer]] += num_bytes
