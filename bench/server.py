"""Load on ``art serve``: many connected workers, many episodes in one ``collect``, each result in the store once.

    python -m bench.server [--workers 500] [--episodes 5000] [--calls 2] [--serve-options ...]

The server holds its run as always, with the proxy in its own process. The engine there answers at once, so that only the path is
measured. Workers are real ``TrainingClient``s with a socket each, many per process. An agent sends half of its calls to the
server, as agents do, and half straight to the proxy behind it, in turns. Linux only: CPU and memory are from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from art_core.capture import listen
from art_core.store import Store
from bench.server_roles import ALONE, parse
from bench.tables import table


class Process:
    """A process's figures from /proc."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def children(self) -> list[Process]:
        """Return its child processes."""
        return [Process(int(pid)) for it in self.folder.glob("task/*/children") for pid in it.read_text().split()]

    def cpu(self) -> float:
        """Return the CPU seconds that it has used."""
        fields = (self.folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return its private memory in MiB."""
        text = (self.folder / "smaps_rollup").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private")) / 1024

    def sockets(self) -> int:
        """Return the number of its open files."""
        return len(list((self.folder / "fd").iterdir()))


# --- the measurement


@contextlib.contextmanager
def role(name: str, options: argparse.Namespace, **more: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of ``server_roles`` in a role."""
    settings = {**vars(options), **more}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if value is not None]
    process = subprocess.Popen([sys.executable, "-m", "bench.server_roles", name, *arguments])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(listen("127.0.0.1", 0)).getsockname()[1] for _ in range(count)]


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, collect, and return the measurements."""
    from art_server import connect

    options.port, options.proxy = free_ports(2)
    options.run_dir = str(folder / "run")
    share = [options.workers // options.processes] * options.processes
    share[0] += options.workers - sum(share)
    measured: dict[str, Any] = {"load": os.getloadavg()[0]}
    with contextlib.ExitStack() as stack:
        server = Process(stack.enter_context(role("server", options)).pid)
        run = await reached(connect, options.port)
        async with run:
            [proxy] = server.children()
            measured["before"] = server.memory(), proxy.memory()
            begun = time.perf_counter()
            outs = [folder / f"worker-{number}.json" for number in range(options.processes)]
            for number, (count, out) in enumerate(zip(share, outs, strict=True)):
                stack.enter_context(role("worker", options, workers=count, prefix=f"w{number}", out=out))
            while (await run.status())["active_clients"] < options.workers:
                await asyncio.sleep(0.2)
            measured["connect_seconds"] = time.perf_counter() - begun
            measured["connected"] = server.memory(), proxy.memory()
            measured["files"] = server.sockets(), proxy.sockets()
            if options.calls:
                cpu = server.cpu(), proxy.cpu()
                await run.collect(None, ["alone"], group_size=1, key="alone")
                measured["call"] = (server.cpu() - cpu[0]) / ALONE, (proxy.cpu() - cpu[1]) / (2 * ALONE)
            tasks = [f"task {number}" for number in range(options.episodes // options.group_size)]
            cpu, begun = (server.cpu(), proxy.cpu()), time.perf_counter()
            collecting = run.collect(
                None, tasks, group_size=options.group_size, key="load", allow_no_calls=True, step=1
            )
            groups = await collecting
            measured["seconds"] = time.perf_counter() - begun
            measured["cpu"] = server.cpu() - cpu[0], proxy.cpu() - cpu[1]
            measured["after"] = server.memory(), proxy.memory()
            measured["groups"] = len(groups), sum(len(group.trajectories) for group in groups)
            await shut_down(options.port)
            await wait_for(outs)
    measured["workers"] = [json.loads(out.read_text()) for out in outs]
    return measured


async def reached(connect: Any, port: int) -> Any:
    """Return the run once the server answers."""
    end = time.monotonic() + 120
    while True:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/status"):
                return connect(f"http://127.0.0.1:{port}")
        except aiohttp.ClientError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.2)


async def shut_down(port: int) -> None:
    """Shut every worker down."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.get("/api/workers") as answer:
            names = [worker["id"] for worker in await answer.json()]
        for name in names:
            async with http.post(f"/api/workers/{name}/shutdown"):
                pass


