"""The user's own code: which line of a stack is in it, and texts that identify an agent or a reward in every process."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from art_core.loop.rewards import Weighted
from art_core.plugins import GROUP

_LIBRARY = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")


def own_place(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of a stack (outermost call first) that is the user's own code; empty if none is."""
    for frame, line in reversed(list(stack)):
        file, package = frame.f_code.co_filename, frame.f_globals.get("__package__") or ""
        if _is_own(file, package):
            return f"{file}:{line} in {frame.f_code.co_name}"
    return ""


def _is_own(file: str, module: str) -> bool:
    """Whether code is the user's own: not from Python, an installed library, art or one of its plugins."""
    return not (_LIBRARY.match(file) or module.partition(".")[0] in _our_packages())


@functools.cache
def _our_packages() -> frozenset[str]:
    """Return the packages of art and its plugins. A prefix isn't enough: the user's own may begin with ``art_`` too."""
    plugins = importlib.metadata.entry_points(group=GROUP)
    return frozenset({"art_core", *(plugin.module.partition(".")[0] for plugin in plugins)})


def identity(thing: Any) -> str:
    """Return the name of an agent or a reward with hashes that tell it from others: ``score (source 3fa1b2c4)``.

    The source is that of a function and of the user's own functions and classes that it refers to, or of an object's class,
    without comments and formatting. Library code is identified by its name alone, a graph by its nodes, a partial also by
    its plain arguments. The state of an object or a closure doesn't count, because it may differ between processes.
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
        details.append(f"arguments {digest(plain)}")
    if nodes := _nodes(thing):
        details.append(f"nodes {nodes}")
    kind, label = type(function).__qualname__, getattr(function, "name", None)
    name = getattr(function, "__qualname__", f"{kind} {label}" if isinstance(label, str) else kind)
    return f"{name} ({', '.join(details)})" if details else name


def source_of(thing: Any) -> str | None:
    """Return a hash of the user's own source behind ``thing``; None if there is none."""
    sources = sorted(set(_sources(thing, set())))
    return digest(sources) if sources else None


def digest(texts: Sequence[str]) -> str:
    """Return a short hash of the texts in this order."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def _nodes(thing: Any) -> str:
    """Return the names of a graph's nodes; empty for anything else."""
    nodes = getattr(thing, "nodes", None)
    return ", ".join(sorted(map(str, nodes))) if isinstance(nodes, Mapping) else ""


def _sources(thing: Any, visited: set[int]) -> Iterator[str]:
    """Yield the source of ``thing`` and of all that it refers to; ``visited`` holds the ids of the objects already seen."""
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
        # A cell that isn't set yet equals an empty one, and has no contents to read.
        contents = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        yield from (f"nodes {nodes}" for nodes in map(_nodes, contents) if nodes)
        parts = [part for part in contents if isinstance(part, FunctionType | MethodType | functools.partial | type)]
        if source := _own_source(thing):
            yield source
            named = map(thing.__globals__.get, _names(thing.__code__))
            parts += [part for part in named if isinstance(part, FunctionType | type)]
    elif source := _own_source(thing if isinstance(thing, type) else type(thing)):
        yield source
    for part in parts:
        yield from _sources(part, visited)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code and the functions inside it refer to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _own_source(thing: Any) -> str | None:
    """Return the source of the user's own function or class without comments; None if it is a library's or not available."""
    try:
        if not _is_own(inspect.getsourcefile(thing) or "<unknown>", thing.__module__ or ""):
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
