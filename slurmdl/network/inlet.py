"""Where the collector takes samples over TCP: JSON lines up to the end of the stream, then one line of answer.

The answer `stored N` comes after the samples are committed. Who may send is bounded twice: by network, and by port:
one below 1024 can be taken by root of the sender alone, so users of a node cannot write its scores.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurmdl.errors import SlurmdlError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
#: called with the lines of several senders at once: stores what is good, and returns for each how many
Take = Callable[[Sequence[Sequence[str]]], Sequence[int]]

#: the machine itself
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
#: bytes that one sender may send, seconds that it may take, and senders at once
MAX_BYTES, LIMIT, MOST_SENDERS = 2**20, 5.0, 256
#: seconds in which samples are gathered for one commit
BATCH = 0.2
#: ports above this one can be taken by anybody
LAST_PRIVILEGED = 1023


@dataclass
class Inlet:
    """A listener that hands on what it receives.

    Attributes
    ----------
    take : SlurmdlError where nothing can be stored.
    say : called with one line about a sender that is refused.
    networks : of the senders.
    any_port : senders without privileges, too.
    """

    take: Take
    say: Callable[[str], None]
    networks: tuple[Network, ...] = LOOPBACK
    any_port: bool = False
    _waiting: list[tuple[list[str], asyncio.Future[str]]] = field(default_factory=list)
    _senders: int = 0

    async def serve(self, host: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
        """Listen until this is cancelled. OSError where the address cannot be taken.

        Parameters
        ----------
        ready : called with the port once it listens.
        """
        server = await asyncio.start_server(self._sender, host or None, port, backlog=1024)
        async with server:
            ready(server.sockets[0].getsockname()[1])
            while True:
                await asyncio.sleep(BATCH)
                self._commit()

    def _refuses(self, address: str, port: int) -> str:
        """Why a sender is refused, "" where it is not."""
        given = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(given, "ipv4_mapped", None) or given
        if not any(mapped in network for network in self.networks):
            return f"{mapped} is in no network of --allow"
        if port > LAST_PRIVILEGED and not self.any_port:
            return f"{mapped} sends from port {port}, which any user may take (--any-port takes it)"
        return "too many senders at once" if self._senders >= MOST_SENDERS else ""

    async def _sender(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("peername")[:2]
        answer = self._refuses(address, port)
        if answer:
            self.say(answer)
        self._senders += 1
        try:
            if not answer:
                answer = await self._received(await asyncio.wait_for(self._text(reader), LIMIT))
            writer.write(f"{answer}\n".encode())
            writer.write_eof()
            # with something unread a close would be a reset, which may overtake the answer
            await asyncio.wait_for(self._text(reader), LIMIT)
        except (asyncio.TimeoutError, OSError):
            pass  # who hangs or goes away has its samples still, and may send them again
        finally:
            self._senders -= 1
            writer.close()

    async def _text(self, reader: asyncio.StreamReader) -> str:
        data = bytearray()
        while chunk := await reader.read(65536):
            data += chunk
            if len(data) > MAX_BYTES:
                return ""
        return data.decode(errors="replace")

    async def _received(self, text: str) -> str:
        if not text:
            return f"refused: nothing, or more than {MAX_BYTES} bytes"
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((text.splitlines(), done))
        return await done

    def _commit(self) -> None:
        """Hand on what waits, and tell the senders."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            answers = [f"stored {count}" for count in self.take([lines for lines, _ in waiting])]
        except SlurmdlError as error:
            self.say(str(error))
            answers = [f"refused: {error}"] * len(waiting)
        for (_, done), answer in zip(waiting, answers, strict=True):
            if not done.done():
                done.set_result(answer)
