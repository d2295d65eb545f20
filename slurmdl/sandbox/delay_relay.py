"""Hold what crosses a link for a while: the delay of a sandbox's link where the kernel has no netem.

A program of its own, started in the network namespace of a host: `python relay.py WIRE INNER SECONDS`. Frames that
arrive at one interface leave the other SECONDS later, in their order, both ways. It needs root (packet(7)), and ends
when one of the interfaces does.

Frames keep the header in which the kernel notes what it has left undone in them (PACKET_VNET_HDR), so checksums and
the cutting of large segments stay the kernel's, and one system call moves up to 64 KB. The delay counts from the
kernel's own time stamp of the arrival, so that the time this process takes to wake up is part of it; so is the time
it takes to send, as far as the last frames tell.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import sys
import time

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_SO_TIMESTAMPNS, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 35, 32, 33
_ETH_P_ALL = 3
_PR_SET_TIMERSLACK = 29
#: as much as a link may hold: the token bucket that follows decides what is lost, not a socket
_BUFFER_BYTES = 256 * 2**20
_MAX_FRAME_BYTES = 2**17
#: frames read from one side before the other has its turn
_FRAMES_PER_READ = 64
#: nanoseconds before a frame is due in which it is waited for awake: a virtual processor that halts takes about as
#: long to come back
_BUSY_WAIT_NS = 150_000
#: the most nanoseconds by which frames leave early, and what the newest one counts of the mean that says so
_MAX_EARLY_NS, _EARLY_EMA_WEIGHT = 50_000, 1 / 16


class _RelayInterface:
    """One interface, and what waits to leave through it: (when, in CLOCK_REALTIME nanoseconds; the frame)."""

    def __init__(self, interface: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        for level, option, value in ((_SOL_PACKET, _VNET_HDR, 1), (_SOL_PACKET, _IGNORE_OUTGOING, 1),
                                     (socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1),
                                     (socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES),
                                     (socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)):
            self.socket.setsockopt(level, option, value)
        self.socket.bind((interface, _ETH_P_ALL))
        self.socket.setblocking(False)
        self.queue: collections.deque[tuple[int, bytes]] = collections.deque()

    def read_frames(self, delay_ns: int, outgoing: collections.deque[tuple[int, bytes]]) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_FRAMES_PER_READ):
                frame, ancillary, _, _ = self.socket.recvmsg(_MAX_FRAME_BYTES, 64)
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2][:16])
                outgoing.append((seconds * 1_000_000_000 + nanoseconds + delay_ns, frame))

    def send_due(self, early_ns: int) -> int | None:
        """Send what is due within `early` nanoseconds; how late the first one was out, None where none was due."""
        late = None
        while self.queue and self.queue[0][0] - early_ns <= time.time_ns():
            due, frame = self.queue.popleft()
            try:
                self.socket.send(frame)
            except OSError as error:
                if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.EMSGSIZE, errno.EINVAL):
                    raise  # the link is gone; the others are frames that a full queue drops
            if late is None:
                late = time.time_ns() - due
        return late


def relay_frames(sides: tuple[_RelayInterface, _RelayInterface], delay_ns: int) -> None:
    """Relay, each frame `delay` nanoseconds late, until an interface is gone (OSError)."""
    early, most = 0.0, min(_MAX_EARLY_NS, delay_ns)
    while True:
        heads = [side.queue[0][0] for side in sides if side.queue]
        wait = max(0, min(heads) - _BUSY_WAIT_NS - time.time_ns()) / 1e9 if heads else None
        ready, _, _ = select.select([side.socket for side in sides], [], [], wait)
        for side, other in (sides, sides[::-1]):
            if side.socket in ready:
                side.read_frames(delay_ns, other.queue)
            late = other.send_due(int(early))
            if late is not None:
                early = min(max(early + _EARLY_EMA_WEIGHT * min(late, most), 0.0), float(most))


def main(physical: str, inner: str, seconds: str) -> None:
    """Go on in the background once frames are seen, so that the caller's wait ends then."""
    sides = (_RelayInterface(physical), _RelayInterface(inner))
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    # wake up to the microsecond, and before the programs whose messages are held
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(OSError):
        relay_frames(sides, int(float(seconds) * 1e9))


if __name__ == "__main__":
    main(*sys.argv[1:])
