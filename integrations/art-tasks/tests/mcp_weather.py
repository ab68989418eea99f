"""An MCP server for the tests: python mcp_weather.py; it keeps no state but a list of notes."""

import os
import sys

from mcp.server import MCPServer

RAIN = {"Rome": 79, "Bergen": 202, "Cairo": 4}
server, notes = MCPServer("weather"), []


@server.tool()
def rainy_days(city: str) -> int:
    """Return the rainy days in a year."""
    if city not in RAIN:
        raise ValueError(f"no data for {city}")
    return RAIN[city]


@server.tool()
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def key() -> str:
    """Return the key that the server was given."""
    return os.environ.get("WEATHER_KEY", "none")


@server.tool()
def history() -> str:
    """Return much text."""
    return "rain " * 4000


@server.tool()
def leave() -> None:
    """End the server."""
    print("good bye", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def latin() -> str:
    """Print what isn't UTF-8 where the protocol is spoken."""
    sys.stdout.buffer.write(b"caf\xe9\n")
    sys.stdout.flush()
    return "printed"


@server.resource("weather://cities")
def cities() -> str:
    """The cities that are known."""
    return ", ".join(RAIN)


if __name__ == "__main__":
    server.run()
