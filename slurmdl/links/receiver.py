"""The collector's TCP receiver: a sender writes JSON lines and closes, the receiver answers with one line.

The answer `stored N` follows the commit. Senders must be in an allowed network and must prove that they are no
ordinary user: by a MUNGE credential of a trusted user in a line before the samples, or, without MUNGE, by a source
port below 1024, which only root can bind.
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

#: stores the valid samples in the lines of several senders, and returns their number for each sender
StoreBatches = Callable[[Sequence[Sequence[str]]], Sequence[int]]

#: limits of one sender: bytes, seconds for sending, seconds for reading the answer; senders at the same time
MAX_BYTES, SENDER_TIMEOUT_S, REPLY_TIMEOUT_S, MAX_SENDERS = 2**20, 5.0, 1.0, 256
#: rejected senders that are sent the reason at the same time; others are disconnected
MAX_REJECTION_REPLIES = 32
#: seconds of samples per commit
COMMIT_INTERVAL_S = 0.2
MAX_PRIVILEGED_PORT = 1023
#: prefix of a line with a credential
CREDENTIAL_PREFIX = b"MUNGE:"
MAX_CREDENTIAL_BYTES = 4096


class _RejectedError(Exception):
    """Rejection of a sender: category for the log, and reason."""


@dataclass
class SampleReceiver:
    """Listener that passes received lines to `store`.

    Attributes
    ----------
    store : raises SlurmdlError if samples cannot be stored.
    warn : called with rate-limited log lines about rejected senders.
    allowed_networks : of the senders.
    trusted_uids : users whose MUNGE credentials are accepted; None if no credential is required.
    allow_unprivileged : if no credential is required, accept any source port.
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
        """Listen until cancelled; OSError if the address cannot be bound.

        Parameters
        ----------
        on_listening : called with the port.
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
            except OSError as error:  # out of file descriptors, or the peer has disconnected
                self._log("accept", f"cannot accept a connection ({error.strerror})")
                await asyncio.sleep(0.05)
                continue
            session = loop.create_task(self._handle_sender(connection, *peer[:2]))
            sessions.add(session)
            session.add_done_callback(sessions.discard)
            await asyncio.sleep(0)  # let other tasks run during a burst of connections

    async def _commit_periodically(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            self._commit_pending()
            self._log.flush()

    async def _handle_sender(self, connection: socket.socket, host: str, port: int) -> None:
        """Store the samples of one sender and answer; without an answer the sender keeps its samples."""
        task = asyncio.current_task()
        assert task is not None
        with connection:
            try:
                address = parse_peer_address(host)
                self._check_peer(address, port)
                if not self._slots.acquire(address, task.cancel):
                    raise _RejectedError("slots", "too many senders at the same time")
                try:
                    data = await asyncio.wait_for(self._receive_bytes(connection), SENDER_TIMEOUT_S)
                    answer = await self._store_lines(await self._authenticated_lines(data, str(address)))
                    await _send_reply(connection, answer)
                finally:
                    self._slots.release(task.cancel)
            except _RejectedError as rejection:
                await self._reject(connection, *rejection.args)
            except (asyncio.TimeoutError, OSError):
                pass
            except Exception as error:  # a sender must not stop the service
                self._log("error", _internal_error_text(error))

    def _check_peer(self, address: IPAddress, port: int) -> None:
        if not is_in_networks(address, self.allowed_networks):
            raise _RejectedError("network", f"{address} is in no network of --allow")
        if self.trusted_uids is None and port > MAX_PRIVILEGED_PORT and not self.allow_unprivileged:
            raise _RejectedError("port", f"{address}: source port {port} is not privileged; expected a port below "
                                         "1024 (or use --allow-unprivileged-ports)")

    async def _receive_bytes(self, connection: socket.socket) -> bytes:
        data = bytearray()
        while chunk := await asyncio.get_running_loop().sock_recv(connection, 65536):
            data += chunk
            if len(data) > MAX_BYTES:
                raise _RejectedError("size", f"more than {MAX_BYTES} bytes")
        return bytes(data)

    async def _authenticated_lines(self, data: bytes, address: str) -> list[str]:
        """Sample lines without the credential, which is verified if it is required."""
        credential = b""
        if data.startswith(CREDENTIAL_PREFIX):
            credential, _, data = data.partition(b"\n")
        if self.trusted_uids is not None:
            if not 0 < len(credential) <= MAX_CREDENTIAL_BYTES:
                raise _RejectedError("credential", f"{address}: no munge credential")
            await self._check_credential(credential.decode(errors="replace"), data, address)
        return data.decode(errors="surrogateescape").splitlines()

    async def _check_credential(self, credential: str, data: bytes, address: str) -> None:
        from slurmdl.links import munge

        assert self.trusted_uids is not None
        try:
            uid = await asyncio.get_running_loop().run_in_executor(self._munge_executor, munge.verify_credential,
                                                                   credential, data)
        except InputError as error:
            raise _RejectedError("credential", f"{address}: {error}") from error
        except SlurmdlError as error:
            raise _RejectedError("munge", str(error)) from error
        if uid not in self.trusted_uids:
            raise _RejectedError("user", f"{address}: user {uid} is not trusted; add it to --users to accept its "
                                         "samples")

    async def _store_lines(self, lines: list[str]) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending.append((lines, done))
        return await done

    async def _reject(self, connection: socket.socket, category: str, reason: str) -> None:
        self._log(category, reason)
        if self._rejection_replies >= MAX_REJECTION_REPLIES:
            return
        self._rejection_replies += 1
        try:
            await _send_reply(connection, f"rejected: {reason}")
        finally:
            self._rejection_replies -= 1

    def _commit_pending(self) -> None:
        """Store the pending lines, and complete the futures of their senders."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            answers = [f"stored {count}" for count in self.store([lines for lines, _ in pending])]
        except Exception as error:  # the next commit may succeed
            text = str(error) if isinstance(error, SlurmdlError) else _internal_error_text(error)
            self._log("store", text)
            answers = [f"rejected: {text}"] * len(pending)
        for (_, done), answer in zip(pending, answers, strict=True):
            if not done.done():
                done.set_result(answer)


async def _send_reply(connection: socket.socket, text: str) -> None:
    """Send a line, and wait up to REPLY_TIMEOUT_S until the peer closes.

    Closing a socket with unread data sends a reset, which may arrive before the reply.
    """
    async def send_and_drain() -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, f"{text}\n".encode(errors="replace"))
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, 65536):
            pass

    with suppress(asyncio.TimeoutError, OSError):
        await asyncio.wait_for(send_and_drain(), REPLY_TIMEOUT_S)


def _internal_error_text(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}"
