"""The cost of a model call through ``art gateway``, compared with LiteLLM's proxy and Agent Lightning's gateway.

    python -m bench.capture --litellm-python VENV/bin/python [--agl-python VENV/bin/python --agl-source FOLDER]

All are placed before the same stub, which answers at once (``bench/stub.py``), and are measured in one run, in turns; medians of
the rounds are printed. Ours records every call in a store on disk. The load comes over plain sockets, so no client library
counts. CPU is the process's own, from /proc. Sides whose Python is not passed are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from bench.tables import table

GATEWAY = "import typer; from art_gateway.command import gateway; typer.run(gateway)"
TURNS = 5
"""Calls of one rollout."""
SYSTEM = "You answer questions about a mailbox. " + " ".join(
    f"Rule {i}: name the message you found it in." for i in range(45)
)
QUESTION = "Message 12: the invoice of March is attached and is due in thirty days. " * 20
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Search or read the mailbox.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
    for name in ("search", "read", "answer")
]


@dataclass
class Side:
    """A measured process and its addresses."""

    name: str
    process: subprocess.Popen[bytes]
    urls: list[str]
    """Base URLs that the rollouts use in turn; ``{}`` in one is the rollout's number."""
    key: str = "none"
    streams: bool = True

    def cpu(self) -> float:
        """Return the CPU seconds that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return the resident MiB."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Measured:
    """One round of one side."""

    calls_per_second: float
    cpu: float
    """Milliseconds per call."""
    median: float
    """Milliseconds."""
    failed: int


class Load:
    """Sends calls over plain sockets, each rollout's one after the other."""

    def __init__(self) -> None:
        self._rollouts = 0

    async def run(self, side: Side, calls: int, lanes: int, *, stream: bool) -> Measured:
        """Send ``calls`` calls, ``lanes`` at a time."""
        body = orjson.dumps(
            {
                "model": "stub",
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
                "tools": TOOLS,
                "logprobs": True,
                "stream": stream,
            }
        )
        remaining, times, failed = [calls], [], [0]

        async def lane() -> None:
            address = urlsplit(side.urls[0])
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
            while remaining[0] > 0:
                self._rollouts += 1
                path = urlsplit(side.urls[self._rollouts % len(side.urls)].format(self._rollouts)).path
                turns = min(TURNS, remaining[0])
                remaining[0] -= turns
                for _ in range(turns):
                    start = time.perf_counter()
                    answered = await exchange(reader, writer, path, side.key, body)
                    failed[0] += not answered
                    times.append(time.perf_counter() - start)
            writer.close()

        cpu, start = side.cpu(), time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(lanes)))
        seconds = time.perf_counter() - start
        return Measured(calls / seconds, 1000 * (side.cpu() - cpu) / calls, 1000 * statistics.median(times), failed[0])


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, key: str, body: bytes
) -> bool:
    """Send one call and read its whole answer; return whether it succeeded."""
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, has_length, length = answer.partition(b"content-length:")
    if has_length:
        content = await reader.readexactly(int(length.partition(b"\r\n")[0]))
    else:
        content = await reader.readuntil(b"0\r\n\r\n")
    return answer.startswith(b"http/1.1 200") and b'"error"' not in content


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server; the block starts when it answers ``url``."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        command, env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"} | environment, **quiet
    )
    try:
        wait_for(process, url, f"{' '.join(command[:4])} ...")
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str, name: str) -> None:
    """Return when a server answers ``url``; end this program if it doesn't start."""
    end = time.monotonic() + 90
    while not answers(url):
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{name} did not start")
        time.sleep(0.2)


def answers(url: str) -> bool:
    """Return whether an HTTP server answers, with whatever status."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def post(url: str, body: object) -> None:
    """Send JSON and ignore the answer."""
    request = urllib.request.Request(url, orjson.dumps(body), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def start_litellm(stack: contextlib.ExitStack, python: str, upstream: str, folder: Path) -> Side:
    """Start LiteLLM's proxy with one worker."""
    port, key = free_port(), f"sk-{secrets.token_hex(16)}"
    config = folder / "litellm.yaml"
    model = f"{{model: openai/stub, api_base: '{upstream}', api_key: none}}"
    config.write_text(f"model_list: [{{model_name: stub, litellm_params: {model}}}]\n")
    command = [
        str(Path(python).with_name("litellm")),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}/health/liveliness"
    process = stack.enter_context(running([*command, "--num_workers", "1"], url, LITELLM_MASTER_KEY=key))
    return Side("LiteLLM proxy", process, [f"http://127.0.0.1:{port}/v1"], key)


