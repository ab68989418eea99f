"""A plain model provider on 127.0.0.1: what an agent talks to when nobody trains it. Knows nothing about rollouts."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from art_core.capture.dialect import Dialect
from art_core.capture.listening import address_of, http_server, listen
from art_core.capture.record import visible
from art_core.errors import UpstreamError
from art_core.testing.fakes import FakeEngine
from art_core.types import JsonDict

_CLOSE = {"connection": "close"}
_UUID = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")


@dataclass(frozen=True)
class Asked:
    """A request as it arrived; ids that differ from run to run are masked."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: str


class PlainProvider:
    """Answers ``{base_url}/chat/completions``, and the paths of installed dialects, with a FakeEngine's answers.

    Every connection ends with its answer: agents seldom close their clients, and an open one warns when it is collected.
    """

    def __init__(self, engine: FakeEngine, dialects: Mapping[str, Dialect]) -> None:
        self._engine = engine
        self._dialects = {"/v1/chat/completions": Dialect(), **dialects}
        self.base_url = ""
        """``http://127.0.0.1:PORT/v1``, while it runs."""
        self.asked: list[Asked] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[PlainProvider]:
        """Serve from a thread of its own, as a provider elsewhere would."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(routes=[Route("/{rest:path}", self._answer, methods=["GET", "POST"])])
        server = http_server(app)
        with listen("127.0.0.1", 0) as listener:
            self.base_url = f"{address_of('127.0.0.1', listener.getsockname()[1])}/v1"
            thread = threading.Thread(target=server.run, args=([listener],), name="plain-provider", daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join(10)

    @contextlib.contextmanager
    def callers(self) -> Iterator[set[threading.Thread]]:
        """Collect the threads that call while the block runs: those that connect, because every call connects anew."""
        threads: set[threading.Thread] = set()
        port, connect, own = urlsplit(self.base_url).port, socket.socket.connect, "connect" in vars(socket.socket)

        @functools.wraps(connect)
        def watched(connecting: socket.socket, address: Any) -> None:
            if isinstance(address, tuple) and address[1] == port:
                threads.add(threading.current_thread())
            connect(connecting, address)

        socket.socket.connect = watched
        try:
            yield threads
        finally:
            if own:
                socket.socket.connect = connect
            else:  # It was inherited, and is again.
                del socket.socket.connect

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        raw = (await request.body()).decode()
        self.asked.append(_asked(request, raw))
        dialect = self._dialects.get(request.url.path)
        if dialect is None:
            return JSONResponse(
                {"error": {"message": f"there is no {request.url.path} here"}}, status_code=404, headers=_CLOSE
            )
        body = json.loads(raw)
        try:
            asked = dialect.to_chat(body)
            if asked.get("stream"):
                chunks = self._engine.stream(asked)
                # The first chunk is waited for, because a refusal is a status and not an event.
                events = dialect.stream_from_chat(body, _from(await anext(chunks), chunks))
                return StreamingResponse(events, media_type="text/event-stream", headers=_CLOSE)
            return JSONResponse(dialect.from_chat(body, visible(await self._engine.chat(asked))), headers=_CLOSE)
        except UpstreamError as error:
            refusal = {"error": {"message": str(error), "code": error.code}}
            return JSONResponse(refusal, status_code=error.status, headers=_CLOSE)


async def _from(first: JsonDict, rest: AsyncIterator[JsonDict]) -> AsyncIterator[JsonDict]:
    yield visible(first)
    async for chunk in rest:
        yield visible(chunk)


def masked(text: str) -> str:
    """Return ``text`` without the ids that differ from run to run."""
    return _UUID.sub("ID", text)


def _asked(request: Any, raw: str) -> Asked:
    headers = tuple(sorted((name, masked(value)) for name, value in request.headers.items()))
    return Asked(request.url.path, headers, masked(raw))
