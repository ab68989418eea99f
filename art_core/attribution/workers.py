"""Threads, pools and child processes work for the rollout that started them or submitted their work.

A program gets the address in its environment, a Python child the rollout itself; this process's own environment never changes.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from typing import Any
from urllib.parse import urlsplit

from art_core.attribution.rollouts import Origin, carried, current_rollout, exempted, inside_rollout, live, origin
from art_core.attribution.wrapping import Function, Wrap, wrap_while_live

Preparation = Callable[[], None]
variables_of_programs: dict[str, str] = {}
"""What plugins set in the programs that a rollout starts, beside its address."""
_preparations: list[Preparation] = []
"""What has been called in this process and must be called in its children."""


def run_in_child_processes(prepare: Preparation) -> None:
    """Call ``prepare`` in every Python child that is not a fork of this process, before it works for a rollout.

    It must be a module-level function, because it is pickled by name; it is added once.
    """
    if prepare not in _preparations:
        _preparations.append(prepare)


def carrying(function: Function) -> Function:
    """Return ``function`` such that any thread or process calls it for the rollout that this is called in."""
    return partial(_work, origin() or Origin(), os.getpid(), tuple(_preparations), function)


def _work(
    origin: Origin, pid: int, preparations: tuple[Preparation, ...], function: Function, *args: Any, **kwargs: Any
) -> Any:
    with ExitStack() as stack:
        if os.getpid() != pid:
            for prepare in preparations:
                if prepare not in _preparations:
                    prepare()
                    _preparations.append(prepare)
            if origin.rollout:
                stack.enter_context(inside_rollout(origin.rollout))
        stack.enter_context(carried(origin))
        return function(*args, **kwargs)


def _variables(env: Mapping[str, str], *, of_program: bool = True) -> dict[str, str]:
    """Return what sends the model calls of a child process with the environment ``env`` to the current rollout.

    If it isn't ``of_program``, it knows the rollout itself, so that most clients need no address.
    """
    address = None if exempted.get() else current_rollout.get()
    if address is None:
        return {}
    root = address.base_url.removesuffix("/v1")
    addresses = {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_BASE": address.base_url,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_URL": root,
    }
    if address.live:  # its own keys must reach its own provider, which only this process's variables name
        addresses = {k: v for k, v in addresses.items() if env.get(k) and env[k] == os.environ.get(k)}
    variables = {"ART_ROLLOUT_ID": address.rollout_id, **addresses}
    if not address.live:
        variables |= {
            "OPENAI_API_KEY": address.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would go to OpenAI with this key, which is not OpenAI's
            "ANTHROPIC_API_KEY": address.api_key,
            "ANTHROPIC_AUTH_TOKEN": address.api_key,  # the user's own would be sent beside the key
            **variables_of_programs,
        }
        if of_program:
            variables |= dict.fromkeys(OTHER_ADDRESSES, root)
            variables |= {name: address.api_key for name in OTHER_KEYS if name in env}
    if any(name.lower() in ("http_proxy", "all_proxy") for name in env):
        hosts = (env.get("no_proxy") or env.get("NO_PROXY") or "").split(",")
        host = urlsplit(address.base_url).hostname or ""
        variables["NO_PROXY"] = variables["no_proxy"] = ",".join(filter(None, dict.fromkeys([*hosts, host])))
    return variables


def _with_variables(env: Mapping[Any, Any] | None) -> dict[str, str]:
    own = {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()}
    return own | _variables(own)


def _exporting(command: Any) -> Any:
    variables = _variables(os.environ)
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"export {exports}\n{os.fsdecode(command)}" if variables else command


def _replacing(parameter: str, position: int, replace: Callable[[Any], Any], *, starts_workers: bool = False) -> Wrap:
    """Inside a rollout, replace an argument by ``replace(argument)``, or by ``replace(None)`` if it is missing.

    A function that ``starts_workers`` of a pool runs outside the rollout, because they outlive it.
    """

    def wrap_function(function: Function) -> Function:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if origin() is None:
                return function(*args, **kwargs)
            if len(args) > position:
                args = (*args[:position], replace(args[position]), *args[position + 1 :])
            else:
                kwargs[parameter] = replace(kwargs.get(parameter))
            with carried(Origin()) if starts_workers else nullcontext():
                return function(*args, **kwargs)

        return wrapper

    return wrap_function


def _carrying_thread(start: Function) -> Function:
    @wraps(start)
    def wrapper(self: Any) -> None:
        if origin() is not None:
            self.run = carrying(self.run)
        start(self)

    return wrapper


def _carrying_process(start: Function) -> Function:
    @wraps(start)
    def wrapper(self: Any) -> None:
        variables = _variables(os.environ, of_program=False)
        if not variables:
            return start(self)
        self.run = partial(_run_child, variables, carrying(self.run))
        try:
            start(self)
        finally:
            vars(self).pop("run", None)

    return wrapper


def _run_child(variables: Mapping[str, str], run: Callable[[], None]) -> None:
    os.environ.update(variables)
    run()


def _after_fork() -> None:
    if live:
        os.environ.update(_variables(os.environ, of_program=False))


OTHER_ADDRESSES = (
    "ANTHROPIC_BEDROCK_BASE_URL", "AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_VERTEX_BASE_URL",
    "OLLAMA_HOST",
)  # fmt: skip
OTHER_KEYS = ("AWS_BEARER_TOKEN_BEDROCK", "GEMINI_API_KEY", "GOOGLE_API_KEY", "OLLAMA_API_KEY")
"""Replaced if they are set: Google's client warns about two keys, and Amazon's prefers this one to the user's others."""
ENV_OF_POPEN = list(inspect.signature(subprocess.Popen.__init__).parameters).index("env")
POOL_METHODS = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")

os.register_at_fork(after_in_child=_after_fork)
wrap_while_live(_carrying_thread, "threading:Thread.start")
wrap_while_live(
    _replacing("fn", 1, carrying, starts_workers=True),
    "concurrent.futures.thread:ThreadPoolExecutor.submit",
    "concurrent.futures.process:ProcessPoolExecutor.submit",
)
wrap_while_live(_replacing("processes", 1, lambda it: it, starts_workers=True), "multiprocessing.pool:Pool.__init__")
wrap_while_live(_replacing("func", 1, carrying), *(f"multiprocessing.pool:Pool.{method}" for method in POOL_METHODS))
wrap_while_live(_carrying_process, "multiprocessing.process:BaseProcess.start")
wrap_while_live(_replacing("env", ENV_OF_POPEN, _with_variables), "subprocess:Popen.__init__")
wrap_while_live(_replacing("env", 2, _with_variables), "os:posix_spawn", "os:posix_spawnp", "os:execve")
wrap_while_live(_replacing("command", 0, _exporting), "os:system")
