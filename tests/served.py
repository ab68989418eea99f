"""art_server's application over a real socket in a test's own event loop, without a model. Knows nothing about what is asked."""

from contextlib import asynccontextmanager

import uvicorn

import art_core as art
from art_core.capture import listen
from art_core.testing import CountingLearner, FakeEngine
from art_server.app import make_app
from art_server.serve import configured


def application(run_dir, *, token=None, **settings):
    """Return the application; the run is in ``run_dir``."""
    parts = {"engine": FakeEngine(), "learner": CountingLearner(), **settings}
    return make_app(lambda executor: art.open_run(run_dir, executor=executor, **parts), token=token)


@asynccontextmanager
async def serving(app, **settings):
    """Serve ``app`` as ``art serve`` does, and give its ``HOST:PORT``."""
    import asyncio

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
    from contextlib import nullcontext

    return nullcontext()
