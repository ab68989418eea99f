"""A server on a real socket with a fake engine, and workers in this process."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import uvicorn
from desk import browser, desk  # noqa: F401 - fixtures
from fastapi import FastAPI

import art_core as art
from art_core.testing import CountingLearner, FakeEngine
from art_server import TrainingClient, TrainingServer, connect
from art_server.app import make_app


@dataclass
class Running:
    """A server."""

    url: str
    app: FastAPI
    token: str | None = None

    @property
    def roster(self) -> TrainingServer:
        return self.app.state.served.roster

    @property
    def run(self) -> art.Run:
        return self.app.state.served.run

    def connect(self, **options):
        return connect(self.url, token=self.token, **options)

    @asynccontextmanager
    async def worker(self, name, agent=None, **options):
        """A worker, connected."""
        client = TrainingClient(name, self.url, agent=agent, token=self.token, **options)
        work = asyncio.create_task(client.run())
        try:
            while name not in self.roster.active_clients:
                await asyncio.sleep(0.01)
                if work.done():
                    work.result()
            yield client
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


@pytest.fixture
def serving(tmp_path):
    """``async with serving() as server``; again on the same run folder."""

    @asynccontextmanager
    async def start(token=None, lease=5.0, port=0, **settings):
        settings = {"engine": FakeEngine(), "learner": CountingLearner(), **settings}
        app = make_app(tmp_path / "run", settings, token=token, lease=lease)
        config = uvicorn.Config(app, port=port, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
        server, listener = uvicorn.Server(config), config.bind_socket()
        serve = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
            if serve.done():
                serve.result()
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app, token)
        finally:
            server.should_exit = True
            await serve
            listener.close()

    return start
