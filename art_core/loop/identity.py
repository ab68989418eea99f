"""Agents, rewards and tasks -> texts that name them, the same in every process. Knows nothing about runs."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from art_core.loop.display import plural
from art_core.loop.own_code import is_own
from art_core.loop.rewards import Weighted
from art_core.loop.rollout import task_id


def identity(thing: Any) -> str:
    """Return the name of an agent or a reward with what tells it from others: ``score (source 3fa1b2c4)``.

    The source is that of a function and of the user's own functions and classes that it refers to, or an object's class,
    without comments and formatting. Code of libraries is known by its name alone, a graph by its nodes, a partial by its
    plain arguments too. What an object or a closure holds does not count: it may differ from process to process.
    """
    if isinstance(thing, str):
        return thing
    details = []
    if source := source_of(thing):
        details.append(f"source {source}")
    if plain := _plain_arguments(thing):
        details.append(f"arguments {_digest(plain)}")
    if nodes := _nodes(thing):
        details.append(f"nodes {', '.join(nodes)}")
    return f"{_name(thing)} ({', '.join(details)})" if details else _name(thing)


def source_of(thing: Any) -> str | None:
    """Return a hash of the source behind ``thing``; None if there is none of the user's own."""
    sources = sorted(set(_sources(thing, set())))
    return _digest(sources) if sources else None


def identity_of_tasks(tasks: Sequence[Any]) -> str:
    """Return how many tasks there are and a hash of their ids, whatever their order. Raises ConfigError as ``task_id``."""
    return f"{plural(len(tasks), 'task')} ({_digest(sorted(map(task_id, tasks)))})"


def experiment(
    agent: Any, tasks: Sequence[Any], reward: Any, eval_tasks: Sequence[Any] | None = None, eval_reward: Any = None,
    *, to_input: Any = None, to_output: Any = None,
) -> dict[str, str]:  # fmt: skip
    """Return what a run folder is held to beside its settings, by the names of the arguments of ``train``."""
    found = {"agent": identity(agent), "tasks": identity_of_tasks(tasks), "reward": identity(reward)}
    found |= {"to_input": identity(to_input or "none"), "to_output": identity(to_output or "none")}
    if eval_tasks is not None:
        found |= {"eval_tasks": identity_of_tasks(eval_tasks), "eval_reward": identity(eval_reward)}
    return found


def _name(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    own, kind = getattr(thing, "name", None), type(thing).__qualname__
    return getattr(thing, "__qualname__", f"{kind} {own}" if isinstance(own, str) else kind)


def _plain_arguments(thing: Any) -> list[str]:
    """Return the arguments of a partial that are numbers, texts, True, False or None."""
    if not isinstance(thing, functools.partial):
        return []
    given = [*enumerate(thing.args), *sorted(thing.keywords.items())]
    plain = [f"{name}={value!r}" for name, value in given if isinstance(value, str | int | float | None)]
    return [*plain, *_plain_arguments(thing.func)]


def _nodes(thing: Any) -> list[str]:
    """Return the names of a graph's nodes."""
    nodes = None if isinstance(thing, type) else getattr(thing, "nodes", None)
    return sorted(map(str, nodes)) if isinstance(nodes, Mapping) else []


def _sources(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield the sources behind ``thing``, each with what it refers to; ``seen`` are the ids of those that were visited."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        parts = [thing.__self__]
    elif isinstance(thing, Weighted):
        parts = thing.rewards
        yield from (identity(part) for part in parts)
    elif inspect.isfunction(thing):
        cells = [_content(cell) for cell in thing.__closure__ or ()]
        yield from (f"nodes {nodes}" for nodes in map(_nodes, cells) if nodes)
        if own := _own_source(thing):
            yield own
            named = map(thing.__globals__.get, _names(thing.__code__))
            cells += [it for it in named if inspect.isfunction(it) or isinstance(it, type)]
        parts = [it for it in cells if isinstance(it, FunctionType | MethodType | functools.partial | type)]
    else:
        yield from filter(None, [_own_source(thing if isinstance(thing, type) else type(thing))])
        return
    for part in parts:
        yield from _sources(part, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _own_source(thing: Any) -> str | None:
    """Return the source of the user's own function or class, without comments; None of a library's, and if it is not known."""
    try:
        if not is_own(inspect.getsourcefile(thing) or "<unknown>", thing.__module__ or ""):
            return None
        if thing.__name__ == "<lambda>":  # of its lines, only the lambda: the rest may be a call with other arguments
            line, tree = thing.__code__.co_firstlineno, ast.parse("".join(inspect.findsource(thing)[0]))
            found = [it for it in ast.walk(tree) if isinstance(it, ast.Lambda) and it.lineno == line]
            return "\n".join(map(ast.unparse, found))
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except SyntaxError:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return None


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
