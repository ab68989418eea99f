"""``art gateway --route``: what a candidate costs per call, 500 streams open together, and whether any request fails.

    python -m bench.canary [--calls 10000]

Provider and candidate are stubs that answer at once (``bench/stub.py``). While the calls of the last table are made, the
candidate's share changes, the candidate is killed and started again, and the gateway is stopped and started again behind a socket
that its supervisor keeps open. Clients send a request again if its connection is lost, twice at most, as OpenAI's do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from art_core.store import Store
from bench.capture import GATEWAY, QUESTION, SYSTEM, TURNS, Load, Side, exchange, free_port, post, running, wait_for
from bench.tables import table

RETRIES = 2
LANES = 32
OPEN_STREAMS = 500
HELD = 10.0
"""Seconds for which each of them stays open."""


def stub(stack: contextlib.ExitStack, port: int, hold: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a server that answers at once, but keeps a stream open for ``hold`` seconds."""
    command = [sys.executable, "-m", "bench.stub", "--port", str(port), "--hold", str(hold)]
    return stack.enter_context(running(command, f"http://127.0.0.1:{port}/v1/models"))


def start(
    folder: Path, live: str, mine: str | None, listener: socket.socket, share: str = "50%"
) -> subprocess.Popen[bytes]:
    """Start a gateway on a socket that this process keeps, in front of ``live`` and, if set, ``mine``."""
    upstreams = ["--upstream", live]
    if mine:
        upstreams = ["--upstream", f"live={live}", "--upstream", f"mine={mine}", "--route", f"mine={share}"]
    command = [sys.executable, "-c", GATEWAY, "--record-text", *upstreams, "--run-dir", str(folder)]
    fd = listener.fileno()
    shell = f'exec 3<&{fd}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"'
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", "-c", shell, *command], pass_fds=[fd], **quiet)
    wait_for(process, f"{address(listener)}/health", "art gateway")
    return process


def address(listener: socket.socket) -> str:
    """Return the URL of a socket."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def side(stack: contextlib.ExitStack, name: str, folder: Path, live: str, mine: str | None, share: str = "50%") -> Side:
    """Start a gateway that ends with ``stack``."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
    process = start(folder, live, mine, listener, share)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return Side(name, process, [f"{address(listener)}/rollouts/run-{{}}/v1"])


async def cost(folder: Path, live: str, mine: str, rounds: int, calls: int) -> None:
    """Print the CPU of a call without a candidate, with one that has no share, and with one that answers half of the calls."""
    with contextlib.ExitStack() as stack:
        sides = [
            side(stack, name, folder / name.replace(" ", "-"), live, mine if share else None, share)
            for name, share in (("no candidate", ""), ("a candidate with 0%", "0%"), ("a candidate with 50%", "50%"))
        ]
        load = Load()
        for stream in (False, True):
            found = {each.name: [] for each in sides}
            for number in range(rounds + 1):
                for each in sides[:: -1 if number % 2 else 1]:
                    measured = await load.run(each, calls if number else 100, LANES, stream=stream)
                    found[each.name] += [measured] * (number > 0)
            rows = []
            for name, of in found.items():
                cpu, speed = (statistics.median(getattr(it, what) for it in of) for what in ("cpu", "calls_per_second"))
                rows.append([name, cpu, speed, sum(it.failed for it in of)])
            print(f"\n{'streaming' if stream else 'not streaming'}, {LANES} at a time; medians of {rounds} rounds")
            print(table(["side", "CPU ms/call", "calls/s", "failed"], rows))
        measured = await load.run(sides[-1], 1000, OPEN_STREAMS, stream=True)
        speed = f"{measured.calls_per_second:.0f} calls/s"
        print(f"\n{OPEN_STREAMS} streams at a time, a candidate with 50%: {measured.failed} of 1000 failed, {speed}")


