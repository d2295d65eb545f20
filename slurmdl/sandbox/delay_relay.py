"""Delay frames of a link in user space, if the kernel has no netem.

A separate program in the network namespace of a host: `python delay_relay.py PHYSICAL INNER SECONDS`. Frames leave
the other interface SECONDS after their arrival, in order, in both directions. It needs root (packet(7)).

Frames keep the kernel's offload header (PACKET_VNET_HDR): checksums and segmentation stay with the kernel, and one
system call moves up to 64 KB. The delay counts from the kernel's arrival timestamp, so it includes the wake-up time
of this process; the average time to send is compensated.
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
_BUFFER_BYTES = 256 * 2**20  # large: the following token bucket decides about loss
_MAX_FRAME_BYTES = 2**17
_FRAMES_PER_READ = 64  # per interface, alternately
#: busy wait before a frame is due: waking a halted virtual processor takes about as long
_BUSY_WAIT_NS = 150_000
#: compensation of the send time: limit, and weight of the newest frame in its mean
_MAX_EARLY_NS, _EARLY_EMA_WEIGHT = 50_000, 1 / 16


class _RelayInterface:
    """One interface and its outgoing queue: (due time in CLOCK_REALTIME nanoseconds, frame)."""

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
        """Send frames due within `early_ns`; return the lateness of the first one, or None."""
        late_ns = None
        while self.queue and self.queue[0][0] - early_ns <= time.time_ns():
            due, frame = self.queue.popleft()
            try:
                self.socket.send(frame)
            except OSError as error:
                if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.EMSGSIZE, errno.EINVAL):
                    raise  # interface removed; the other errors are frames dropped by a full queue
            if late_ns is None:
                late_ns = time.time_ns() - due
        return late_ns


def relay_frames(sides: tuple[_RelayInterface, _RelayInterface], delay_ns: int) -> None:
    """Relay frames `delay_ns` late until an interface is removed (OSError)."""
    early_ns, limit_ns = 0.0, min(_MAX_EARLY_NS, delay_ns)
    while True:
        heads = [side.queue[0][0] for side in sides if side.queue]
        wait = max(0, min(heads) - _BUSY_WAIT_NS - time.time_ns()) / 1e9 if heads else None
        ready, _, _ = select.select([side.socket for side in sides], [], [], wait)
        for side, other in (sides, sides[::-1]):
            if side.socket in ready:
                side.read_frames(delay_ns, other.queue)
            late_ns = other.send_due(int(early_ns))
            if late_ns is not None:
                early_ns = min(max(early_ns + _EARLY_EMA_WEIGHT * min(late_ns, limit_ns), 0.0), float(limit_ns))


def main(physical: str, inner: str, seconds: str) -> None:
    """Open the interfaces, then continue in the background, so that the caller returns when frames are captured."""
    sides = (_RelayInterface(physical), _RelayInterface(inner))
    if os.fork():
        os._exit(0)
    os.setsid()
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(devnull, descriptor)
    # wake up with microsecond precision, before the programs whose messages are delayed
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(OSError):
        relay_frames(sides, int(float(seconds) * 1e9))


if __name__ == "__main__":
    main(*sys.argv[1:])
