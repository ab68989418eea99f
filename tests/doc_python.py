"""Check Python that is shown and not run: its imports, and its calls against the signatures of what they call."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import art_core as art
from art_core.config import PARTS, TrainConfig

UNKNOWN = object()
"""What nothing is known of."""
SETTINGS = {field.name for field in dataclasses.fields(TrainConfig)} | set(PARTS)


@dataclasses.dataclass(frozen=True)
class Instance:
    """Some object of a class."""

    cls: type


class Names:
    """What the names of a page stand for, as far as that can be told without running it."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {"art": art}

    def check(self, code: str) -> list[str]:
        """Return what is wrong with the code; take over its names."""
        return list(self._check(ast.parse(code)))

    def _check(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._imports(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.withitem):
                self._bind(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.Attribute) and self._value(node) is None:
                yield f"line {node.lineno}: there is no {ast.unparse(node)}"

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        for alias in node.names:
            name = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            try:
                found = _imported(name)
            except ImportError as error:
                yield f"line {node.lineno}: {error}"
            else:
                top = isinstance(node, ast.Import) and not alias.asname
                self.known[alias.asname or alias.name.partition(".")[0]] = (
                    importlib.import_module(name.partition(".")[0]) if top else found
                )

    def _bind(self, node: ast.Assign | ast.withitem) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.optional_vars
        value = node.value if isinstance(node, ast.Assign) else node.context_expr
        if isinstance(target, ast.Name):
            self.known[target.id] = self._result(value)

    def _result(self, value: ast.expr) -> Any:
        """What a call returns, or ``async with`` binds, by its annotation."""
        called = self._value(value.func) if isinstance(value, ast.Call) else UNKNOWN
        if inspect.isclass(called):
            return Instance(called)
        if inspect.isfunction(called) and called.__module__.startswith("art_"):
            returned = str(called.__annotations__.get("return"))
            name = returned.removeprefix("AbstractAsyncContextManager[").removesuffix("]")  # ``async with`` binds that
            cls = called.__globals__.get(name, UNKNOWN)
            return Instance(cls) if inspect.isclass(cls) else UNKNOWN
        return UNKNOWN

    def _value(self, node: ast.expr) -> Any:
        """What an expression stands for; None for an attribute that is not there."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, UNKNOWN)
        if not isinstance(node, ast.Attribute):
            return UNKNOWN
        owner = self._value(node.value)
        if isinstance(owner, Instance):
            # Fields may be set in __init__ only, so an attribute that the class lacks may still be there.
            return getattr(owner.cls, node.attr, UNKNOWN)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) or inspect.isclass(owner) else UNKNOWN

    def _call(self, node: ast.Call) -> Iterator[str]:
        called = self._value(node.func)
        if (
            called is UNKNOWN or not callable(called) or hasattr(called, "model_fields")
        ):  # pydantic's have names besides
            return
        try:
            signature = inspect.signature(art.train if called is art.train_sync else called)
        except ValueError:  # of C
            return
        method = isinstance(node.func, ast.Attribute) and isinstance(self._value(node.func.value), Instance)
        keywords = {it.arg: None for it in node.keywords if it.arg}
        left_out = any(isinstance(it, ast.Starred) or getattr(it, "value", None) is ... for it in node.args)
        left_out |= any(it.arg is None for it in node.keywords)
        count = 0 if left_out else len(node.args) + method
        try:
            (signature.bind_partial if left_out else signature.bind)(*[None] * count, **keywords)
        except TypeError as error:
            yield f"line {node.lineno}: {ast.unparse(node.func)}: {error}"
        if getattr(called, "__module__", "").startswith("art_core") and "settings" in signature.parameters:
            for name in keywords.keys() - signature.parameters.keys() - SETTINGS:
                yield f"line {node.lineno}: {name} is no setting of {ast.unparse(node.func)}"


def _imported(name: str) -> Any:
    """Return the module or the module's attribute of that dotted name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        if not module or not hasattr(importlib.import_module(module), attribute):
            raise
        return getattr(importlib.import_module(module), attribute)