async def held(folder: Path) -> None:
    """Print how many streams were open together, and how many failed."""
    with contextlib.ExitStack() as stack:
        live, mine = free_port(), free_port()
        for port in (live, mine):
            stub(stack, port, HELD)
        gateway = side(stack, "held", folder, f"http://127.0.0.1:{live}/v1", f"http://127.0.0.1:{mine}/v1")
        calls = OPEN_STREAMS * TURNS  # a lane sends a conversation's calls one after the other
        work = asyncio.create_task(Load().run(gateway, calls, OPEN_STREAMS, stream=True))
        status = f"{gateway.urls[0].partition('/rollouts')[0]}/status"
        most = 0
        while not work.done():
            with urllib.request.urlopen(status) as answer:
                most = max(most, orjson.loads(answer.read())["in_flight"])
            await asyncio.sleep(0.5)
        print(f"\nstreams of {HELD:g} s: at most {most} open together, {work.result().failed} of {calls} failed")


class Client:
    """Makes the calls of conversations, and sends a request again if its connection is lost."""

    def __init__(self, url: str, calls: int) -> None:
        self._url = urlsplit(url)
        self._calls = calls
        self._conversations = 0
        self.done = self.failed = self.sent_again = 0

    async def run(self) -> None:
        """Make all calls."""
        await asyncio.gather(*(self._lane() for _ in range(LANES)))

    async def _lane(self) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        body = orjson.dumps({"model": "stub", "messages": messages, "logprobs": True, "stream": False})
        connection = None
        while self.done < self._calls:
            self._conversations += 1
            path = f"/rollouts/run-{self._conversations}/v1"
            for _ in range(TURNS):
                self.done += 1
                for attempt in range(RETRIES + 1):
                    try:
                        connection = connection or await asyncio.open_connection(self._url.hostname, self._url.port)
                        answered = await exchange(*connection, path, "none", body)
                        self.failed += not answered
                        break
                    except (OSError, asyncio.IncompleteReadError):
                        if connection is not None:
                            connection[1].close()
                        connection = None
                        self.sent_again += attempt < RETRIES
                        self.failed += attempt == RETRIES
        if connection is not None:
            connection[1].close()


async def disturb(folder: Path, live: str, mine_port: int, calls: int) -> None:
    """Make calls while everything around them changes, and print how many failed and whether all are recorded."""
    mine = f"http://127.0.0.1:{mine_port}/v1"
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with contextlib.ExitStack() as stack, listener:
        candidate, gateway = stub(stack, mine_port), start(folder, live, mine, listener)
        client = Client(address(listener), calls)
        work = asyncio.create_task(client.run())

        async def after(share: float) -> None:
            while client.done < share * calls and not work.done():
                await asyncio.sleep(0.01)

        for number, share in enumerate((0.1, 0.9, 0.3, 0.7, 0.5)):
            await after(0.05 + 0.05 * number)
            await asyncio.to_thread(post, f"{address(listener)}/routes", {"share": share})
        await after(0.35)
        candidate.kill()
        await after(0.5)
        stub(stack, mine_port)
        for share in (0.6, 0.8):
            await after(share)
            gateway.send_signal(signal.SIGTERM)
            await asyncio.to_thread(gateway.wait)
            gateway = await asyncio.to_thread(start, folder, live, mine, listener)
        await work
        gateway.send_signal(signal.SIGTERM)
        gateway.wait()
    with Store(folder / "run.sqlite") as store:
        [(recorded,)] = store.rows("SELECT count(*) FROM calls")
        split = dict(store.rows("SELECT split, count(*) FROM rollouts GROUP BY split"))
    print(f"\n{client.done} calls: {client.failed} failed, {client.sent_again} sent again, {recorded} recorded")
    print(f"conversations: {split}")


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10_000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-canary-")))
        live, mine = free_port(), free_port()
        stub(stack, live)
        provider = f"http://127.0.0.1:{live}/v1"
        if options.rounds:
            stub(stack, mine)
            asyncio.run(held(folder / "held"))
            asyncio.run(cost(folder, provider, f"http://127.0.0.1:{mine}/v1", options.rounds, options.calls // 5))
        asyncio.run(disturb(folder / "disturbed", provider, free_port(), options.calls))


if __name__ == "__main__":
    main()
