"""An MCP server at a URL, which wants a token."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from http_server import serving_app
from starlette.responses import PlainTextResponse


@contextmanager
def at_url(token: str, refuses: list[int] | None = None) -> Iterator[str]:
    """Serve two tools from a thread, and give the URL. A status in ``refuses`` answers one call of the tool."""
    from mcp.server import MCPServer

    weather = MCPServer("weather")
    weather.tool()(rainy_days)
    weather.tool()(forecast)
    app = weather.streamable_http_app()

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != f"Bearer {token}".encode():
            return await PlainTextResponse("who are you?", status_code=401)(scope, receive, send)
        if refuses and dict(scope["headers"]).get(b"mcp-method") == b"tools/call":
            return await PlainTextResponse("no", status_code=refuses.pop())(scope, receive, send)
        return await app(scope, receive, send)

    with serving_app(guarded, lifespan="on") as address:
        yield f"{address}/mcp"


def rainy_days(city: str) -> int:
    """Return the rainy days in a year."""
    return {"Rome": 79, "Bergen": 202, "Cairo": 4}[city]


asked, may_answer = threading.Event(), threading.Event()


def forecast() -> str:
    """Return the weather, once ``may_answer`` is set."""
    asked.set()
    may_answer.wait(10)
    return "rain"
