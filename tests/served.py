"""art_server's application over a real socket in a test's own event loop, without a model."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import aiohttp
import uvicorn

from art_core.capture import listen
from art_core.testing import CountingLearner, FakeEngine
from art_server.app import make_app
from art_server.serve import configured

END = b"\r\n\r\n"
"""Of an answer's headers."""
SHAKE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
"""What makes a request a WebSocket's handshake."""


def application(run_dir, *, token=None, **settings):
    """Return the application; the run is in ``run_dir``."""
    parts = {"engine": FakeEngine(), "learner": CountingLearner(), **settings}
    return make_app(run_dir, parts, token=token)


@asynccontextmanager
async def serving(app, **settings):
    """Serve ``app`` as ``art serve`` does, and give its ``HOST:PORT``."""
    server, listener = uvicorn.Server(configured(app, **settings)), listen("127.0.0.1", 0)
    server.capture_signals = _no_signals
    with listener:
        task = asyncio.create_task(server.serve([listener]))
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            if task.done():
                await task
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def _no_signals():
    return contextlib.nullcontext()


@asynccontextmanager
async def served(tmp_path, token=None, app=None, **settings):
    app = app or application(tmp_path / "run", token=token)
    async with serving(app, **settings) as host, aiohttp.ClientSession(f"http://{host}") as http:
        yield app, host, http


async def raw(host, *parts, pause=0.0, wait=60.0, enough=None):
    """Send bytes as they are and return what comes back until the connection ends or ``enough`` was said, at most so long."""
    reader, writer = await asyncio.open_connection(*host.split(":"))
    answer = b""

    async def send():
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)

    sending = asyncio.create_task(send())
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(wait):
            while got := await reader.read(65536):
                answer += got
                if enough and enough in answer:
                    break
    sending.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer
