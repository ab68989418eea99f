"""What ``bench/server.py`` starts: a server whose engine answers at once, and processes full of workers.

Knows nothing about what is measured of them, but how long the agents' calls took. A module of its own, because the engine
travels to the door's process by its name.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from art_core import hookimpl

ANSWER = "The invoice of March was sent on the fourth and is due in thirty days. " * 3
PROMPT = "You answer questions about a mailbox. " + "Name the message that you found it in. " * 15
ALONE = 400
"""Calls in turns that one agent makes while nothing else runs, for what the way through the server adds."""


class Here:
    """Offers the engine by a name, so that it runs where engines run: in the door's process."""

    @hookimpl
    def register_engines(self, register: Any) -> None:
        # By its module's name, not as __main__.
        register("bench", importlib.import_module("bench.server_roles").engine)


def engine(folder: str, config: Any) -> Any:
    """Return an engine that answers at once and keeps nothing."""
    from art_core.testing import FakeEngine

    made = FakeEngine(ANSWER)
    made.requests = _Nothing()
    return made


class _Nothing(list):
    def append(self, item: object) -> None:
        pass


async def serve(options: argparse.Namespace) -> None:
    """Serve until interrupted, as ``art serve`` does."""
    from art_core.plugins import Plugins
    from art_core.testing import CountingLearner
    from art_server.serve import Plan, serve_forever

    settings = {"engine": "bench", "learner": CountingLearner(), "plugins": Plugins(Here()), "port": options.door}
    await serve_forever(Plan(Path(options.run_dir), port=options.port, settings=settings))


async def work(options: argparse.Namespace) -> None:
    """Run ``--workers`` workers until they are told to end; then say how long their calls took."""
    from art_server import TrainingClient

    agent = Agent(options.calls, f"http://127.0.0.1:{options.door}")
    url = f"ws://127.0.0.1:{options.port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as agent.http:
        clients = [
            TrainingClient(f"{options.prefix}-{number}", url, agent=agent, workers=options.capacity)
            for number in range(options.workers)
        ]
        await asyncio.gather(*(client.run() for client in clients))
    told = {"finished": sum(client.finished for client in clients), "times": agent.times, "alone": agent.alone}
    Path(options.out).write_text(json.dumps(told))


class Agent:
    """Asks ``calls`` times and returns the last answer."""

    http: aiohttp.ClientSession

    def __init__(self, calls: int, door: str) -> None:
        self._calls, self._door, self._turn = calls, door, itertools.count()
        self.times: dict[str, list[float]] = {"server": [], "door": []}
        self.alone: dict[str, list[float]] = {"server": [], "door": []}

    async def __call__(self, given: Any, address: Any) -> str:
        alone = given == "alone"
        messages = [{"role": "user", "content": f"{PROMPT} {given}"}]
        for _ in range(2 * ALONE if alone else self._calls):
            way = ("server", "door")[next(self._turn) % 2]
            base_url = address.base_url if way == "server" else f"{self._door}/rollouts/{address.rollout_id}/v1"
            begun = time.perf_counter()
            async with self.http.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                told = await answer.json()
            (self.alone if alone else self.times)[way].append(time.perf_counter() - begun)
            answer.raise_for_status()
            if not alone:
                messages = [*messages, told["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
        return given if alone else f"answer to {given}"


def parse(arguments: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=2, help="of the model, an episode; 0: none")
    parser.add_argument("--capacity", type=int, default=1, help="episodes at a time of a worker")
    parser.add_argument("--group-size", type=int, default=10)
    parser.add_argument("--processes", type=int, default=4, help="that the workers live in")
    parser.add_argument("--keep", help="folder for the run, which is removed otherwise")
    for name in ("port", "door", "run-dir", "prefix", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, type=int if name in ("port", "door") else str)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    roles = importlib.import_module("bench.server_roles")  # by its module's name, not as __main__
    asyncio.run({"server": roles.serve, "worker": roles.work}[sys.argv[1]](parse(sys.argv[2:])))
