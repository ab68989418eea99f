"""A TCP proxy on loopback that fails as networks do, when it is told to."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["to server", "to client"]


@dataclass(eq=False)
class Link:
    """A connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    first: bytes = b""
    """What the client said first: of HTTP, the request line and headers."""

    def cut(self) -> None:
        """Reset both ends, as a router does that has forgotten the connection."""
        for writer in (self.client, self.server):
            with suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


@dataclass(eq=False)
class Trap:
    """What befalls the next piece that goes one way and contains ``text``, on a connection that began with ``first``."""

    direction: Direction
    text: bytes
    first: bytes
    passes: Callable[[bytes], bytes]
    """Which part of the piece still arrives, before the connection is cut."""
    sprung: asyncio.Event = field(default_factory=asyncio.Event)

    def catches(self, direction: Direction, piece: bytes, link: Link) -> bool:
        return self.direction == direction and self.text in piece and link.first.startswith(self.first)


class FaultyProxy:
    """Passes on what comes to ``127.0.0.1:port`` to ``target``, a port of this machine. ``async with`` begins and ends it."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        """Seconds that every piece takes longer."""
        self.links: set[Link] = set()
        self._traps: list[Trap] = []
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FaultyProxy:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.cut()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def accept(self) -> None:
        """Take connections, again where none were taken."""
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", self.port, backlog=256)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Take no further connections; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def cut(self, first: bytes = b"") -> None:
        """Reset all connections, or those that began with ``first``."""
        for link in list(self.links):
            if link.first.startswith(first):
                link.cut()

    def swallow(self) -> None:
        """Pass nothing on until ``go_on``; nobody is told."""
        self._open.clear()

    def go_on(self) -> None:
        """Pass on what was held back, and what comes."""
        self._open.set()

    def halve(self, direction: Direction, text: bytes, first: bytes = b"") -> asyncio.Event:
        """Let only half of the next piece that contains ``text`` through and cut its connection; the event says when."""
        return self._trap(direction, text, first, lambda piece: piece[: (piece.index(text) + len(piece)) // 2])

    def drop(self, direction: Direction, text: bytes, first: bytes = b"") -> asyncio.Event:
        """Let nothing of the next piece that contains ``text`` through and cut its connection; the event says when."""
        return self._trap(direction, text, first, lambda piece: b"")

    def _trap(self, direction: Direction, text: bytes, first: bytes, passes: Callable[[bytes], bytes]) -> asyncio.Event:
        trap = Trap(direction, text, first, passes)
        self._traps.append(trap)
        return trap.sprung

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._passed(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _passed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, forth)
        self.links.add(link)
        try:
            await asyncio.gather(
                self._pump(link, reader, forth, "to server"), self._pump(link, back, writer, "to client")
            )
        finally:
            self.links.discard(link)
            link.cut()

    async def _pump(
        self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with suppress(OSError):
            while piece := await source.read(65536):
                if direction == "to server" and not link.first:
                    link.first = piece
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._open.wait()
                trap = next((it for it in self._traps if it.catches(direction, piece, link)), None)
                if trap is not None:
                    self._traps.remove(trap)
                    sink.write(trap.passes(piece))
                    await sink.drain()
                    await asyncio.sleep(0.05)  # a reset overtakes what was sent a moment before
                    trap.sprung.set()
                    return link.cut()
                sink.write(piece)
                await sink.drain()
            await self._open.wait()
            if sink.can_write_eof():
                sink.write_eof()
