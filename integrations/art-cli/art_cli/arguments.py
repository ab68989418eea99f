"""What a command line names -> Python objects: MODULE:NAME, FILE.py:NAME, task files, NAME=VALUE. Knows no command."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError

PYTHON = {"None": None, "True": True, "False": False}
"""What the docs and errors call these values; JSON has other names."""


def stand_in_key() -> None:
    """Set a key where there is none: clients refuse to be made without one, and the policy that answers them needs none."""
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")


def load_example() -> Any:
    """Return the email example's train module: shipped in the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    shipped, checkout = (package / "examples" / "email_search").is_dir(), package.parents[2]
    if not shipped and not (checkout / "examples" / "email_search").is_dir():
        raise ConfigError("the demo's example is not in this installation; clone the repository and run 'make demo'")
    if not shipped:
        sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(f"{'art_cli.' if shipped else ''}examples.email_search.train")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo trains a LangGraph agent and lacks {error.name}; in the checkout of art, run: make demo"
        ) from error


@functools.cache
def load_file(path: Path) -> Any:
    """Import a .py file by its path, once, with its folder importable."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"art_file_{path.stem}"  # the file may be called like a package that it imports
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise ConfigError(
            f"{path} belongs to a package ({error}); name it as a module: PACKAGE.{path.stem}:NAME"
        ) from error
    return module


def load_object(where: str) -> Any:
    """Return the object that ``MODULE:NAME`` or ``FILE.py:NAME`` names."""
    module_name, colon, name = where.rpartition(":")
    if not colon:
        raise ConfigError(f"{where!r} names no object; write MODULE:NAME or FILE.py:NAME")
    if module_name.endswith(".py"):
        module = load_file(Path(module_name))
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{where!r}: {error}; run art where it can be imported, or write FILE.py:NAME") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [it for it in vars(module) if not it.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{module_name} has no {name!r}{hint}")
    return getattr(module, name)


def load_agent(where: str) -> Any:
    """Return the agent, made by the function ``where`` if it takes no arguments."""
    stand_in_key()
    return made(load_object(where))


def made(thing: Any) -> Any:
    """Call a function that takes no arguments, and return anything else as it is."""
    return thing() if isfunction(thing) and not signature(thing).parameters else thing


def load_tasks(where: str) -> list[Any]:
    """Return the tasks of a .jsonl or .json file, or of an object."""
    if not where.endswith((".jsonl", ".json")):
        return listed(made(load_object(where)), where, "a list, or a function without arguments that makes one")
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"there is no task file {path}")
    if where.endswith(".json"):
        return listed(parsed(path.read_text(), where), where, "a list")
    lines = enumerate(path.read_text().splitlines(), start=1)
    return [parsed(line, f"{where}, line {number}") for number, line in lines if line.strip()]


def listed(tasks: Any, where: str, wanted: str) -> list[Any]:
    """Return the tasks as a list; ConfigError that names ``where`` for a text, a dict, and what is no series at all."""
    series = any(hasattr(type(tasks), it) for it in ("__iter__", "__getitem__"))
    if not series or isinstance(tasks, str | Mapping):
        raise ConfigError(f"{where} is no list of tasks but of type {type(tasks).__name__}; give {wanted}")
    return list(tasks)


def parsed(text: str, where: str) -> Any:
    """Return what JSON says; ConfigError that names ``where`` for what is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def load_reward(where: str) -> str | Callable[..., Any]:
    """Return the function that ``MODULE:NAME`` names; a plain word is a registered name."""
    return load_object(where) if ":" in where else where


def parse_settings(pairs: list[str], options: Collection[str]) -> dict[str, Any]:
    """Return the settings of ``NAME=VALUE`` pairs; values are Python's None, True, False, JSON, or else words.

    Raises ConfigError for one that has an option of its own, one of ``options``.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: write NAME=VALUE")
        if name in options:
            option = "tracker" if name == "trackers" else name.replace("_", "-")  # given once for each
            raise ConfigError(f"--set {pair!r}: give it as --{option} {value}")
        try:
            settings[name] = PYTHON[value] if value in PYTHON else json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings
