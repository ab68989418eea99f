"""``art serve`` itself: what it says when it can't start."""

import logging

import pytest

from art_core.errors import ConfigError
from art_core.testing import CountingLearner, FakeEngine
from art_server.serve import Plan, serve_forever


@pytest.fixture(autouse=True)
def _loggers_as_before():
    art_server, uvicorn = logging.getLogger("art_server"), logging.getLogger("uvicorn.error")
    before, levels = list(art_server.handlers), (art_server.level, uvicorn.level)
    yield
    art_server.handlers[:] = before
    for logger, level in zip((art_server, uvicorn), levels, strict=True):
        logger.setLevel(level)


class BrokenEngine(FakeEngine):
    async def start(self):
        raise RuntimeError("the driver is too old")


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"engine": FakeEngine(), "loss": "nosuch"}, ConfigError, "nosuch"),
        ({"engine": BrokenEngine()}, RuntimeError, "the driver is too old"),
    ],
)
async def test_a_server_that_cannot_start_raises_the_reason(tmp_path, settings, error, reason):
    with pytest.raises(error, match=reason):
        await serve_forever(Plan(tmp_path / "run", port=0, settings={"learner": CountingLearner(), **settings}))
