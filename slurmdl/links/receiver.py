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
from slurmdl.links.tcp_server import (
    LOOPBACK,
    ConnectionSlots,
    IPAddress,
    IPNetwork,
    RateLimitedLog,
    create_listener,
    is_in_networks,
    parse_peer_address,
)

#: called with the lines of several senders at once: stores what is good, and returns for each how many
StoreBatches = Callable[[Sequence[Sequence[str]]], Sequence[int]]

#: bytes that one sender may send, seconds that it may take for that, and for reading the answer; senders at once
MAX_BYTES, SENDER_TIMEOUT_S, REPLY_TIMEOUT_S, MAX_SENDERS = 2**20, 5.0, 1.0, 256
#: senders who are being told why they are refused; more than that are only cut off
MAX_REJECTION_REPLIES = 32
#: seconds in which samples are gathered for one commit
COMMIT_INTERVAL_S = 0.2
#: ports above this one can be taken by anybody
MAX_PRIVILEGED_PORT = 1023
#: what a line that holds a credential begins with
CREDENTIAL_PREFIX = b"MUNGE:"
#: bytes of a credential
MAX_CREDENTIAL_BYTES = 4096


class _RejectedError(Exception):
    """Why samples are not taken: kind, for the log, and text."""


@dataclass
class SampleReceiver:
    """A listener that hands on what it receives.

    Attributes
    ----------
    take : SlurmdlError where nothing can be stored.
    say : called with one line about senders that are refused, seldom.
    networks : of the senders.
    users : numbers of the users of whom a munge credential is accepted; None where none is asked for.
    any_port : where no credential is asked for: senders without privileges, too.
    """

    store: StoreBatches
    warn: Callable[[str], None]
    allowed_networks: tuple[IPNetwork, ...] = LOOPBACK
    trusted_uids: Collection[int] | None = None
    allow_unprivileged: bool = False
    _pending: list[tuple[list[str], asyncio.Future[str]]] = field(default_factory=list)
    _rejection_replies: int = 0

    def __post_init__(self) -> None:
        self._slots, self._log = ConnectionSlots(MAX_SENDERS), RateLimitedLog(self.warn)

    async def serve(self, host: str, port: int, on_listening: Callable[[int], None] = lambda port: None) -> None:
        """Listen until this is cancelled. OSError where the address cannot be taken.

        Parameters
        ----------
        ready : called with the port once it listens.
        """
        sessions: set[asyncio.Task[None]] = set()
        with create_listener(host, port) as server, ThreadPoolExecutor(4, "munge") as self._munge_executor:
            server.setblocking(False)
            on_listening(server.getsockname()[1])
            try:
                await asyncio.gather(self._accept_senders(server, sessions), self._commit_periodically())
            finally:
                for session in sessions:
                    session.cancel()
                self._log.flush(force=True)

    async def _accept_senders(self, server: socket.socket, sessions: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(server)
            except OSError as error:  # no file descriptor is left, or the peer has gone already
                self._log("accept", f"cannot accept a connection ({error.strerror})")
                await asyncio.sleep(0.05)
                continue
            session = loop.create_task(self._handle_sender(connection, *peer[:2]))
            sessions.add(session)
            session.add_done_callback(sessions.discard)
            await asyncio.sleep(0)  # the others have their turn, also while very many come

    async def _commit_periodically(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            self._commit_pending()
            self._log.flush()

    async def _handle_sender(self, connection: socket.socket, host: str, port: int) -> None:
        """Take the samples of one sender, and answer. Who hangs or goes away has its samples still."""
        task = asyncio.current_task()
        assert task is not None
        with connection:
            try:
                address = parse_peer_address(host)
                self._check_peer(address, port)
                if not self._slots.acquire(address, task.cancel):
                    raise _RejectedError("places", "too many senders at once")
                try:
                    data = await asyncio.wait_for(self._receive_bytes(connection), SENDER_TIMEOUT_S)
                    answer = await self._store_lines(await self._authenticated_lines(data, str(address)))
                    await _send_reply(connection, answer)
                finally:
                    self._slots.release(task.cancel)
            except _RejectedError as refused:
                await self._reject(connection, *refused.args)
            except (asyncio.TimeoutError, OSError):
                pass
            except Exception as error:  # no sender can end the service
                self._log("error", _internal_error_text(error))

    def _check_peer(self, address: IPAddress, port: int) -> None:
        if not is_in_networks(address, self.allowed_networks):
            raise _RejectedError("network", f"{address} is in no network of --allow")
        if self.trusted_uids is None and port > MAX_PRIVILEGED_PORT and not self.allow_unprivileged:
            raise _RejectedError(
    "port", f"{address} sends from port {port}, which any user may take (--any-port takes it)")

    async def _receive_bytes(self, connection: socket.socket) -> bytes:
        data = bytearray()
        while chunk := await asyncio.get_running_loop().sock_recv(connection, 65536):
            data += chunk
            if len(data) > MAX_BYTES:
                raise _RejectedError("size", f"more than {MAX_BYTES} bytes")
        return bytes(data)

    async def _authenticated_lines(self, data: bytes, address: str) -> list[str]:
        """The lines of samples, once the credential before them is checked, where one is asked for."""
        credential = b""
        if data.startswith(CREDENTIAL_PREFIX):
            credential, _, data = data.partition(b"\n")
        if self.trusted_uids is not None:
            if not 0 < len(credential) <= MAX_CREDENTIAL_BYTES:
                raise _RejectedError("credential", f"{address} shows no munge credential")
            await self._check_credential(credential.decode(errors="replace"), data, address)
        return data.decode(errors="surrogateescape").splitlines()

    async def _check_credential(self, credential: str, data: bytes, address: str) -> None:
        from slurmdl.links import munge

        assert self.trusted_uids is not None
        try:
            user = await asyncio.get_running_loop().run_in_executor(self._munge_executor, munge.verify_credential, credential, data)
        except InputError as error:
            raise _RejectedError("credential", f"{address}: {error}") from error
        except SlurmdlError as error:
            raise _RejectedError("munge", str(error)) from error
        if user not in self.trusted_uids:
            raise _RejectedError("user", f"{address}: user {user} is not trusted with samples (--users names more)")

    async def _store_lines(self, lines: list[str]) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending.append((lines, done))
        return await done

    async def _reject(self, connection: socket.socket, kind: str, text: str) -> None:
        self._log(kind, text)
        if self._rejection_replies >= MAX_REJECTION_REPLIES:
            return
        self._rejection_replies += 1
        try:
            await _send_reply(connection, f"refused: {text}")
        finally:
            self._rejection_replies -= 1

    def _commit_pending(self) -> None:
        """Hand on what waits, and tell the senders."""
        waiting, self._pending = self._pending, []
        if not waiting:
            return
        try:
            answers = [f"stored {count}" for count in self.store([lines for lines, _ in waiting])]
        except Exception as error:  # the next batch may be stored again
            text = str(error) if isinstance(error, SlurmdlError) else _internal_error_text(error)
            self._log("store", text)
            answers = [f"refused: {text}"] * len(waiting)
        for (_, done), answer in zip(waiting, answers, strict=True):
            if not done.done():
                done.set_result(answer)


async def _send_reply(connection: socket.socket, text: str) -> None:
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
        await asyncio.wait_for(last_words(), REPLY_TIMEOUT_S)


def _internal_error_text(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}"
