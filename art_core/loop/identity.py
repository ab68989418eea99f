"""Texts that identify an agent, a reward or tasks, the same in every process."""

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
    """Return the name of an agent or a reward with hashes that distinguish it from others: ``score (source 3fa1b2c4)``.

    The source is that of a function and of the user's own functions and classes that it refers to, or an object's class,
    without comments and formatting. Code of libraries is identified by its name alone, a graph by its nodes, a partial by its
    plain arguments too. What an object or a closure holds does not count: it may differ from process to process.
    """
    if isinstance(thing, str):
        return thing
    details, arguments, function = [], [], thing
    if source := source_of(thing):
        details.append(f"source {source}")
    while isinstance(function, functools.partial):
        arguments += [*enumerate(function.args), *sorted(function.keywords.items())]
        function = function.func
    if plain := [f"{name}={value!r}" for name, value in arguments if isinstance(value, str | int | float | None)]:
        details.append(f"arguments {_digest(plain)}")
    if nodes := _nodes(thing):
        details.append(f"nodes {nodes}")
    kind, label = type(function).__qualname__, getattr(function, "name", None)
    name = getattr(function, "__qualname__", f"{kind} {label}" if isinstance(label, str) else kind)
    return f"{name} ({', '.join(details)})" if details else name


def source_of(thing: Any) -> str | None:
    """Return a hash of the user's own source behind ``thing``; None if there is none."""
    sources = sorted(set(_sources(thing, set())))
    return _digest(sources) if sources else None


def identity_of_tasks(tasks: Sequence[Any]) -> str:
    """Return the number of tasks and a hash of their ids, in any order. Raises ConfigError as ``task_id``."""
    return f"{plural(len(tasks), 'task')} ({_digest(sorted(map(task_id, tasks)))})"


def experiment(
    agent: Any, tasks: Sequence[Any], reward: Any, eval_tasks: Sequence[Any] | None = None, eval_reward: Any = None,
    *, to_input: Any = None, to_output: Any = None,
) -> dict[str, str]:  # fmt: skip
    """Return what identifies an experiment besides its settings, by the names of the arguments of ``train``."""
    parts = {"agent": identity(agent), "tasks": identity_of_tasks(tasks), "reward": identity(reward)}
    parts |= {"to_input": identity(to_input or "none"), "to_output": identity(to_output or "none")}
    if eval_tasks is not None:
        parts |= {"eval_tasks": identity_of_tasks(eval_tasks), "eval_reward": identity(eval_reward)}
    return parts


def _nodes(thing: Any) -> str:
    """Return the names of a graph's nodes; empty for anything else."""
    nodes = getattr(thing, "nodes", None)
    return ", ".join(sorted(map(str, nodes))) if isinstance(nodes, Mapping) else ""


def _sources(thing: Any, visited: set[int]) -> Iterator[str]:
    """Yield the sources behind ``thing`` and behind what it refers to; ``visited`` holds the ids of those already yielded."""
    if id(thing) in visited:
        return
    visited.add(id(thing))
    parts: list[Any] = []
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        parts = [thing.__self__]
    elif isinstance(thing, Weighted):
        yield from (identity(reward) for _, reward in thing.parts.values())
    elif isinstance(thing, FunctionType):
        cells = [_content(cell) for cell in thing.__closure__ or ()]
        yield from (f"nodes {nodes}" for nodes in map(_nodes, cells) if nodes)
        parts = [it for it in cells if isinstance(it, FunctionType | MethodType | functools.partial | type)]
        if source := _own_source(thing):
            yield source
            named = map(thing.__globals__.get, _names(thing.__code__))
            parts += [it for it in named if isinstance(it, FunctionType | type)]
    elif source := _own_source(thing if isinstance(thing, type) else type(thing)):
        yield source
    for part in parts:
        yield from _sources(part, visited)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _own_source(thing: Any) -> str | None:
    """Return the source of the user's own function or class without comments; None for a library's or an unknown one."""
    try:
        if not is_own(inspect.getsourcefile(thing) or "<unknown>", thing.__module__ or ""):
            return None
        if thing.__name__ == "<lambda>":  # the lambda alone: the rest of its line may be a call with other arguments
            line, tree = thing.__code__.co_firstlineno, ast.parse("".join(inspect.findsource(thing)[0]))
            lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == line]
            return "\n".join(map(ast.unparse, lambdas))
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except SyntaxError:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return None


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
