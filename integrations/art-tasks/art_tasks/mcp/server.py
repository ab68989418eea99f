"""An MCP server that a command starts or a URL reaches, through the official SDK."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import shlex
import string
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from art_core.errors import AgentError, ConfigError
from art_core.plugin_api import without_keys
from art_core.types import JsonDict

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
START_SECONDS = 120.0
"""For a server to start: uvx and npx may have to download it."""
LIST_SECONDS = 60.0
"""For a list, or for a resource."""
MOST_CHARS = 8000
"""Of a tool's result; the rest is cut off and counted."""
MOST_RESOURCES, RESOURCE_CHARS = 20, 2000
"""Resources that are read, and characters of each that are kept."""
INSTALL = "pip install 'mcp>=2'"
QUERY = re.compile(r"\?\S*")


class Server:
    """Calls the tools of an MCP server: ``address`` is a URL, or a command such as ``uvx mcp-server-time``.

    A command is started once for each event loop, at the first request, and ends with the loop: all rollouts share the process
    and what it keeps. It gets PATH, HOME and the like, and those of this process's variables that ``env`` names. In a URL and in
    the values of ``headers``, ``$NAME`` stands for an environment variable, so that a key need not be in any file.

    Raises ConfigError if this can't work, and at the first request if the server doesn't start.
    """

    def __init__(self, address: str, env: Sequence[str] = (), headers: Mapping[str, str] | None = None) -> None:
        self.address, self.env, self.headers = address, tuple(env), dict(headers or {})
        self.is_url = address.startswith(("http://", "https://"))
        if self.is_url and self.env:
            raise ConfigError(
                "environment variables are for an MCP server that a command starts, not for a URL; drop env"
            )
        if self.headers and not self.is_url:
            raise ConfigError("headers are for an MCP server at a URL, not for a command; use env")
        self._variables = {name: _with_variables(f"${{{name}}}") for name in self.env}
        self._url = _with_variables(address) if self.is_url else ""
        self._sent = {name: _with_variables(value) for name, value in self.headers.items()}
        try:
            self._command = [] if self.is_url else shlex.split(address)
        except ValueError as error:
            raise ConfigError(f"can't parse the command of the MCP server, {address!r}: {error}") from None
        if not self.is_url and not self._command:
            raise ConfigError("the address of the MCP server is empty; pass a command or a URL")
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}

    def __str__(self) -> str:
        """The address without what may be a key."""
        return QUERY.sub("?...", self.address) if self.is_url else without_keys(self.address)

    async def tools(self) -> list[JsonDict]:
        """Return the tools in OpenAI's form."""

        async def listed(client: Client) -> list[Any]:
            return [] if client.server_capabilities.tools is None else await _pages(client.list_tools, "tools")

        return [
            {
                "type": "function",
                "function": {"name": it.name, "description": it.description or "", "parameters": it.input_schema},
            }
            for it in await self._request(listed)
        ]

    async def resources(self) -> tuple[dict[str, str], int]:
        """Return the beginnings of the first resources that are text, by address, and the number of those that can't be read."""
        from mcp.shared.exceptions import MCPError

        async def listed(client: Client) -> list[Any]:
            return (
                [] if client.server_capabilities.resources is None else await _pages(client.list_resources, "resources")
            )

        texts, unread = {}, 0
        for each in (await self._request(listed))[:MOST_RESOURCES]:
            address = str(each.uri)
            try:
                read = await self._request(lambda client, address=address: client.read_resource(address))
            except MCPError:
                unread += 1
                continue
            if text := "\n".join(part.text for part in read.contents if getattr(part, "text", None)):
                texts[address] = cut(text, RESOURCE_CHARS)
        return texts, unread

    async def call(self, name: str, arguments: JsonDict) -> str:
        """Call a tool and return its result, or its error, as text. Raises AgentError if the server has ended."""
        from mcp.shared.exceptions import MCPError

        try:
            result = await self._request(lambda client: client.call_tool(name, arguments), limited=False)
        except MCPError as error:
            return f"Error: {error}"  # an unknown tool, or arguments that don't fit: the model's mistake
        text = "\n".join(map(_text, result.content))
        return cut(f"Error: {text}" if result.is_error else text, MOST_CHARS)

    async def close(self) -> None:
        """End the connection of this event loop, and the process if there is one."""
        if connection := self._connections.pop(asyncio.get_running_loop(), None):
            await connection.close()

    async def _request(self, ask: Callable[[Client], Awaitable[T]], *, limited: bool = True) -> T:
        """Return the answer. If the server ends meanwhile, the next request starts it again, and AgentError is raised."""
        connection = self._connections.get(loop := asyncio.get_running_loop())
        if connection is None:
            connection = self._connections[loop] = _Connection(self)
        try:
            client = await connection.client()
        except ConfigError:
            self._forget(loop, connection)
            raise
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(LIST_SECONDS if limited else None):
                return await ask(client)
        except TimeoutError:
            raise AgentError(f"the MCP server {self} gave no answer within {LIST_SECONDS:g} s") from None
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            self._forget(loop, connection)
            await connection.close()
            raise AgentError(f"the MCP server {self} ended before it answered") from error

    def _forget(self, loop: asyncio.AbstractEventLoop, connection: _Connection) -> None:
        if self._connections.get(loop) is connection:
            del self._connections[loop]

    @asynccontextmanager
    async def connected(self, errors: TextIO) -> AsyncIterator[Client]:
        """Give a client; a command's standard error, and a URL's refusals, go to the file ``errors``."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        if not self.is_url:
            command, *arguments = self._command
            parameters = StdioServerParameters(command=command, args=arguments, env=self._variables or None)
            async with Client(stdio_client(parameters, errlog=errors)) as client:
                yield client
            return

        async def note(response: Any) -> None:
            if response.is_error:  # the SDK's error doesn't name the status
                errors.write(f"{response.status_code} {response.reason_phrase}\n")

        async with create_mcp_http_client(self._sent) as http:
            http.event_hooks["response"].append(note)
            async with Client(streamable_http_client(self._url, http_client=http)) as client:
                yield client


class _Connection:
    """One open connection. The SDK wants it closed by the task that opened it, so a task of its own holds it."""

    def __init__(self, server: Server) -> None:
        try:
            from mcp import Client  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"an MCP server needs the package mcp, version 2 or newer ({error}): {INSTALL}"
            ) from error
        loop = asyncio.get_running_loop()
        self._server = server
        self._ready: asyncio.Future[Client] = loop.create_future()
        # In a context of its own, because the connection doesn't belong to the rollout that needs it first.
        self._holder = loop.create_task(self._hold(), context=contextvars.Context())

    async def client(self) -> Client:
        """Return the client when it is connected. Raises ConfigError if it can't be."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Close it and wait until it is closed."""
        self._holder.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._holder})

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with asyncio.timeout(START_SECONDS) as limit, self._server.connected(errors) as client:
                    limit.reschedule(None)
                    self._ready.set_result(client)
                    await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001 - the boundary to the SDK, which raises groups of anything
                if not self._ready.done():
                    self._ready.set_exception(ConfigError(self._why(error, errors)))
            finally:
                self._ready.cancel()

    def _why(self, error: BaseException, errors: TextIO) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        errors.seek(0)
        last = "".join(errors.readlines()[-5:]).strip()
        took = f"it didn't start within {START_SECONDS:g} s" if isinstance(error, TimeoutError) else ""
        why = (took or f"{type(error).__name__}: {error}") + (f"; it printed:\n{last}" if last else "")
        return f"no connection to the MCP server {self._server}: {without_keys(why)}"


def _with_variables(text: str) -> str:
    """Return a text with the values of the environment variables that it names as ``$NAME`` or ``${NAME}``."""
    try:
        return string.Template(text).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"the environment variable {error.args[0]}, which the MCP server should get, isn't set"
        ) from None
    except ValueError:
        raise ConfigError("a $ that doesn't begin the name of an environment variable is written $$") from None


async def _pages(ask: Callable[..., Awaitable[Any]], what: str) -> list[Any]:
    """Return the items of all pages of a list."""
    page = await ask()
    items = [*getattr(page, what)]
    while page.next_cursor:
        page = await ask(cursor=page.next_cursor)
        items += getattr(page, what)
    return items


def _text(block: Any) -> str:
    """Return a block of a tool's result as text."""
    if block.type == "text":
        return block.text
    if block.type == "resource" and (text := getattr(block.resource, "text", None)):
        return text
    return f"[{block.type} {block.uri}]" if block.type == "resource_link" else f"[{block.type}]"


def cut(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters, and how many are missing."""
    return text if len(text) <= most else f"{text[:most]}\n[... {len(text) - most} more characters]"
