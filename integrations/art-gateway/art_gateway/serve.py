"""Runs a gateway until a signal stops it, then lets the calls in flight finish."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from art_core.capture import Dialect, address_of, http_server, is_loopback, listen
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.store.run_folder import claimed
from art_core.types import Sampling
from art_gateway.app import Gateway, Limits
from art_gateway.canary.gateway import CanaryGateway
from art_gateway.canary.routes import Candidate
from art_gateway.routing import Pool, Server
from art_gateway.text_gateway import TextGateway

log = logging.getLogger("art_gateway")

FIRST_PASSED = 3
"""The number of the first file that systemd passes."""
SPARE_FILES = 64
"""Open files besides the connections: the store, the listener, loaded libraries."""


@dataclass(frozen=True)
class Plan:
    """What to serve, and how."""

    upstreams: Sequence[Server]
    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 8400
    api_key: str | None = None
    temperature: float | None = None
    retries: int = 4
    drain: int = 60
    """Seconds for calls in flight to finish when the gateway stops."""
    limits: Limits = field(default_factory=Limits)
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    text: bool = False
    """Whether the upstreams are providers, recorded as text."""
    candidate: Candidate | None = None
    """What may answer in the providers' place."""

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return is_loopback(self.host)


async def serve(plan: Plan, console: Console) -> None:
    """Serve until SIGINT or SIGTERM, let the calls in flight finish, and return once everything is on disk.

    A second signal aborts the calls. Raises ConfigError if the port or the run folder is taken, StoreError if the run folder
    can't be written.
    """
    advice = raise_file_limit(2 * plan.limits.calls + SPARE_FILES)
    with _listener(plan) as listener, claimed(plan.run_dir), Store(plan.run_dir / "run.sqlite") as store:
        plan = dataclasses.replace(plan, host=listener.getsockname()[0])
        gateway = _gateway(plan, store)
        try:
            for pool in gateway.pools:
                await pool.start()
            # All that is loaded by now stays, so collections needn't visit it: 8 % less CPU per streamed call.
            gc.freeze()
            print_address(console, plan, address_of(plan.host, listener.getsockname()[1]), advice)
            for line in gateway.notes():
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            await _until_stopped(gateway, plan, listener, console)
        finally:
            await gateway.abort()
            for pool in gateway.pools:
                await pool.stop()
    stopped = f"stopped; recorded {count_line(gateway)} in {plan.run_dir}"
    console.print(stopped, highlight=False, markup=False, soft_wrap=True)


def _listener(plan: Plan) -> socket.socket:
    if not is_passed_socket():
        return listen(plan.host, plan.port)
    passed = socket.socket(fileno=FIRST_PASSED)
    if passed.family not in (socket.AF_INET, socket.AF_INET6) or passed.type != socket.SOCK_STREAM:
        raise ConfigError(
            "the socket that was passed isn't a TCP socket; in the .socket unit write ListenStream=ADDRESS:PORT"
        )
    return passed


def is_passed_socket() -> bool:
    """Whether systemd passes the listening socket (sd_listen_fds(3)).

    Clients that connect while the gateway restarts wait for the new process.
    """
    return os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1"


def _gateway(plan: Plan, store: Store) -> Gateway:
    pool = Pool.of(plan.upstreams, plan.retries)
    options = {
        "dialects": plan.dialects,
        "api_key": plan.api_key,
        "local": plan.local,
        "sampling": Sampling(temperature=plan.temperature),
        "limits": plan.limits,
    }
    if plan.candidate is not None:
        return CanaryGateway(pool, store, candidate=plan.candidate, **options)
    return (TextGateway if plan.text else Gateway)(pool, store, **options)


async def _until_stopped(gateway: Gateway, plan: Plan, listener: socket.socket, console: Console) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_explain_exception)
    server = http_server(gateway, drain=plan.drain)
    stop = asyncio.Event()
    aborting: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if stop.is_set() or gateway.gate.paused:
            # Calls held by a pause would never finish.
            aborting.append(loop.create_task(gateway.abort()))
        # Behind a passed socket, what comes before the server has closed its connections is answered: clients never notice.
        gateway.stopping = not is_passed_socket()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    beside = [asyncio.create_task(chore) for chore in (_count(gateway, console), *gateway.chores())]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if gateway.gate.inside and not serving.done():
            console.print(
                f"waiting for {gateway.gate.inside} calls in flight; press Ctrl-C again to abort them", highlight=False
            )
        await serving
    finally:
        for task in (*beside, stopped):
            task.cancel()
        await asyncio.gather(*beside, stopped, *aborting, return_exceptions=True)


def print_address(console: Console, plan: Plan, address: str, advice: str | None) -> None:
    """Print the gateway's address and a command to try it."""
    key = " -H 'Authorization: Bearer KEY'" if plan.api_key else ""
    upstreams = ", ".join(upstream.base_url for upstream in plan.upstreams)
    if (candidate := plan.candidate) is not None:
        upstreams += f", and {candidate.upstream.base_url} for {candidate.name}"
    lines = [
        f"art gateway: {address} -> {upstreams}; recording in {plan.run_dir}; try: curl {address}/rollouts/try/v1"
        f"/chat/completions{key} -H 'Content-Type: application/json' -d "
        """'{"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}'"""
    ]
    if advice:
        lines.append(advice)
    if plan.api_key is None and not plan.local:
        lines.append(f"anyone who can reach {plan.host} can use this gateway; set --api-key to require a key")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def count_line(gateway: Gateway) -> str:
    """Return one line with the counts so far."""
    status = gateway.status()
    text = f"{status['calls']:,} calls of {status['rollouts']:,} rollouts"
    for name in ("in_flight", "waiting", "retried", "aborted"):
        if status[name]:
            text += f", {status[name]:,} {name.replace('_', ' ')}"
    return text + (", paused" if status["paused"] else "")


async def _count(gateway: Gateway, console: Console) -> None:
    """Keep one line up to date on a terminal; elsewhere, and in the background, print it once a minute if it has changed."""
    previous = count_line(gateway)
    live = console.is_terminal and is_in_foreground()
    while True:
        await asyncio.sleep(1 if live else 60)
        line = count_line(gateway)
        if line != previous:
            console.print(line.ljust(len(previous)), end="\r" if live else "\n", highlight=False)
            previous = line


def is_in_foreground() -> bool:
    """Whether the terminal belongs to this process, so that no shell's prompt is overwritten."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def raise_file_limit(wanted: int) -> str | None:
    """Raise this process's limit on open files to its maximum; if that is below ``wanted``, return advice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            # macOS reports no limit but refuses more than this.
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 10_240), hard))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    return (
        f"this process may open {soft} files, enough for about {max(soft - SPARE_FILES, 0) // 2} calls at a time; raise the "
        "limit (ulimit -Hn, LimitNOFILE= in a systemd unit, nofile in /etc/security/limits.conf) or set a lower --max-calls"
    )


def _explain_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.error(
            "can't accept more connections: this process may open %d files; raise the limit (ulimit -n) or run fewer agents at "
            "a time",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
        return
    loop.default_exception_handler(context)
