"""Runs one vLLM server in a process: start, health, log, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from art_core.errors import ConfigError, StoreError
from art_vllm.client import VllmClient

GUARD = Path(__file__).with_name("guard.py")
PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of Linux (from 32768) and macOS (from 49152)."""
LOG_PERIOD = 10.0
"""Seconds between log lines during a start."""
POLL_PERIOD = 0.25
"""Seconds between health checks during a start."""
STOP_SECONDS = 12.0
"""Seconds to wait for the guard to stop the server, more than it ever needs; then the guard is killed."""
LOG_TAIL = 200_000
"""Bytes at the end of the log that are searched for errors."""
PREFIX = re.compile(r"^(?:\(\w[^)]*pid=\d+\) )?(?:(?:DEBUG|INFO|WARNING|ERROR) [\d:. -]+\[[^\]]*\] ?)?")
"""vLLM's prefix of every log line: process, level, time, source."""
ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::| \()|.*\berror: |.*Killed|Value error, )")
"""A line that names an error."""
POINTER = re.compile(r"root cause|Worker failed with error|WorkerProc initialization failed|validation errors? for ")
"""A line that only points to another error."""

log = logging.getLogger("art_core.engine")


class Server:
    """A vLLM server on a free local ``port``. ``command`` starts it, without host and port; ``timeout`` is the client's."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log_file: Path,
        timeout: float | None = 600.0,
    ) -> None:
        self.port = free_port()
        self.client = VllmClient(f"http://127.0.0.1:{self.port}/v1", timeout)
        self.log_file = log_file
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._variables = dict(variables)
        self._guard: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises ConfigError with the last errors in its log if it exits instead, StoreError if the process or the log can't be
        opened.
        """
        started = logged = time.monotonic()
        try:
            with self.log_file.open("ab") as sink:
                self._log_start = sink.tell()
                self._guard = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", str(GUARD), *self._command,
                    stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink, env=self._variables, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise StoreError(f"vLLM can't be started with the log {self.log_file}: {error}") from error
        log.info("vLLM is starting (log: %s)", self.log_file)
        while not await self.client.healthy():
            if self._guard.returncode is not None:
                raise ConfigError(f"vLLM exited during startup (exit code {self.exit_code}): {self.last_errors()}")
            await asyncio.sleep(POLL_PERIOD)
            if time.monotonic() - logged >= LOG_PERIOD:
                logged = time.monotonic()
                log.info("vLLM is starting (%.0f s): %s", logged - started, self._last_line())
        log.info("vLLM is ready after %.0f s", time.monotonic() - started)

    @property
    def exit_code(self) -> int | None:
        """The server's exit code; 128 + N if signal N ended it; None while it runs."""
        return self._guard.returncode if self._guard else None

    async def ended(self) -> int:
        """Wait until the server has exited; return its exit code."""
        assert self._guard is not None, "the server was not started"
        return await self._guard.wait()

    async def stop(self) -> None:
        """Stop the server and all its child processes."""
        await self.client.stop()
        if self._guard is None:
            return
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation if the process has just exited.
            async with asyncio.timeout(STOP_SECONDS):
                await self._guard.wait()
        except TimeoutError:
            self.kill()
            await self._guard.wait()

    def kill(self) -> None:
        """Kill the guard; the system then ends the server."""
        with suppress(ProcessLookupError):
            os.kill(self._guard.pid, signal.SIGKILL)

    def last_errors(self) -> str:
        """Return the last errors that this server logged, and the path of the log."""
        lines = [PREFIX.sub("", line).strip() for line in self._read().splitlines()]
        errors = [line for line in lines if ERROR.match(line)]
        causes = (
            [line for line in errors if not POINTER.search(line)] or errors or [line for line in lines if line][-1:]
        )
        distinct = list(dict.fromkeys(line[:500] for line in reversed(causes)))[:2]
        return f"{'; '.join(reversed(distinct)) or 'it logged nothing'} (log: {self.log_file})"

    def _last_line(self) -> str:
        lines = [PREFIX.sub("", line).strip() for line in self._read().splitlines()]
        return next((line[:160] for line in reversed(lines) if line), "nothing logged yet")

    def _read(self) -> str:
        try:
            with self.log_file.open("rb") as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_start, stream.tell() - LOG_TAIL))
                return stream.read().decode(errors="replace")
        except OSError:  # deleted meanwhile; that must not prevent a restart
            return ""


def free_port() -> int:
    """Return a port that is free now, and stays free until the server binds it, many seconds later, unless somebody names it.

    From the range that systems never give to connections or to listeners on port 0.
    """
    tried = random.SystemRandom().sample(PORTS, min(100, len(PORTS)))
    for port in tried:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise ConfigError(
        f"none of {len(tried)} ports between {PORTS[0]} and {PORTS[-1]} is free on 127.0.0.1; end what uses them"
    )
