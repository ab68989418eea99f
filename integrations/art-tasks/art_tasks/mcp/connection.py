"""A connection to an MCP server, and what its errors mean."""

from __future__ import annotations

import asyncio
import contextvars
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from art_core.errors import AgentError, ConfigError
from art_core.plugin_api import without_keys

if TYPE_CHECKING:
    from mcp import Client
    from mcp.shared.exceptions import MCPError

T = TypeVar("T")
START_SECONDS = 120.0
"""For a server to start: uvx and npx may have to download it."""
LIST_SECONDS, CALL_SECONDS = 60.0, 300.0
"""For a list or a resource, and for a tool."""
LAST_LINES = 5
REFUSED = "Server returned an error response"
UNREAD = ("Session terminated", "Not Found")
"""What the SDK says of a URL that answered with an HTTP error, and with 404: the session, or the page, is gone."""


class Connection:
    """An open connection. The SDK wants it closed by the task that opened it, so a task of its own holds it.

    ``connected`` opens it: given a file for what the server says besides its answers, it gives the client.
    """

    def __init__(
        self,
        name: str,
        connected: Callable[[TextIO], AbstractAsyncContextManager[Client]],
        ended: Callable[[Connection], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.tools: dict[str, Any] | None = None
        """The server's tools, once they are listed."""
        self._name, self._connected, self._ended = name, connected, ended
        self._said: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the holder closes it
        self._ready: asyncio.Future[Client] = loop.create_future()
        # In a context of its own, because the connection doesn't belong to the rollout that needs it first.
        self._holder = loop.create_task(self._hold(), context=contextvars.Context())

    async def request(self, ask: Callable[[Client], Awaitable[T]], seconds: float) -> T:
        """Return the answer. Raises ConfigError if the server can't be reached, and Lost if the connection breaks."""
        from mcp.shared.exceptions import MCPError

        client = await asyncio.shield(self._ready)
        try:
            async with asyncio.timeout(seconds):
                return await ask(client)
        except TimeoutError:
            raise AgentError(f"the MCP server {self._name} gave no answer within {seconds:g} s") from None
        except MCPError as error:
            if not is_lost(error):
                raise
            said = self._last_lines()  # before it is closed
            await self.close()
            raise Lost(
                f"the MCP server {self._name} ended or refused a request: {error}{said}", str(error) in UNREAD
            ) from error

    async def close(self) -> None:
        """Close it and wait until it is closed."""
        self._ended(self)
        self._holder.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._holder})

    async def _hold(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS) as limit, self._connected(self._said) as client:
                limit.reschedule(None)
                self._ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - the boundary to the SDK, which raises groups of anything
            if not self._ready.done():
                self._ready.set_exception(ConfigError(self._why(error)))
        finally:
            self._ended(self)
            self._ready.cancel()
            self._said.close()

    def _why(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        late = f"it didn't start within {START_SECONDS:g} s"
        why = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return f"no connection to the MCP server {self._name}: {without_keys(why)}{self._last_lines()}"

    def _last_lines(self) -> str:
        self._said.seek(0)
        last = "".join(self._said.readlines()[-LAST_LINES:]).strip()
        return f"; it said:\n{without_keys(last)}" if last else ""


class Lost(AgentError):
    """The server has ended or refused the request. ``unread``: it hasn't read it, so it can be repeated."""

    def __init__(self, text: str, unread: bool) -> None:
        super().__init__(text)
        self.unread = unread


def is_lost(error: MCPError) -> bool:
    """Whether an error is about the connection. Others are the server's answers: an unknown tool, wrong arguments, a failure."""
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR

    return error.code in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR) or str(error) in (REFUSED, *UNREAD)
