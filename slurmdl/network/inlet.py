"""Where the collector takes samples over TCP: JSON lines up to the end of the stream, then one line of answer.

The answer `stored N` comes after the samples are committed. Who may send is bounded twice: by network, and by a proof
that no ordinary user sends. That is a munge credential of a user who is trusted (see munge.py), in a line before the
samples, or, where munge is not there, a port below 1024, which only root of the sender can take.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from slurmdl.errors import InputError, SlurmdlError
from slurmdl.network.access import LOOPBACK, Address, Network, Places, RateLimitedLog, address_of, among, listener

#: called with the lines of several senders at once: stores what is good, and returns for each how many
Take = Callable[[Sequence[Sequence[str]]], Sequence[int]]

#: bytes that one sender may send, seconds that it may take for that, and for reading the answer; senders at once
MAX_BYTES, LIMIT, LAST_WORDS, MOST_SENDERS = 2**20, 5.0, 1.0, 256
#: senders who are being told why they are refused; more than that are only cut off
MOST_REFUSED = 32
#: seconds in which samples are gathered for one commit
BATCH = 0.2
#: ports above this one can be taken by anybody
LAST_PRIVILEGED = 1023
#: what a line that holds a credential begins with
CREDENTIAL = b"MUNGE:"
#: bytes of a credential
LONGEST_CREDENTIAL = 4096


class _Refused(Exception):
    """Why samples are not taken: kind, for the log, and text."""


@dataclass
class Inlet:
    """A listener that hands on what it receives.

    Attributes
    ----------
    take : SlurmdlError where nothing can be stored.
    say : called with one line about senders that are refused, seldom.
    networks : of the senders.
    users : numbers of the users of whom a munge credential is accepted; None where none is asked for.
    any_port : where no credential is asked for: senders without privileges, too.
    """

    take: Take
    say: Callable[[str], None]
    networks: tuple[Network, ...] = LOOPBACK
    users: Collection[int] | None = None
    any_port: bool = False
    _waiting: list[tuple[list[str], asyncio.Future[str]]] = field(default_factory=list)
    _refused: int = 0

    def __post_init__(self) -> None:
        self._places, self._log = Places(MOST_SENDERS), RateLimitedLog(self.say)

    async def serve(self, host: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
        """Listen until this is cancelled. OSError where the address cannot be taken.

        Parameters
        ----------
        ready : called with the port once it listens.
        """
        sessions: set[asyncio.Task[None]] = set()
        with listener(host, port) as server, ThreadPoolExecutor(4, "munge") as self._checks:
            server.setblocking(False)
            ready(server.getsockname()[1])
            try:
                await asyncio.gather(self._accept(server, sessions), self._commits())
            finally:
                for session in sessions:
                    session.cancel()
                self._log.flush(all_of_it=True)

    async def _accept(self, server: socket.socket, sessions: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(server)
            except OSError as error:  # no file descriptor is left, or the peer has gone already
                self._log("accept", f"cannot accept a connection ({error.strerror})")
                await asyncio.sleep(0.05)
                continue
            session = loop.create_task(self._session(connection, *peer[:2]))
            sessions.add(session)
            session.add_done_callback(sessions.discard)
            await asyncio.sleep(0)  # the others have their turn, also while very many come

    async def _commits(self) -> None:
        while True:
            await asyncio.sleep(BATCH)
            self._commit()
            self._log.flush()

    async def _session(self, connection: socket.socket, host: str, port: int) -> None:
        """Take the samples of one sender, and answer. Who hangs or goes away has its samples still."""
        task = asyncio.current_task()
        assert task is not None
        with connection:
            try:
                address = address_of(host)
                self._check_peer(address, port)
                if not self._places.take(address, task.cancel):
                    raise _Refused("places", "too many senders at once")
                try:
                    data = await asyncio.wait_for(self._received(connection), LIMIT)
                    answer = await self._stored(await self._lines(data, str(address)))
                    await _answer(connection, answer)
                finally:
                    self._places.leave(task.cancel)
            except _Refused as refused:
                await self._refuse(connection, *refused.args)
            except (asyncio.TimeoutError, OSError):
                pass
            except Exception as error:  # no sender can end the service
                self._log("error", _internal(error))

    def _check_peer(self, address: Address, port: int) -> None:
        if not among(address, self.networks):
            raise _Refused("network", f"{address} is in no network of --allow")
        if self.users is None and port > LAST_PRIVILEGED and not self.any_port:
            raise _Refused("port", f"{address} sends from port {port}, which any user may take (--any-port takes it)")

    async def _received(self, connection: socket.socket) -> bytes:
        data = bytearray()
        while chunk := await asyncio.get_running_loop().sock_recv(connection, 65536):
            data += chunk
            if len(data) > MAX_BYTES:
                raise _Refused("size", f"more than {MAX_BYTES} bytes")
        return bytes(data)

    async def _lines(self, data: bytes, address: str) -> list[str]:
        """The lines of samples, once the credential before them is checked, where one is asked for."""
        credential = b""
        if data.startswith(CREDENTIAL):
            credential, _, data = data.partition(b"\n")
        if self.users is not None:
            if not 0 < len(credential) <= LONGEST_CREDENTIAL:
                raise _Refused("credential", f"{address} shows no munge credential")
            await self._check_credential(credential.decode(errors="replace"), data, address)
        return data.decode(errors="surrogateescape").splitlines()

    async def _check_credential(self, credential: str, data: bytes, address: str) -> None:
        from slurmdl.network import munge

        assert self.users is not None
        try:
            user = await asyncio.get_running_loop().run_in_executor(self._checks, munge.user_of, credential, data)
        except InputError as error:
            raise _Refused("credential", f"{address}: {error}") from error
        except SlurmdlError as error:
            raise _Refused("munge", str(error)) from error
        if user not in self.users:
            raise _Refused("user", f"{address}: user {user} is not trusted with samples (--users names more)")

    async def _stored(self, lines: list[str]) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((lines, done))
        return await done

    async def _refuse(self, connection: socket.socket, kind: str, text: str) -> None:
        self._log(kind, text)
        if self._refused >= MOST_REFUSED:
            return
        self._refused += 1
        try:
            await _answer(connection, f"refused: {text}")
        finally:
            self._refused -= 1

    def _commit(self) -> None:
        """Hand on what waits, and tell the senders."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            answers = [f"stored {count}" for count in self.take([lines for lines, _ in waiting])]
        except Exception as error:  # the next batch may be stored again
            text = str(error) if isinstance(error, SlurmdlError) else _internal(error)
            self._log("store", text)
            answers = [f"refused: {text}"] * len(waiting)
        for (_, done), answer in zip(waiting, answers, strict=True):
            if not done.done():
                done.set_result(answer)


async def _answer(connection: socket.socket, text: str) -> None:
    """Send a line, and wait until the peer has read it, but not for long.

    With something unread a close would be a reset, which may overtake the answer.
    """
    async def last_words() -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, f"{text}\n".encode(errors="replace"))
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, 65536):
            pass

    with suppress(asyncio.TimeoutError, OSError):
        await asyncio.wait_for(last_words(), LAST_WORDS)


def _internal(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}"
