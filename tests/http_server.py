"""Endpoints served over real sockets, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute


@contextmanager
def serving(*routes: BaseRoute) -> Iterator[str]:
    """Serve Starlette routes from a thread, and give the address of the server."""
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
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
