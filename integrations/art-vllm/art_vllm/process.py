"""One vLLM server as a process: start, health, log, end. Knows nothing about what is asked of it or about weights."""

from __future__ import annotations

import asyncio
import logging
import os
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
SAY_EVERY = 10.0
"""Seconds between two lines about a start."""
ASK_EVERY = 0.25
"""Seconds between two looks at whether it answers."""
END_SECONDS = 12.0
"""After which an ending is no longer waited for: more than the guard takes at most."""
LAST_BYTES = 200_000
"""Of the log, that are read for what went wrong."""
PREFIX = re.compile(r"^(?:\(\w[^)]*pid=\d+\) )?(?:(?:DEBUG|INFO|WARNING|ERROR) [\d:. -]+\[[^\]]*\] ?)?")
"""What vLLM writes before every line: process, level, time, place."""
TELLING = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::| \()|.*\berror: |.*Killed|Value error, )")
"""A line that names an error."""
ECHO = re.compile(r"root cause|Worker failed with error|WorkerProc initialization failed|validation errors? for ")
"""A line that says only that another one does."""

log = logging.getLogger("art_core.engine")


class Server:
    """A command that serves vLLM's API at ``port``; ``command`` comes without host and port, ``timeout`` is the client's."""

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
        """Start it and return when it answers. ConfigError, with what its log says, where it ends instead; StoreError where
        neither it nor its log can be opened."""
        started = said = time.monotonic()
        try:
            with self.log_file.open("ab") as sink:
                self._log_start = sink.tell()
                self._guard = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", str(GUARD), *self._command,
                    stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink, env=self._variables, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise StoreError(f"vLLM cannot be started with the log {self.log_file}: {error}") from error
        log.info("vLLM is starting (log: %s)", self.log_file)
        while not await self.client.healthy():
            if self._guard.returncode is not None:
                raise ConfigError(f"vLLM ended while it started (exit code {self.exit_code}): {self.last_words()}")
            await asyncio.sleep(ASK_EVERY)
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                log.info("vLLM is starting (%.0f s): %s", said - started, self._last_line())
        log.info("vLLM answers after %.0f s", time.monotonic() - started)

    @property
    def exit_code(self) -> int | None:
        """The server's; 128 + N where signal N ended it; None while it runs."""
        return self._guard.returncode if self._guard else None

    async def ended(self) -> int:
        """Return the exit code when it has ended."""
        assert self._guard is not None, "the server was not started"
        return await self._guard.wait()

    async def stop(self) -> None:
        """End it, with all that it started."""
        await self.client.stop()
        if self._guard is None:
            return
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation where the process has just ended.
            async with asyncio.timeout(END_SECONDS):
                await self._guard.wait()
        except TimeoutError:
            self.kill()
            await self._guard.wait()

    def kill(self) -> None:
        """End the guard: the server is then ended by the system."""
        with suppress(ProcessLookupError):
            os.kill(self._guard.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the last errors in the log of this start, and where the log is."""
        lines = [PREFIX.sub("", line).strip() for line in self._read().splitlines()]
        errors = [line for line in lines if TELLING.match(line)]
        telling = [line for line in errors if not ECHO.search(line)] or errors or [line for line in lines if line][-1:]
        distinct = list(dict.fromkeys(line[:500] for line in reversed(telling)))[:2]
        return f"{'; '.join(reversed(distinct)) or 'it said nothing'} (log: {self.log_file})"

    def _last_line(self) -> str:
        lines = [PREFIX.sub("", line).strip() for line in self._read().splitlines()]
        return next((line[:160] for line in reversed(lines) if line), "nothing in its log yet")

    def _read(self) -> str:
        try:
            with self.log_file.open("rb") as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_start, stream.tell() - LAST_BYTES))
                return stream.read().decode(errors="replace")
        except OSError:  # somebody has deleted it; that must not keep the server from coming back
            return ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
