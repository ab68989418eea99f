"""An MCP server at a URL, which wants a token."""

from collections.abc import Iterator
from contextlib import contextmanager

from http_server import serving_app
from starlette.responses import PlainTextResponse


@contextmanager
def at_url(token: str) -> Iterator[str]:
    """Serve one tool from a thread, and give the URL."""
    from mcp.server import MCPServer

    weather = MCPServer("weather")
    weather.tool()(rainy_days)
    app = weather.streamable_http_app()

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != f"Bearer {token}".encode():
            return await PlainTextResponse("who are you?", status_code=401)(scope, receive, send)
        return await app(scope, receive, send)

    with serving_app(guarded, lifespan="on") as address:
        yield f"{address}/mcp"


def rainy_days(city: str) -> int:
    """Return the rainy days in a year."""
    return {"Rome": 79, "Bergen": 202, "Cairo": 4}[city]
