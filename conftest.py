"""What holds for every test, and the rule that keeps the quick tests quick."""

import asyncio
import gc
import os
import platform
import resource
import signal

import pytest
import uvicorn
import warm
from hypothesis import HealthCheck, settings
from trap_network import trap_network  # noqa: F401 - a fixture; sets the authority before any client is imported

from art_core.runtime.memory import no_garbage_collection
from art_core.serving import process

# None is measured against a clock, because a machine may be busy with something else.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")

# A shell that starts the tests in the background makes them ignore SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Typer reads it when it is imported: on GitHub's runners it would print colours that no terminal shows.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
os.environ.pop("FORCE_COLOR", None)


async def _main_loop(server: uvicorn.Server) -> None:
    """uvicorn checks ten times a second whether it must end, and hundreds of tests wait for that."""
    ticks = 0
    while not await server.on_tick(ticks):
        await asyncio.sleep(0.005)
        ticks += 1


uvicorn.Server.main_loop = _main_loop

process._begin = warm.begin


@pytest.fixture
def cold_starts(monkeypatch):
    """Serving processes of this test are started as they are outside the tests."""
    monkeypatch.setattr(process, "_begin", warm.cold_begin)


@pytest.fixture
def not_at_the_wire(monkeypatch):
    """In this test art-http redirects nothing."""
    monkeypatch.setattr("art_http.SENDERS", {})
    monkeypatch.setattr("art_core.attribution.guard._senders", {})


# The first client that asks for it would start a process, uname, in whichever test comes first. Python keeps the answer.
platform.processor()

HEAVY = ("system", "engines", "long")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Collection imports every framework, and garbage collection would take a tenth of it."""
    with no_garbage_collection():
        collected = yield
    gc.freeze()  # a full collection, which tests and pytest's own cleanup ask for, would visit all of it for a second
    return collected


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with the files that take long, so that the workers end together. After ``-m``, hence last."""
    seconds = dict.fromkeys((item.path for item in items), 0)
    for item in items:
        limit = item.get_closest_marker("timeout")
        heavy = any(map(item.get_closest_marker, HEAVY))
        seconds[item.path] = max(seconds[item.path], limit.args[0] if limit else 1 if heavy else 0)
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a quick test that starts a process: its place is among the system tests."""
    before = _children_seconds()
    result = yield
    if not any(map(item.get_closest_marker, HEAVY)) and _children_seconds() > before:
        pytest.fail("this test starts a process, so it needs @pytest.mark.system")
    return result


def _children_seconds() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
