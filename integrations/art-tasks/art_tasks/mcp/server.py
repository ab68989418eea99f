"""An MCP server that a command starts or a URL reaches, through the official SDK."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from art_core.errors import ConfigError
from art_core.plugin_api import without_keys
from art_core.types import JsonDict
from art_tasks.mcp import connection
from art_tasks.mcp.connection import Connection, Lost

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
MOST_CHARS = 8000
"""Of a tool's result; the rest is cut off and counted."""
MOST_RESOURCES, RESOURCE_CHARS = 20, 2000
"""Resources that are read, and characters of each that are kept."""
INSTALL = "pip install 'mcp>=2'"
SECRET = re.compile(r"\?\S*|(?<=://)[^/@\s]+@")
"""Parts of a URL that may be a key."""
UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
"""What providers refuse in the name of a tool."""
NAME_CHARS = 64


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
        if wrong := next((name for name in self.env if not name.isidentifier()), None):
            name = wrong.partition("=")[0]
            raise ConfigError(f"env takes names of variables, without values: export {name}=..., and pass {name}")
        self._variables = {name: _with_variables(f"${{{name}}}") for name in self.env}
        self._url = _with_variables(address) if self.is_url else ""
        self._sent = {name: _with_variables(value) for name, value in self.headers.items()}
        try:
            self._command = [] if self.is_url else shlex.split(address)
        except ValueError as error:
            raise ConfigError(f"can't parse the command of the MCP server, {address!r}: {error}") from None
        if not self.is_url and not self._command:
            raise ConfigError("the address of the MCP server is empty; pass a command or a URL")
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Server, (self.address, self.env, self.headers)  # without connections and keys

    def __str__(self) -> str:
        """The address without what may be a key."""
        if self.is_url:
            return SECRET.sub(lambda found: "?..." if found[0].startswith("?") else "...@", self.address)
        return without_keys(self.address)

    async def tools(self) -> list[JsonDict]:
        """Return the tools in OpenAI's form."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for name, tool in (await self._tools()).items()
        ]

    async def resources(self) -> tuple[dict[str, str], int]:
        """Return the beginnings of the first resources that are text, by address, and the number of those that can't be read."""
        from mcp.shared.exceptions import MCPError

        async def listed(client: Client) -> list[Any]:
            has = client.server_capabilities.resources is not None
            return await _pages(client.list_resources, "resources") if has else []

        texts, unread = {}, 0
        for each in (await self._read(listed))[:MOST_RESOURCES]:
            address = str(each.uri)
            try:
                read = await self._read(lambda client, address=address: client.read_resource(address))
            except MCPError:
                unread += 1
                continue
            if text := "\n".join(part.text for part in read.contents if getattr(part, "text", None)):
                texts[address] = cut(text, RESOURCE_CHARS)
        return texts, unread

    async def call(self, name: str, arguments: JsonDict) -> str:
        """Call a tool and return its result, or its error, as text. Raises AgentError if the server ends or can't be reached."""
        from mcp.shared.exceptions import MCPError

        tool = (await self._tools()).get(name)
        if tool is None:
            return f"Error: unknown tool {name!r}"

        async def called(client: Client) -> Any:
            return await client.call_tool(tool.name, arguments)

        try:
            result = await self._request(called, connection.CALL_SECONDS)
        except (MCPError, RuntimeError) as error:  # RuntimeError: the result doesn't fit the tool's own schema
            return f"Error: {error}"
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return cut(f"Error: {text}" if result.is_error else text, MOST_CHARS)

    async def close(self) -> None:
        """End the connection of this event loop, and the process if there is one."""
        if asyncio.get_running_loop() in self._connections:
            await self._connection().close()

    async def _tools(self) -> dict[str, Any]:
        """Return the SDK's tools by their names for models. They are listed once, so that a rollout's prompts don't change."""

        async def listed(client: Client) -> list[Any]:
            has = client.server_capabilities.tools is not None
            return await _pages(client.list_tools, "tools") if has else []

        if self._connection().tools is None:
            found = {UNUSUAL.sub("_", tool.name)[:NAME_CHARS]: tool for tool in await self._read(listed)}
            self._connection().tools = found
        return self._connection().tools or {}

    async def _read(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """Return the answer to what changes nothing, and so can be asked again."""
        return await self._request(ask, connection.LIST_SECONDS, repeatable=True)

    async def _request(self, ask: Callable[[Client], Awaitable[T]], seconds: float, *, repeatable: bool = False) -> T:
        """Return the answer. If the connection is lost, ask again over a new one, unless the server may have acted already."""
        try:
            return await self._connection().request(ask, seconds)
        except Lost as lost:
            if not (repeatable or lost.unread):
                raise
            return await self._connection().request(ask, seconds)

    def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            try:
                import mcp  # noqa: F401
            except ImportError as error:
                raise ConfigError(
                    f"an MCP server needs the package mcp, version 2 or newer ({error}): {INSTALL}"
                ) from error

            def forget(ended: Connection) -> None:
                if self._connections.get(loop) is ended:
                    del self._connections[loop]

            self._connections[loop] = Connection(str(self), self._connected, forget)
        return self._connections[loop]

    @asynccontextmanager
    async def _connected(self, said: TextIO) -> AsyncIterator[Client]:
        """Yield a connected client. A command's standard error and a URL's HTTP errors are written to ``said``."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        if not self.is_url:
            command, *arguments = self._command
            parameters = StdioServerParameters(
                command=command, args=arguments, env=self._variables or None, encoding_error_handler="replace"
            )
            async with Client(stdio_client(parameters, errlog=said)) as client:
                yield client
            return

        async def note(response: Any) -> None:
            if response.is_error:  # the SDK's error doesn't name the status
                said.write(f"{response.status_code} {response.reason_phrase}\n")

        async with create_mcp_http_client(self._sent) as http:
            http.event_hooks["response"].append(note)
            async with Client(streamable_http_client(self._url, http_client=http)) as client:
                yield client


def _with_variables(text: str) -> str:
    """Return a text with the values of the environment variables that it names as ``$NAME`` or ``${NAME}``."""
    try:
        return string.Template(text).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"the environment variable {error.args[0]}, which the MCP server should get, isn't set"
        ) from None
    except ValueError:
        raise ConfigError("write $$ for a $ that doesn't begin the name of an environment variable") from None


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
