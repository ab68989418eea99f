"""Runs untrusted programs against tests.

A program runs in its own process, forked from a bare interpreter (``jail.py``), and only ever returns values: they come back
as JSON and are compared here. The expected values never enter its process, so it can't find them, patch a harness or fake a
result: objects that equal everything, ``os._exit(0)`` and printed markers pass no test.

These layers confine a program (``Sandbox.layers()`` returns those in force on this machine):

- everywhere: its own session, killed as a whole when it ends or at ``seconds``; at most ``output_bytes`` of results; no
  environment; no open files but the pipe for results and /dev/null
- ``rlimit ...``: CPU seconds, memory (AS; not on macOS), no byte written to a file (FSIZE), no further processes (NPROC;
  root is exempt), few open files, no core dump
- ``seccomp`` (Linux on x86_64 and aarch64, without privileges): about thirty system calls are allowed, for memory, clocks and
  what is already open. Nothing can be opened, neither files nor sockets, and processes, threads, signals to others, mounts and
  traces are refused. The modules that a program may import (``jail.MODULES``) are loaded beforehand
- ``namespaces`` (Linux if users may create them; not in most containers, nor in Ubuntu 24.04 by default): no network
  interface, no visible processes but its own, and no files but one empty folder
- ``audit hook``: the interpreter refuses files, sockets, processes and so on. It stops careless programs. A hostile one can
  get around it, and macOS has neither of the two layers above, so nothing else keeps a program there from reading your files
  or using the network: run untrusted programs in a container

None of this is a virtual machine: a kernel bug breaks all of it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
GRACE = 10.0
"""Seconds beyond a program's time limit after which its server counts as lost."""


@dataclass(frozen=True)
class Result:
    """The result of one test."""

    passed: bool
    happened: str
    """Such as ``returned 8``, ``raised ZeroDivisionError`` or ``did not return in time``."""


class Sandbox:
    """A few servers, each running one program at a time; threads may share it."""

    def __init__(
        self, *, servers: int = 2, seconds: float = 2.0, cpu_seconds: int = 1, memory_bytes: int = 256 << 20,
        output_bytes: int = 1 << 16, namespaces: bool = True,
    ) -> None:  # fmt: skip
        self._limits = {
            "seconds": seconds, "cpu_seconds": cpu_seconds, "memory_bytes": memory_bytes,
            "output_bytes": output_bytes, "namespaces": namespaces and sys.platform == "linux",
        }  # fmt: skip
        self._idle: queue.LifoQueue[_Server | None] = queue.LifoQueue()
        for _ in range(servers):
            self._idle.put(None)  # started on demand

    def test(self, program: str, tests: Sequence[Sequence[Any]], *, function: str = "f") -> list[Result]:
        """Call the program's ``function`` with each ``[arguments, expected]``; arguments and expected values are JSON."""
        nonce = secrets.token_hex(8)
        request = {
            "code": program, "function": function, "nonce": nonce, "arguments": [arguments for arguments, _ in tests],
        }  # fmt: skip
        with self._server() as server:
            answer = server.ask(request, self._limits["seconds"] + GRACE)
        results, failure = _parse(answer["output"], nonce, len(tests))
        missing = failure or {"time": "did not return in time", "output": "returned too much"}.get(answer["ended"])
        return [
            _judge(results.get(number), expected, missing or "ended the program")
            for number, (_, expected) in enumerate(tests)
        ]

    def layers(self) -> list[str]:
        """Return the names of the layers in force, as in the module's docstring."""
        with self._server() as server:
            return list(server.layers)

    def close(self) -> None:
        """End the idle servers."""
        for _ in range(self._idle.qsize()):
            if server := self._idle.get():
                server.end()
            self._idle.put(None)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _server(self) -> Iterator[_Server]:
        server = self._idle.get()
        try:
            if server is None or server.lost:
                server = self._start()
            yield server
        finally:
            self._idle.put(server)

    def _start(self) -> _Server:
        server = _Server(self._limits)
        if server.refused and self._limits["namespaces"]:
            self._limits["namespaces"] = False
            server = _Server(self._limits)
        return server


@functools.cache
def shared() -> Sandbox:
    """Return the sandbox that agent and reward share; it ends with this process."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


class _Server:
    """One ``jail.py``."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(JAIL), json.dumps(limits)],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={},
            start_new_session=True,
        )  # fmt: skip
        self.lost = False
        try:
            hello = self._read(GRACE)
        except BaseException:
            self.end()
            raise
        self.refused: str | None = hello.get("refused")
        self.layers: list[str] = hello.get("layers", [])
        if not self.layers:
            self.end()
            if not self.refused:
                raise RuntimeError(
                    f"the sandbox did not start; try: {sys.executable} -I -S -B {JAIL} '{json.dumps(limits)}'"
                )

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the server's answer; if the server is lost, that of a program that ended at once."""
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
            answer = self._read(seconds)
        except BrokenPipeError:
            answer = {}
        except BaseException:  # KeyboardInterrupt too: a late answer would be mistaken for the next one
            self.end()
            raise
        if "output" not in answer:
            self.end()
        return {"output": "", "ended": "lost", **answer}

    def end(self) -> None:
        """Kill it, with whatever it runs."""
        self.lost = True
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        descriptor, deadline, line = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        readable = select.poll()  # select.select fails for descriptors from 1024 on
        readable.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return {}
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return {}
            line += piece
        return json.loads(line)


def _parse(output: str, nonce: str, tests: int) -> tuple[dict[int, list[str]], str | None]:
    """Return the program's result of every test, ``[kind, value as JSON]``, and a failure of the whole program, if any.

    The nonce distinguishes results from anything else that a program may happen to write there.
    """
    results: dict[int, list[str]] = {}
    for line in output.split("\n"):
        try:
            sender, number, kind, value = json.loads(line)
            text = json.dumps(value, sort_keys=True)
        except (ValueError, TypeError, RecursionError):
            continue
        if sender != nonce or kind not in ("value", "error"):
            continue
        if number is None:
            return {}, f"raised {value}"
        if type(number) is int and 0 <= number < tests:
            results.setdefault(number, [kind, text])
    return results, None


def _judge(result: list[str] | None, expected: Any, missing: str) -> Result:
    if result is None:
        return Result(False, missing)
    kind, text = result
    if kind == "error":
        return Result(False, f"raised {json.loads(text)}"[:200])
    # Compared as text, in which 1, 1.0 and true differ.
    return Result(text == json.dumps(expected, sort_keys=True), f"returned {json.loads(text)!r}"[:200])
