"""Processes that ``bench/server.py`` starts: a server whose engine answers at once, and processes full of workers.

The workers measure how long the agents' calls take. A separate module, because the engine is sent to the proxy's process by its
name.
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
"""Calls each way by one agent while nothing else runs, for what the path through the server adds."""


class Here:
    """Registers the engine by a name, so that it runs in the proxy's process."""

    @hookimpl
    def register_engines(self, register: Any) -> None:
        # Under its module's name, not as __main__.
        register("bench", importlib.import_module("bench.server_roles").engine)


def engine(folder: str, config: Any) -> Any:
    """Return an engine that answers at once and stores nothing."""
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

    settings = {"engine": "bench", "learner": CountingLearner(), "plugins": Plugins(Here()), "port": options.proxy}
    await serve_forever(Plan(Path(options.run_dir), port=options.port, settings=settings))


async def work(options: argparse.Namespace) -> None:
    """Run ``--workers`` workers until they are shut down; then write how long their calls took."""
    from art_server import TrainingClient

    agent = Agent(options.calls, f"http://127.0.0.1:{options.proxy}")
    url = f"ws://127.0.0.1:{options.port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as agent.http:
        clients = [
            TrainingClient(f"{options.prefix}-{number}", url, agent=agent, workers=options.capacity)
            for number in range(options.workers)
        ]
        await asyncio.gather(*(client.run() for client in clients))
    result = {"finished": sum(client.finished for client in clients), "times": agent.times, "alone": agent.alone}
    Path(options.out).write_text(json.dumps(result))


class Agent:
    """Makes ``calls`` model calls per episode."""

    http: aiohttp.ClientSession

    def __init__(self, calls: int, proxy: str) -> None:
        self._calls, self._proxy, self._turn = calls, proxy, itertools.count()
        self.times: dict[str, list[float]] = {"server": [], "proxy": []}
        self.alone: dict[str, list[float]] = {"server": [], "proxy": []}

    async def __call__(self, task: Any, address: Any) -> str:
        alone = task == "alone"
        messages = [{"role": "user", "content": f"{PROMPT} {task}"}]
        for _ in range(2 * ALONE if alone else self._calls):
            way = ("server", "proxy")[next(self._turn) % 2]
            base_url = address.base_url if way == "server" else f"{self._proxy}/rollouts/{address.rollout_id}/v1"
            begun = time.perf_counter()
            async with self.http.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                completion = await answer.json()
            (self.alone if alone else self.times)[way].append(time.perf_counter() - begun)
            answer.raise_for_status()
            if not alone:
                messages = [
                    *messages,
                    completion["choices"][0]["message"],
                    {"role": "user", "content": "Are you sure?"},
                ]
        return task if alone else f"answer to {task}"


def parse(arguments: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=2, help="model calls per episode; 0: none")
    parser.add_argument("--capacity", type=int, default=1, help="concurrent episodes per worker")
    parser.add_argument("--group-size", type=int, default=10)
    parser.add_argument("--processes", type=int, default=4, help="processes that run the workers")
    parser.add_argument("--keep", help="folder to keep the run in; removed otherwise")
    for name in ("port", "proxy", "run-dir", "prefix", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, type=int if name in ("port", "proxy") else str)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    roles = importlib.import_module("bench.server_roles")  # under its module's name, not as __main__
    asyncio.run({"server": roles.serve, "worker": roles.work}[sys.argv[1]](parse(sys.argv[2:])))
