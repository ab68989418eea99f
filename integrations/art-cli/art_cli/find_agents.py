"""Finds the agents in a repository by reading its code; nothing is imported or run."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from art_cli.catalogue import ADAPTERS

CLIENTS = {"openai", "anthropic", "google.genai", "ollama", "litellm", "mistralai", "boto3", "instructor"}
"""Packages with which a function calls a model itself."""
AGENT_PACKAGES = ({*ADAPTERS} - CLIENTS) | {"deepagents", "langgraph_supervisor", "langgraph_swarm"}
"""Packages whose calls make agents."""
MAKER = re.compile(
    r"\w*(Agent|AgentExecutor|AgentOptions|Team|Crew|Workflow|Pipeline|GroupChat|Swarm)|\w*create_\w*(agent|supervisor|swarm)"
    r"|Predict|ChainOfThought|ReAct|CodeAct|ProgramOfThought"
)
"""The names of such calls."""
MODEL_METHOD = re.compile(
    r"create|parse|stream|chat|generate|complete|converse(_stream)?|invoke_model|generate_content(_stream)?"
    r"|run(_sync|_streamed)?|a?invoke|a?completion|a?responses"
)
"""Methods of clients and agents that call a model."""
FUNCTION = "a function that calls"
NO_TASK = {"state", "trajectory", "request", "config"}
"""A function whose first parameter has such a name is a node, a reward or a handler."""
NOT_SEARCHED = {"site-packages", "node_modules", "build", "dist", "tests", "test", "docs", "migrations"}
MOST_FILES = 5000
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FoundAgent:
    file: Path
    """Relative to the folder that was searched."""
    name: str
    line: int
    what: str
    """Its framework, or how it calls a model."""

    def __str__(self) -> str:
        return f"{self.file.as_posix()}:{self.name}"


def find_agents(folder: Path) -> list[FoundAgent]:
    """Return the agents in the Python files under ``folder``, those of few folders first.

    An agent is a graph of langgraph.json; without that file, an object that a known framework makes, or a function without
    parameters that returns one. Only where there is none, it is a function of one task that calls a model. An agent that
    another one is made of, or that another agent calls, is left out.
    """
    if declared := list(_declared(folder)):
        return declared
    found = [agent for file in _files(folder) for agent in _Module(folder, file).agents()]
    objects = [it for it in found if not it.what.startswith(FUNCTION)]
    return sorted(objects or found, key=lambda it: (len(it.file.parts), it.file, it.line))


def _declared(folder: Path) -> Iterator[FoundAgent]:
    """Yield the graphs that LangGraph's own configuration names."""
    try:
        graphs = json.loads((folder / "langgraph.json").read_text(encoding="utf-8"))["graphs"]
        paths = [graph if isinstance(graph, str) else graph["path"] for graph in graphs.values()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    for path in filter(lambda it: isinstance(it, str), paths):
        file, _, name = path.rpartition(":")
        if file.endswith(".py") and (folder / file).is_file():
            yield FoundAgent(Path(os.path.normpath(file)), name, 1, "langgraph")


def _files(folder: Path) -> Iterator[Path]:
    """Yield the Python files, without hidden folders, environments and tests."""
    seen = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            it
            for it in folders
            if not it.startswith(".") and it not in NOT_SEARCHED and not (Path(parent) / it / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(("test_", "conftest", "setup.py")):
                yield Path(parent) / name
                seen += 1
                if seen == MOST_FILES:
                    return


@dataclass
class _Module:
    """One file's names and what they stand for."""

    root: Path
    file: Path
    imported: dict[str, str] = field(default_factory=dict)
    """Local name -> the dotted name that it was imported from."""

    def agents(self) -> Iterator[FoundAgent]:
        try:
            with warnings.catch_warnings():  # a stranger's invalid escapes
                warnings.simplefilter("ignore")
                tree = ast.parse(self.file.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for it in node.names:
                    package = it.name.partition(".")[0]
                    self.imported |= {it.asname: it.name} if it.asname else {package: package}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level and not self._is_own(node.module):
                self.imported |= {it.asname or it.name: f"{node.module}.{it.name}" for it in node.names}
        yield from self._objects(tree.body)
        yield from self._functions([it for it in tree.body if isinstance(it, Function)])

    def _found(self, name: str, node: ast.stmt, what: str) -> FoundAgent:
        return FoundAgent(self.file.relative_to(self.root), name, node.lineno, what)

    def _objects(self, body: Iterable[ast.stmt]) -> Iterator[FoundAgent]:
        """Yield the module's variables that are agents, without the parts of other agents."""
        made = {}
        for node in body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (package := self._maker(node.value)):
                made[target.id] = node, package
        parts = {part.id for node, _ in made.values() for part in ast.walk(node.value) if isinstance(part, ast.Name)}
        # As in builder.add_node("search", graph).
        statements = [node for node in body if isinstance(node, ast.Assign | ast.Expr)]
        calls = [it for node in statements for it in ast.walk(node) if isinstance(it, ast.Call)]
        added = [it for it in calls if isinstance(it.func, ast.Attribute) and it.func.attr == "add_node"]
        parts |= {given.id for call in added for given in call.args if isinstance(given, ast.Name)}
        for name, (node, package) in made.items():
            if name not in parts:
                yield self._found(name, node, package)

    def _maker(self, value: ast.expr | None) -> str | None:
        """Return the package whose call in ``value`` makes an agent, or None."""
        if not isinstance(value, ast.Call):
            return None
        maker = value.func.value if isinstance(value.func, ast.Subscript) else value.func  # Agent[Context](...)
        called = _dotted(maker)
        first, _, rest = called.partition(".")
        full = ".".join(filter(None, (self.imported.get(first), rest)))
        if MAKER.fullmatch(full.rpartition(".")[2]):
            for package in AGENT_PACKAGES:
                if full.startswith(f"{package}."):
                    return package
        # A graph is a local object; re.compile, for example, is not.
        compiled = called.endswith(".compile") and first not in self.imported
        return "langgraph" if compiled and self._imports("langgraph") else None

    def _imports(self, package: str) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for name in self.imported.values())

    def _is_own(self, module: str) -> bool:
        """Whether the repository has this module, such as agents/sales.py, which is not the package agents."""
        path = Path(*module.split(".")).with_suffix(".py")
        return any((base / path).is_file() for base in (self.root, self.root / "src", self.file.parent))

    def _functions(self, functions: list[Function]) -> Iterator[FoundAgent]:
        calling, found = self._calling_a_model(functions), {}
        for function in functions:
            if function.name.startswith("_") or function.name == "main":
                continue
            parameters, required = _parameters(function)
            if not parameters and not required:
                if what := self._made_by(function):
                    found[function.name] = self._found(function.name, function, what)
            elif parameters and function.name in calling and required <= 1 and parameters[0] not in NO_TASK:
                what = f"{FUNCTION} {calling[function.name]}"
                found[function.name] = self._found(function.name, function, what)
        # Not what main() or a handler calls: these run the agent.
        parts = {
            node.func.id
            for function in functions
            if function.name in found or function.name.startswith("_")
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != function.name
        }
        yield from (agent for name, agent in found.items() if name not in parts)

    def _calling_a_model(self, functions: list[Function]) -> dict[str, str]:
        """Return the functions that call a model, themselves or through others of them, and with which package."""
        packages = [it for it in (*sorted(CLIENTS), *ADAPTERS) if self._imports(it)]
        if not packages:
            return {}
        calling = {it.name: packages[0] for it in functions if any(map(self._calls_model, ast.walk(it)))}
        while more := {
            it.name
            for it in functions
            if it.name not in calling
            and any(isinstance(node, ast.Name) and node.id in calling for node in ast.walk(it))
        }:
            calling |= dict.fromkeys(more, packages[0])
        return calling

    def _calls_model(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in ("completion", "acompletion", "responses", "aresponses")
        # subprocess.run is none.
        package = self.imported.get(_dotted(node.func).partition(".")[0], "").partition(".")[0]
        called = isinstance(node.func, ast.Attribute) and MODEL_METHOD.fullmatch(node.func.attr) is not None
        return called and package not in sys.stdlib_module_names

    def _made_by(self, function: Function) -> str | None:
        """Return what a function without parameters makes, if it is an agent."""
        inner = [it for it in function.body if isinstance(it, Function)]
        made = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                made[node.targets[0].id] = self._maker(node.value)
        calling = self._calling_a_model(inner)
        for node in ast.walk(function):
            if not isinstance(node, ast.Return):
                continue
            if package := self._maker(node.value):
                return package
            if isinstance(node.value, ast.Name):
                if package := made.get(node.value.id):
                    return package
                if node.value.id in calling:
                    return f"{FUNCTION} {calling[node.value.id]}"
        return None


def _dotted(node: ast.expr) -> str:
    """Return ``a.b`` for a name and its attributes; for anything else its attributes alone, as in ``.compile``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(names)])


def _parameters(function: Function) -> tuple[list[str], int]:
    """Return the names of the positional parameters, and how many parameters have no default."""
    named = function.args
    positional = [it.arg for it in (*named.posonlyargs, *named.args)]
    return positional, len(positional) - len(named.defaults) + sum(it is None for it in named.kw_defaults)
