"""Agents of the tests, as Ray workers import them."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx


async def ask(address):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post(f"{address.base_url}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]


async def saying(given, address):
    await ask(address)
    return f"{given}, said {os.getpid()}"


def blocking(given, address):
    """Returns when it slept."""
    asyncio.run(ask(address))
    begun = time.monotonic()
    time.sleep(0.3)
    return begun, time.monotonic()


async def failing(given, address):
    await ask(address)
    raise KeyError(f"no  such\nthing as {given}")


async def leaving(given, address):
    await ask(address)
    if given == "panics":
        raise Panic("enough")
    if given == "cancelled":
        tool = asyncio.ensure_future(asyncio.sleep(60))
        tool.cancel()
        await tool
    raise SystemExit("enough")


class Panic(BaseException):
    """As extensions in Rust and test runners raise, but without words."""

    def __str__(self):
        return None


class Unpickled:
    """An output that cannot be pickled."""

    def __init__(self):
        self.lock = asyncio.Lock()

    def __reduce__(self):
        raise TypeError("not me")

    def __repr__(self):
        return "what was found"


async def unpickled(given, address):
    await ask(address)
    return {"found": Unpickled(), "n": 1}


async def murdered(given, address):
    """Ends its own process, once; ``given`` is a folder."""
    await ask(address)
    mark = Path(given) / "murdered"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.5)
    return os.getpid()


async def waiting(given, address):
    """Notes in a folder that it was cancelled."""
    await ask(address)
    (Path(given) / f"begun-{address.rollout_id}").touch()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        (Path(given) / f"cancelled-{address.rollout_id}").touch()
        raise


def made():
    """Makes an agent that cannot be pickled."""
    found = Unpickled()

    async def agent(given, address):
        await ask(address)
        return f"{given} {found}"

    return agent
