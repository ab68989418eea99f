"""Child processes work for the rollout that started them or gave them work. Knows nothing about threads or clients.

A program is given the address in its environment, a Python child the rollout itself; this process's own environment is
never changed. While a rollout is live, these are wrapped: ``subprocess.Popen`` (with it ``subprocess.run``, ``os.popen`` and
asyncio's subprocesses), ``os.system``, ``os.posix_spawn``, ``os.execve``, ``multiprocessing.Process``, ``multiprocessing.Pool``
and ``ProcessPoolExecutor``. A fork keeps the rollout by itself.
"""

from __future__ import annotations

import inspect
import multiprocessing.process
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial, wraps
from multiprocessing.pool import Pool
from typing import Any
from urllib.parse import urlsplit

from art_core.attribution.live import (
    Function,
    Origin,
    carried,
    current_rollout,
    exempted,
    live,
    origin,
    running,
    while_live,
)
from art_core.types import RolloutAddress


def in_child_processes(prepare: Callable[[], None]) -> None:
    """Call ``prepare`` in every Python child that is not a fork of this process, before it works for a rollout.

    It is a function of a module, because it travels by name. The same function again is not added.
    """
    if prepare not in _preparations:
        _preparations.append(prepare)


_preparations: list[Callable[[], None]] = []
"""What has been done in this process and is to be done in its children."""


def additions(address: RolloutAddress, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that send the model calls of a process with the environment ``env`` to ``address``.

    Where ``env`` has a proxy, ``NO_PROXY`` names the address's host too.
    """
    root = address.base_url.removesuffix("/v1")
    found = {
        "ART_ROLLOUT_ID": address.rollout_id,
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_BASE": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        # Its traces go to OpenAI with the key of the calls, which is no key for them.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_URL": root,
        "ANTHROPIC_API_KEY": address.api_key,
    }
    if any(name.lower() in ("http_proxy", "all_proxy") for name in env):
        host, given = urlsplit(address.base_url).hostname or "", env.get("no_proxy") or env.get("NO_PROXY") or ""
        direct = given if host in given.split(",") else f"{given},{host}".strip(",")
        found["NO_PROXY"] = found["no_proxy"] = direct
    return found


def _current() -> RolloutAddress | None:
    return None if exempted.get() else current_rollout.get()


def _replacing(parameter: str, position: int, replace: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Wrap a function so that inside a rollout an argument is what ``replace`` makes of it, or of None where it is left out."""

    def around(function: Function) -> Function:
        @wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if origin() is None:
                return function(*args, **kwargs)
            if len(args) > position:
                return function(*args[:position], replace(args[position]), *args[position + 1 :], **kwargs)
            return function(*args, **kwargs | {parameter: replace(kwargs.get(parameter))})

        return replaced

    return around


def _with_address(env: Mapping[Any, Any] | None) -> Mapping[Any, Any] | None:
    address = _current()
    if address is None:
        return env
    given = {os.fsdecode(name): value for name, value in (os.environ if env is None else env).items()}
    text = {name: os.fsdecode(value) for name, value in given.items()}
    return given | additions(address, text)


def _exporting(command: str | bytes | os.PathLike[str]) -> str | bytes | os.PathLike[str]:
    address = _current()
    if address is None:
        return command
    exports = [f"{name}={shlex.quote(value)}" for name, value in additions(address, os.environ).items()]
    return f"export {' '.join(exports)}\n{os.fsdecode(command)}"


def _carrying(function: Function) -> Function:
    return partial(_work, origin(), tuple(_preparations), function)


def _work(
    here: Origin, preparations: tuple[Callable[[], None], ...], function: Function, *args: Any, **kwargs: Any
) -> Any:
    """Call ``function`` for the rollout that it comes from, in whatever process this is."""
    for prepare in preparations:
        if prepare not in _preparations:
            prepare()
            _preparations.append(prepare)
    with running(here.rollout) if here.rollout else nullcontext(), carried(here):
        return function(*args, **kwargs)


def _live_for(address: RolloutAddress, work: Callable[[], None]) -> None:
    """Run a child process that was started inside a rollout and has nothing else to do."""
    os.environ.update(additions(address, os.environ))
    work()


def _carrying_start(start: Function) -> Function:
    @wraps(start)
    def carrying(self: multiprocessing.process.BaseProcess) -> None:
        address = _current()
        if address is None:
            return start(self)
        own = vars(self).get("run")
        self.run = partial(_live_for, address, _carrying(self.run))
        try:
            start(self)
        finally:
            del self.run
            if own is not None:
                self.run = own

    return carrying


def _without_rollout(make: Function) -> Function:
    """A pool outlives the rollout that made it or gave it its first work, so its workers must not carry that for good."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with carried(Origin()):
            return make(*args, **kwargs)

    return made


def _carrying_submit(submit: Function) -> Function:
    return _replacing("fn", 1, _carrying)(_without_rollout(submit))


def _after_fork() -> None:
    if live.count:
        live.start_over()
        address = _current()
        if address is not None:
            os.environ.update(additions(address, os.environ))


ENV_OF_POPEN = list(inspect.signature(subprocess.Popen.__init__).parameters).index("env")

os.register_at_fork(after_in_child=_after_fork)
while_live(subprocess.Popen, "__init__", _replacing("env", ENV_OF_POPEN, _with_address))
while_live(os, "execve", _replacing("env", 2, _with_address))
while_live(os, "posix_spawn", _replacing("env", 2, _with_address))
while_live(os, "posix_spawnp", _replacing("env", 2, _with_address))
while_live(os, "system", _replacing("command", 0, _exporting))
while_live(multiprocessing.process.BaseProcess, "start", _carrying_start)
while_live(ProcessPoolExecutor, "submit", _carrying_submit)
while_live(Pool, "__init__", _without_rollout)
for name in ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered"):
    while_live(Pool, name, _replacing("func", 1, _carrying))
