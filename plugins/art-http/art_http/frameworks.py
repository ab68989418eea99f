"""What the plugins of agent frameworks share: whose object an agent is, and which agent of a framework is calling.

For frameworks whose model calls this plugin or art-openai redirects. None of them is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

from art_core import agent_name, name_agents
from art_core.errors import AgentError

Named = Callable[[Any], contextlib.AbstractContextManager[None]]
_path: ContextVar[str | None] = ContextVar("art_http_path", default=None)


def is_a(agent: object, *names: str) -> bool:
    """Whether an agent is of one of these classes, each named as ``module.Class``. A module that isn't imported has made none."""
    for name in names:
        module, _, kind = name.rpartition(".")
        found = getattr(sys.modules.get(module), kind, None)
        if found is not None and isinstance(agent, found):
            return True
    return False


def refuse_shared(agent: object) -> None:
    """Raise AgentError: this kind of agent keeps its conversation, which the rollouts would mix up."""
    kind = type(agent).__qualname__
    raise AgentError(
        f"a {type(agent).__module__}.{kind} keeps its conversation, so rollouts can't share one; pass a function without "
        f"parameters that makes one: def agent(): return {kind}(...)"
    )


def name_while(owner: type, method: str, name: Callable[[Any], str]) -> None:
    """Let model calls have the name of the ``owner`` whose ``method`` is running; one inside another is ``outer/inner``.

    The method may be a function, a coroutine function or a generator of either kind. Wraps it once.
    """
    original = getattr(owner, method)
    if getattr(original, "_art_named", False):
        return
    # Of the same kind as the original, because frameworks look.
    kinds = (
        (inspect.isasyncgenfunction, _async_generator),
        (inspect.iscoroutinefunction, _coroutine),
        (inspect.isgeneratorfunction, _generator),
    )
    wrap = next((wrap for is_kind, wrap in kinds if is_kind(original)), _function)
    wrapped = functools.wraps(original)(wrap(original, lambda running: calls_named(name(running))))
    wrapped._art_named = True
    setattr(owner, method, wrapped)
    name_agents(running_agent)


def _function(original: Callable[..., Any], named: Named) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with named(self):
            return original(self, *args, **kwargs)

    return wrapped


def _coroutine(original: Callable[..., Any], named: Named) -> Callable[..., Any]:
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with named(self):
            return await original(self, *args, **kwargs)

    return wrapped


def _generator(original: Callable[..., Any], named: Named) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Generator[Any]:
        with contextlib.closing(original(self, *args, **kwargs)) as items:
            while True:
                # Not around the yield, where the consumer's code runs.
                with named(self):
                    try:
                        item = next(items)
                    except StopIteration as end:
                        return end.value
                yield item

    return wrapped


def _async_generator(original: Callable[..., Any], named: Named) -> Callable[..., Any]:
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        async with contextlib.aclosing(original(self, *args, **kwargs)) as items:
            while True:
                with named(self):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item

    return wrapped


def running_agent() -> str | None:
    """Return the path of the agents that are running here."""
    return _path.get()


@contextlib.contextmanager
def calls_named(name: str) -> Iterator[None]:
    """Let model calls in the block have this name, inside those of the blocks around it."""
    # Threads that a framework starts without its context have the name of whoever started them.
    outer = _path.get() or agent_name()
    token = _path.set(f"{outer}/{name}" if outer and outer.rpartition("/")[2] != name else outer or name)
    try:
        yield
    finally:
        _path.reset(token)
