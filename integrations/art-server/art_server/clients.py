"""One worker as the server sees it: its socket, what waits to be sent, the episodes that it holds.

Knows nothing about other workers, queues, rollouts or HTTP; a socket is what has ``send_text`` and ``close``.
"""

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
"""Seconds that a message to a worker may take; one that reads so slowly is cut off."""
MOST_WAITING = 1000
"""Messages that wait to be sent to one worker, after which it is cut off."""
REPLACED, TOO_SLOW, TOO_BAD, CAME_BACK = 4000, 4001, 4002, 4003
"""Why we close a worker's socket: WebSocket codes of our own."""

GONE = (WebSocketDisconnect, RuntimeError, OSError)
"""What a socket raises whose connection is gone."""
NOT_READY = ("connecting", "silent", "leaving", "left")
"""States of a worker that is given no episodes."""


class Socket(Protocol):
    """A WebSocket as it is used here."""

    async def send_text(self, data: str) -> None: ...

    async def close(self, code: int = 1000, reason: str | None = None) -> None: ...


@dataclass(eq=False)
class Pending:
    """An episode that somebody waits for."""

    body: dict[str, Any]
    pool: str
    outcome: asyncio.Future[dict[str, Any]]
    again: bool
    """Whether another worker may be given the same, when its worker is lost; otherwise ``outcome`` fails with RolloutLost."""
    attempts: int = 0
    queued: float = field(default_factory=time.monotonic)
    holder: Client | None = None
    lease: str = ""

    @property
    def episode_id(self) -> str:
        return self.body["episode_id"]


@dataclass(eq=False)
class Client:
    """A worker, connected or expected back."""

    client_id: str
    session: str | None = None
    capacity: int = 1
    pool: str = "default"
    leases: bool = False
    """Whether it knows leases: a classic client does not, and holds its episodes while it is connected."""
    state: str = "connected"
    socket: Socket | None = None
    """None while it is not connected."""
    held: dict[str, Pending] = field(default_factory=dict)
    """By lease."""
    last_seen: float = field(default_factory=time.time)
    """Unix time."""
    finished: int = 0
    lost: int = 0
    bad: int = 0
    """Bad messages of this connection."""
    version: int | None = None
    """Of the weights that it was last told of."""
    _ends: dict[str, float] = field(default_factory=dict)
    """Lease -> when it ends, unless it is prolonged; monotonic."""
    _named: set[str] = field(default_factory=set)
    """Leases that a heartbeat has named: from then on one that names them no more has given them up."""
    _outbox: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _sender: asyncio.Task[None] | None = None

    @property
    def free(self) -> int:
        """How many more episodes it takes now."""
        return self.places - len(self.held)

    @property
    def shown(self) -> str:
        """Its state for people: what it said last is older than what it was given."""
        if self.socket is None:
            return "gone"
        return ("running" if self.held else "idle") if self.state in ("connected", "running", "idle") else self.state

    @property
    def places(self) -> int:
        """How many episodes it takes at a time; 0 while it is not to be given any."""
        return 0 if self.socket is None or self.state in NOT_READY else self.capacity

    def grant(self, pending: Pending, seconds: float) -> str:
        """Give it an episode for so long; return the lease."""
        pending.holder, pending.lease = self, uuid.uuid4().hex
        self.held[pending.lease] = pending
        self._ends[pending.lease] = time.monotonic() + seconds
        return pending.lease

    def release(self, lease: str) -> Pending | None:
        """Take an episode from it; None where it does not hold it."""
        self._ends.pop(lease, None)
        self._named.discard(lease)
        pending = self.held.pop(lease, None)
        if pending is not None:
            pending.holder = None
        return pending

    def lease_of(self, episode_id: str) -> str:
        """Return the lease by which it holds an episode; "" where it does not."""
        return next((lease for lease, it in self.held.items() if it.episode_id == episode_id), "")

    def prolong(self, running: Iterable[str], seconds: float) -> list[str]:
        """Prolong the leases that a heartbeat named; return those that it had named before and does no more.

        One that was granted a moment ago may cross the heartbeat on its way, so that it is not missing yet; not so where the
        connection is new: nothing is granted before its first heartbeat.
        """
        running = set(running)
        gone = [lease for lease in (self.held if self.state == "connecting" else self._named) if lease not in running]
        self._named = running & set(self.held)
        self._ends.update(dict.fromkeys(self._named, time.monotonic() + seconds))
        return gone

    def forgive(self, seconds: float) -> None:
        """Prolong all its leases."""
        self._ends = {lease: end + seconds for lease, end in self._ends.items()}

    def ended(self) -> list[str]:
        """Return the leases that were not prolonged in time."""
        now = time.monotonic()
        return [lease for lease, end in self._ends.items() if end < now]

    def connect(self, socket: Socket) -> None:
        """Send through ``socket`` from now on; episodes after its first status update, which says how many and whose."""
        self.socket, self.bad, self.last_seen = socket, 0, time.time()
        self.state = "connecting"
        self._outbox = asyncio.Queue(MOST_WAITING)
        self._sender = asyncio.create_task(self._send(socket, self._outbox))

    def say(self, message: BaseModel) -> None:
        """Send a message when its turn comes; nothing where it is not connected. One that reads too slowly is cut off."""
        if self.socket is None:
            return
        try:
            self._outbox.put_nowait(write(message))
        except asyncio.QueueFull:
            self._too_slow()

    def disconnect(self, code: int, reason: str) -> None:
        """Close its socket, without waiting for it."""
        socket = self.gone()
        if socket is not None:
            closing = asyncio.create_task(_close(socket, code, reason))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)

    def gone(self) -> Socket | None:
        """Note that it is not connected any more; return what was its socket."""
        socket, self.socket = self.socket, None
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()
        self._sender = None
        return socket

    def _too_slow(self) -> None:
        log.warning("worker %s reads too slowly and is cut off", self.client_id)
        self.disconnect(TOO_SLOW, "messages are read too slowly")

    async def _send(self, socket: Socket, outbox: asyncio.Queue[str]) -> None:
        while True:
            text = await outbox.get()
            try:
                await asyncio.wait_for(socket.send_text(text), SEND_TIMEOUT)
            except TimeoutError:
                return self._too_slow()
            except GONE:
                return  # the connection is gone; whoever reads from it says so


async def closed() -> None:
    """Return when all sockets that were to be closed are."""
    await asyncio.gather(*_closing)


async def _close(socket: Socket, code: int, reason: str) -> None:
    with suppress(TimeoutError, *GONE):
        await asyncio.wait_for(socket.close(code, reason), 5)


_closing: set[asyncio.Task[None]] = set()
