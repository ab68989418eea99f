"""Endpoints served over real sockets, for tests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute


def serving(*routes: BaseRoute) -> AbstractContextManager[str]:
    """Serve Starlette routes from a thread, and give the address of the server."""
    return serving_app(Starlette(routes=routes))


@contextmanager
def serving_app(app: Callable, *, lifespan: Literal["off", "on"] = "off") -> Iterator[str]:
    """Serve an ASGI application from a thread, and give the address of the server."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan=lifespan, timeout_graceful_shutdown=1)
    server, sock = uvicorn.Server(config), config.bind_socket()
    sock.listen()  # so that nothing is refused before the thread has begun
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
        assert not thread.is_alive(), "the server's loop hangs: did a test change the clock of all threads?"
