"""One worker as the server sees it: its socket, its outgoing messages and the episodes that it holds."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.websockets import WebSocketDisconnect

from art_server.messages import write

log = logging.getLogger("art_server")

SEND_TIMEOUT = 20.0
"""Seconds for sending a message to a worker; a worker that reads more slowly is disconnected."""
MAX_OUTBOX = 1000
"""Messages waiting to be sent to one worker; with more, it is disconnected."""
REPLACED, TOO_SLOW, TOO_MANY_BAD, RECONNECTED = 4000, 4001, 4002, 4003
"""Our WebSocket close codes."""

GONE = (WebSocketDisconnect, RuntimeError, OSError)
"""The exceptions of a socket whose connection is gone."""
NOT_READY = ("connecting", "silent", "leaving", "left")
"""States in which a worker gets no episodes."""


class Socket(Protocol):
    """The part of a WebSocket that is used here."""

    async def send_text(self, data: str) -> None: ...

    async def close(self, code: int = 1000, reason: str | None = None) -> None: ...


@dataclass(eq=False)
class Pending:
    """An episode whose result a caller waits for."""

    body: dict[str, Any]
    pool: str
    outcome: asyncio.Future[dict[str, Any]]
    repeatable: bool
    """Whether another worker repeats it if its worker is lost; otherwise ``outcome`` raises RolloutLost."""
    attempts: int = 0
    queued: float = field(default_factory=time.monotonic)
    holder: Client | None = None
    lease: str = ""

    @property
    def episode_id(self) -> str:
        return self.body["episode_id"]


@dataclass(eq=False)
class Client:
    """A worker, connected or expected to reconnect."""

    client_id: str
    session: str | None = None
    capacity: int = 1
    pool: str = "default"
    leases: bool = False
    """Whether it supports leases; a classic client doesn't, and holds its episodes while it is connected."""
    state: str = "connected"
    socket: Socket | None = None
    """None while it is disconnected."""
    held: dict[str, Pending] = field(default_factory=dict)
    """Lease -> episode."""
    last_seen: float = field(default_factory=time.time)
    """Unix time."""
    finished: int = 0
    lost: int = 0
    bad_messages: int = 0
    """Bad messages in this connection."""
    version: int | None = None
    """Version of the weights in the last ``update_model`` that it was sent."""
    _ends: dict[str, float] = field(default_factory=dict)
    """Lease -> the monotonic time at which it expires."""
    _confirmed: set[str] = field(default_factory=set)
    """Leases in the last heartbeat; if a later heartbeat omits one, the worker has given it up."""
    _outbox: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _sender: asyncio.Task[None] | None = None

    @property
    def free(self) -> int:
        """The number of further episodes that it can run now."""
        return self.slots - len(self.held)

    @property
    def display_state(self) -> str:
        """Its state for the dashboard; whether it is running follows from its leases, which are newer than its last status."""
        if self.socket is None:
            return "gone"
        return ("running" if self.held else "idle") if self.state in ("connected", "running", "idle") else self.state

    @property
    def slots(self) -> int:
        """The number of episodes that it runs concurrently; 0 while it gets none."""
        return 0 if self.socket is None or self.state in NOT_READY else self.capacity

    def grant(self, pending: Pending, seconds: float) -> str:
        """Assign it an episode for ``seconds``; return the lease."""
        pending.holder, pending.lease = self, uuid.uuid4().hex
        self.held[pending.lease] = pending
        self._ends[pending.lease] = time.monotonic() + seconds
        return pending.lease

    def release(self, lease: str) -> Pending | None:
        """End a lease and return its episode; None if the worker doesn't hold it."""
        self._ends.pop(lease, None)
        self._confirmed.discard(lease)
        pending = self.held.pop(lease, None)
        if pending is not None:
            pending.holder = None
        return pending

    def lease_of(self, episode_id: str) -> str:
        """Return the lease of an episode that it holds; "" if it doesn't."""
        return next((lease for lease, pending in self.held.items() if pending.episode_id == episode_id), "")

    def renew(self, running: Iterable[str], seconds: float) -> list[str]:
        """Extend the leases in a heartbeat; return those that an earlier heartbeat had and this one omits.

        A lease that no heartbeat has confirmed yet isn't missing, because it may have crossed this heartbeat on the way. On a
        new connection, every omitted lease is missing, because nothing is granted before its first heartbeat.
        """
        running = set(running)
        expected = self.held if self.state == "connecting" else self._confirmed
        missing = [lease for lease in expected if lease not in running]
        self._confirmed = running & set(self.held)
        self._ends.update(dict.fromkeys(self._confirmed, time.monotonic() + seconds))
        return missing

    def extend_all(self, seconds: float) -> None:
        """Extend all its leases by ``seconds``."""
        self._ends = {lease: end + seconds for lease, end in self._ends.items()}

    def expired(self) -> list[str]:
        """Return the expired leases."""
        now = time.monotonic()
        return [lease for lease, end in self._ends.items() if end < now]

    def connect(self, socket: Socket) -> None:
        """Send through ``socket``. It gets episodes after its first status update, which has its capacity and pool."""
        self.socket, self.bad_messages, self.last_seen = socket, 0, time.time()
        self.state = "connecting"
        self._outbox = asyncio.Queue(MAX_OUTBOX)
        self._sender = asyncio.create_task(self._send_queued(socket, self._outbox))

    def send(self, message: BaseModel) -> None:
        """Queue a message; do nothing while disconnected. If the queue is full, the worker is disconnected as too slow."""
        if self.socket is None:
            return
        try:
            self._outbox.put_nowait(write(message))
        except asyncio.QueueFull:
            self._disconnect_slow()

    def disconnect(self, code: int, reason: str) -> None:
        """Close its socket without waiting."""
        socket = self.mark_disconnected()
        if socket is not None:
            closing = asyncio.create_task(_close(socket, code, reason))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)

    def mark_disconnected(self) -> Socket | None:
        """Stop sending and forget the socket; return it."""
        socket, self.socket = self.socket, None
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()
        self._sender = None
        return socket

    def _disconnect_slow(self) -> None:
        log.warning("disconnecting worker %s: it reads messages too slowly", self.client_id)
        self.disconnect(TOO_SLOW, "messages are read too slowly")

    async def _send_queued(self, socket: Socket, outbox: asyncio.Queue[str]) -> None:
        while True:
            text = await outbox.get()
            try:
                await asyncio.wait_for(socket.send_text(text), SEND_TIMEOUT)
            except TimeoutError:
                return self._disconnect_slow()
            except GONE:
                return  # the task that reads from the socket handles the disconnect


async def sockets_closed() -> None:
    """Return when all sockets that are being closed are closed."""
    await asyncio.gather(*_closing)


async def _close(socket: Socket, code: int, reason: str) -> None:
    with suppress(TimeoutError, *GONE):
        await asyncio.wait_for(socket.close(code, reason), 5)


_closing: set[asyncio.Task[None]] = set()