def start_agent_lightning(stack: contextlib.ExitStack, python: str, source: str, upstream: str, folder: Path) -> Side:
    """Start Agent Lightning's gateway, whose rollouts must be created beforehand and which doesn't stream."""
    base = f"http://127.0.0.1:{free_port()}"
    port = base.rpartition(":")[2]
    options = ["host=127.0.0.1", f"port={port}", "default_proxy.model_name=stub", f"hydra.run.dir={folder / 'hydra'}"]
    command = [python, "-m", "agentlightning.server", *options]
    process = stack.enter_context(running(command, f"{base}/healthz", PYTHONPATH=source))
    post(f"{base}/api/models", [{"model": "stub", "endpoint": upstream, "version": 1}])
    names = [f"r{number}" for number in range(64)]
    for name in names:
        post(f"{base}/api/rollouts", [{"input": {}, "rollout_id": name}])
    urls = [f"{base}/proxy/rollout/{name}/attempt/0/mode/train/openai/v1" for name in names]
    return Side("Agent Lightning 1.0 gateway", process, urls, streams=False)


def start_ours(stack: contextlib.ExitStack, upstream: str, folder: Path) -> Side:
    """Start ``art gateway``."""
    base = f"http://127.0.0.1:{free_port()}"
    options = ["--upstream", upstream, "--port", base.rpartition(":")[2], "--run-dir", str(folder / "run")]
    process = stack.enter_context(running([sys.executable, "-c", GATEWAY, *options], f"{base}/health"))
    return Side("art gateway", process, [f"{base}/rollouts/run-{{}}/v1"])


async def compare(sides: list[Side], rounds: int, calls: int, *, stream: bool) -> None:
    """Measure all sides in turns and print the table."""
    load, results = Load(), {side.name: ([], []) for side in sides if side.streams or not stream}
    chosen = [side for side in sides if side.name in results]
    for side in chosen:
        await load.run(side, 40, 4, stream=stream)
    for number in range(rounds):
        for side in chosen[:: -1 if number % 2 else 1]:
            slow = 10 if "LiteLLM" in side.name else 4 if "Lightning" in side.name else 1
            results[side.name][0].append(await load.run(side, max(calls // 5 // slow, 20), 1, stream=stream))
            results[side.name][1].append(await load.run(side, max(calls // slow, 64), 32, stream=stream))

    def middle(name: str, lanes: int, what: str) -> float:
        return statistics.median(getattr(measured, what) for measured in results[name][lanes])

    rows, ours, direct = [], "art gateway", middle("the stub itself", 0, "median")
    for name in results:
        speed, cpu, median = middle(name, 1, "calls_per_second"), middle(name, 1, "cpu"), middle(name, 0, "median")
        failed = sum(measured.failed for rounds_of in results[name] for measured in rounds_of)
        ratios: list[object] = [None] * 3
        if name not in (ours, "the stub itself"):
            added = (median - direct) / (middle(ours, 0, "median") - direct)
            ratios = [middle(ours, 1, "calls_per_second") / speed, cpu / middle(ours, 1, "cpu"), added]
        rows.append([name, speed, cpu, median, median - direct, failed, *ratios])
    print(
        f"\n{'streaming' if stream else 'not streaming'}: 32 calls at a time; latency one at a time; medians of {rounds} rounds"
    )
    head = [
        "side",
        "calls/s",
        "CPU ms/call",
        "latency ms",
        "added ms",
        "failed",
        "ours: x calls/s",
        "1/x CPU",
        "1/x added",
    ]
    print(table(head, rows))


async def grow(side: Side, calls: int) -> None:
    """Print the gateway's memory over many calls."""
    load = Load()
    rows, sent, small = [], 0, 0.0
    for until in (calls // 10, calls):
        measured = await load.run(side, until - sent, 32, stream=False)
        sent = until
        small = small or side.memory()
        rows.append([sent, side.memory(), side.memory() / small, measured.calls_per_second, measured.failed])
    print(f"\nmemory of a fresh gateway, {TURNS} calls per rollout")
    print(table(["calls", "resident MiB", "x the first", "calls/s", "failed"], rows))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm-python", help="Python of an environment with litellm[proxy]")
    parser.add_argument("--agl-python", help="Python of an environment with Agent Lightning's dependencies")
    parser.add_argument("--agl-source", help="folder that contains its package agentlightning")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=3000, help="calls of our side per round; slower sides make fewer")
    parser.add_argument("--memory-calls", type=int, default=100_000, help="calls for the memory table; 0 skips it")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> None:
    """Start all sides and measure."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-capture-")))
        port = free_port()
        upstream = f"http://127.0.0.1:{port}/v1"
        stub = [sys.executable, "-m", "bench.stub", "--port", str(port)]
        sides = [Side("the stub itself", stack.enter_context(running(stub, f"{upstream}/models")), [upstream])]
        if options.agl_python:
            sides.append(start_agent_lightning(stack, options.agl_python, options.agl_source or "", upstream, folder))
        if options.litellm_python:
            sides.append(start_litellm(stack, options.litellm_python, upstream, folder))
        sides.append(start_ours(stack, upstream, folder))
        for stream in (False, True):
            asyncio.run(compare(sides, options.rounds, options.calls, stream=stream))
        if options.memory_calls:
            (folder / "memory").mkdir()
            with contextlib.ExitStack() as fresh:
                asyncio.run(grow(start_ours(fresh, upstream, folder / "memory"), options.memory_calls))


if __name__ == "__main__":
    main(parse())
