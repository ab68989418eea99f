"""A server process, worker processes and a faulty proxy between them, and what has to be true of the run's file at the end.

Knows nothing about which faults there are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import aiohttp
from faulty_proxy import FaultyProxy

from art_core.loop.resume_plans import finished_trajectories, group_id
from art_core.store import Store
from art_core.types import Trajectory

HERE = Path(__file__).parent
CALLS = 3
"""Of every run of the agents in ``fault_agents.py``."""
NOT_NEEDED = {it.name for it in entry_points(group="art")} - {"openai", "server", "embedded"}
"""Plugins whose frameworks would take seconds to load in every process."""


class Setting:
    """``async with`` starts the proxy, and at its end ends every process that was started here."""

    def __init__(self, folder: Path, *, lease: float = 30.0, settings: dict[str, str] | None = None) -> None:
        self.folder, self.run_dir, self.lease = folder, folder / "run", lease
        self.settings = settings or {}
        self.server: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._held = socket.socket()  # until the proxy has a port of its own: it must not be given this one
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.proxy = FaultyProxy(self.port)

    async def __aenter__(self) -> Setting:
        with self._held:
            await self.proxy.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        processes = [it for it in (*self.workers.values(), self.server) if it is not None]
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in processes:
            await asyncio.to_thread(process.wait)
        await self.proxy.__aexit__()

    def log(self, name: str) -> str:
        """Return what a process has printed so far."""
        return (self.folder / f"{name}.log").read_text()

    def start_server(self, *command: str) -> None:
        """Start the server, again where there was one. ``command`` replaces the stand-in."""
        given = [f"{name}={value}" for name, value in self.settings.items()]
        stand_in = [str(HERE / "fault_server.py"), str(self.run_dir), str(self.port), str(self.lease), *given]
        self.server = self._start("server", *(command or stand_in))

    async def served(self) -> None:
        """Return when the server answers."""
        async with aiohttp.ClientSession() as http:
            while True:
                assert self.server.poll() is None, self.log("server")
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"http://127.0.0.1:{self.port}/status", timeout=aiohttp.ClientTimeout(5)) as it:
                        if it.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def status(self) -> dict[str, Any]:
        """Return what ``/status`` says, asked past the proxy."""
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self.port}/status") as answer:
            return await answer.json()

    def start_worker(self, name: str, agent: str = "fault_agents.py:patient", *options: str) -> subprocess.Popen[bytes]:
        """Start a worker that reaches the server through the proxy."""
        address, path = f"ws://127.0.0.1:{self.proxy.port}", str(HERE / agent)
        started = self._start(name, "-m", "art_cli", "worker", address, "--id", name, "--agent", path, *options)
        self.workers[name] = started
        return started

    async def connected(self, count: int) -> None:
        """Return when so many workers are connected."""
        while (await self.status())["active_clients"] < count:
            dead = [name for name, it in self.workers.items() if it.poll() is not None]
            assert not dead, f"{dead[0]}: {self.log(dead[0])}"
            await asyncio.sleep(0.05)

    def kill_server(self, number: int = signal.SIGKILL) -> None:
        """End the server and wait for it."""
        self.server.send_signal(number)
        self.server.wait(60)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                env={
                    **os.environ, "FAULTS": str(self.folder), "PYTHONUNBUFFERED": "1", "COLUMNS": "200",
                    "ART_DISABLE_PLUGINS": ",".join(NOT_NEEDED),
                },
            )  # fmt: skip


def check_runs(run_dir: Path, key: str, tasks: list[str], size: int) -> list[list[Trajectory]]:
    """Assert that every run of a collection was finished once, none by an error, with the calls that its agent made.

    Returns the trajectories by place.
    """
    with Store(run_dir / "run.sqlite") as store:
        groups = [finished_trajectories(store, group_id(f"job/{key}", place)) for place in range(len(tasks))]
        assert [len(group) for group in groups] == [size] * len(tasks), "a run was lost, or made twice"
        for task, group in zip(tasks, groups, strict=True):
            for trajectory in group:
                assert trajectory.error is None, trajectory.error
                check_calls(trajectory, task)
        names = Counter(trajectory.output["name"] for group in groups for trajectory in group)
        assert set(names.values()) == {1}, "a run of an agent stands for two"
        return groups


def check_calls(trajectory: Trajectory, task: str) -> None:
    """Assert that the calls are those that the agent made, in its order, with the answers that it saw."""
    output, calls = trajectory.output, trajectory.calls
    assert trajectory.task == output["task"] == task
    assert len(calls) == len(output["answers"]) == CALLS, [call.response for call in calls]
    first = {"role": "user", "content": f"{task} {output['name']}"}
    for turn, call in enumerate(calls):
        assert len(call.request["messages"]) == 2 * turn + 1
        assert call.request["messages"][0] == first, "a call of another run"
        assert call.response["content"] == output["answers"][turn], "the agent saw another answer"


def check_file(run_dir: Path, steps: int) -> dict[str, int]:
    """Assert that the file is whole and has so many steps; return how the rollouts ended, counted."""
    with sqlite3.connect(run_dir / "run.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        ended: dict[str, int] = defaultdict(int)
        for finished, error in db.execute("SELECT finished, error FROM rollouts"):
            ended[(error or "well").partition(":")[0] if finished else "open"] += 1
    db.close()
    with Store(run_dir / "run.sqlite") as store:
        assert sorted({step for step, _ in store.steps()}) == list(range(1, steps + 1))
    return dict(ended)