async def wait_for(outs: Sequence[Path]) -> None:
    """Return when the workers have written their times."""
    end = time.monotonic() + 60
    while not all(out.exists() and out.read_bytes().endswith(b"}") for out in outs):
        if time.monotonic() > end:
            raise SystemExit("the workers did not end")
        await asyncio.sleep(0.1)


def check(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Check that every result is in the store exactly once."""
    with Store(folder / "run" / "run.sqlite") as store:
        rollouts = [it for it in store.rollouts() if it.group != "job/alone/0"]
        done = [it for it in rollouts if it.finished and not it.error]
        sizes = Counter(it.group for it in done)
        calls = Counter(len(store.calls(it.rollout_id)) for it in done[:: max(1, len(done) // 500)])
        outputs = Counter(str(it.output) for it in done)
    files = sum(path.stat().st_size for path in (folder / "run").glob("run.sqlite*"))
    assert len(done) == options.episodes and set(sizes.values()) == {options.group_size}, (
        len(done),
        Counter(sizes.values()),
    )
    assert set(outputs.values()) == {options.group_size} and set(calls) == {options.calls}, (
        outputs.most_common(3),
        calls,
    )
    return {
        "repeated": len(rollouts) - len(done),
        "bytes": files / options.episodes,
        "seconds": sorted(it.seconds for it in done),
    }


def at(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def report(options: argparse.Namespace, measured: dict[str, Any], stored: dict[str, Any]) -> None:
    """Print the tables."""
    seconds, cpu = measured["seconds"], measured["cpu"]
    rows: list[list[object]] = [
        ["workers, with a socket each", options.workers],
        ["episodes, each stored once", options.episodes],
        ["repeated", stored["repeated"]],
        ["model calls per episode", options.calls],
        ["seconds until all were connected", measured["connect_seconds"]],
        ["seconds of the collection", seconds],
        ["episodes/s", options.episodes / seconds],
        ["episode from hand-out to result, p50 ms", 1000 * at(stored["seconds"], 0.5)],
        ["... p99 ms", 1000 * at(stored["seconds"], 0.99)],
        ["server: CPU ms/episode", 1000 * cpu[0] / options.episodes],
        ["proxy: CPU ms/episode", 1000 * cpu[1] / options.episodes],
        ["server: share of one core", cpu[0] / seconds],
        *(
            [["CPU ms/call, server and proxy", f"{1000 * measured['call'][0]:.2f}, {1000 * measured['call'][1]:.2f}"]]
            if "call" in measured
            else []
        ),
        ["server: MiB started", measured["before"][0]],
        ["server: MiB with all connected", measured["connected"][0]],
        ["server: KiB/worker", 1024 * (measured["connected"][0] - measured["before"][0]) / options.workers],
        ["server: MiB after", measured["after"][0]],
        ["proxy: MiB before and after", f"{measured['before'][1]:.0f}, {measured['after'][1]:.0f}"],
        ["open files, server and proxy", f"{measured['files'][0]}, {measured['files'][1]}"],
        ["store: bytes/episode", stored["bytes"]],
        ["load of the machine before", measured["load"]],
    ]
    print(table(["what", "measured"], rows))
    for name, title in (("alone", f"one agent alone, {ALONE} calls each way in turns"), ("times", "under the load")):
        ways = {
            way: sorted(itertools.chain(*(worker[name][way] for worker in measured["workers"])))
            for way in ("server", "proxy")
        }
        if not all(ways.values()):
            continue
        rows = [[way, 1000 * at(t, 0.5), 1000 * at(t, 0.99), len(t)] for way, t in ways.items()]
        ratio = [rows[0][place] / rows[1][place] for place in (1, 2)]
        print(f"\na model call, {title}")
        print(table(["through", "p50 ms", "p99 ms", "calls"], [*rows, ["ratio", *ratio, None]]))


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-server-")))
        measured = asyncio.run(measure(options, folder))
        report(options, measured, check(folder, options))


if __name__ == "__main__":
    main(parse(description=__doc__))
