"""Turns what a command line names into Python objects: MODULE:NAME, FILE.py:NAME, task files, NAME=VALUE."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from art_cli.catalogue import for_command, how_to_install
from art_core.errors import ArtError, ConfigError

PYTHON = {"None": None, "True": True, "False": False}
"""Docs and errors spell these values as Python does; JSON does not."""
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class Commands(TyperGroup):
    """The ``art`` command's group: refuses a command whose distribution is missing with how to install it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None; raises ConfigError if another distribution provides it."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (advice := for_command(cmd_name)):
            raise ConfigError(advice)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; ``--debug`` may follow the command."""
        end = args.index("--") if "--" in args else len(args)
        options = [argument for argument in args[:end] if argument != "--debug"]
        debug = ["--debug"] if len(options) < end else []
        return super().parse_args(ctx, [*debug, *options, *args[end:]])


def stand_in_key() -> None:
    """Set a placeholder OPENAI_API_KEY if none is set or it is empty: clients need one, and the policy ignores it."""
    os.environ["OPENAI_API_KEY"] = os.environ.get("OPENAI_API_KEY") or "unused: the policy answers"


def load_example() -> Any:
    """Import the email example's train module, from the wheel or from the checkout."""
    package = Path(__file__).parent
    shipped, checkout = (package / "examples" / "email_search").is_dir(), package.parents[2]
    if not shipped and not (checkout / "examples" / "email_search").is_dir():
        raise ConfigError(
            "this installation does not include the demo's example; clone the repository and run 'make demo'"
        )
    if not shipped:
        sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(f"{'art_cli.' if shipped else ''}examples.email_search.train")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo trains a LangGraph agent and needs {error.name}; in the checkout of art, run: make demo"
        ) from error


def import_folders(folder: Path) -> list[Path]:
    """Return from where code in ``folder`` is imported: the nearest ``src``, if any, then what is around its package."""
    upwards = (folder, *folder.parents)
    outside = next(it for it in upwards if not (it / "__init__.py").exists())
    return [*[it for it in upwards if it.name == "src"][:1], outside]


def load_file(path: Path) -> Any:
    """Import a .py file once, with its folder on ``sys.path``; a file of a package as its module.

    What is around the package, and a folder ``src`` above, are on ``sys.path`` too.
    """
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return _load_file(path.absolute())


@functools.cache  # by the whole path: app.py is another file in another working directory
def _load_file(path: Path) -> Any:
    folder = path.parent.resolve()
    *sources, outside = import_folders(folder)
    for added in map(str, (*sources, outside, folder)):
        if added not in sys.path:
            sys.path.insert(0, added)
    if outside != folder:  # its relative imports need the package
        parts = path.resolve().relative_to(outside).with_suffix("").parts
        return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    name = f"art_file_{path.stem}"  # the file may have the name of a package that it imports
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
            f"{path} is part of a package ({error}); pass it as a module: PACKAGE.{path.stem}:NAME"
        ) from error
    return module


@contextmanager
def _own_code(failure: str) -> Iterator[None]:
    """Turn what the user's code raises inside the block into a ConfigError that names its line."""
    try:
        yield
    except ArtError:
        raise
    except (Exception, SystemExit) as error:
        places = [it for it in traceback.extract_tb(error.__traceback__) if not _is_library(it.filename)]
        if isinstance(error, SyntaxError) or not places:
            line = ""  # a SyntaxError's own text has it
        else:
            line = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})"
        said = "it calls sys.exit()" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{failure}: {said}{line}; the option --debug prints the traceback") from error


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or is this one."""
    path = Path(file)
    libraries = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(libraries) or file.startswith("<") or file == __file__ or path.is_relative_to(STANDARD_LIBRARY)


def _import(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that isn't
        raise ConfigError(
            f"{name!r}: {error}; run art in a folder from which it can be imported, or write FILE.py:NAME"
        ) from error


def load_object(where: str) -> Any:
    """Return the object that ``MODULE:NAME`` or ``FILE.py:NAME`` names."""
    module_name, colon, name = where.rpartition(":")
    if not colon:
        raise ConfigError(f"{where!r} does not name an object; write MODULE:NAME or FILE.py:NAME")
    with _own_code(f"{module_name} can't be imported"):
        module = load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    if not hasattr(module, name):
        matches = difflib.get_close_matches(
            name, [public for public in vars(module) if not public.startswith("_")], n=1
        )
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise ConfigError(f"{module_name} has no {name!r}{hint}")
    return getattr(module, name)


def load_agent(where: str) -> Any:
    """Return the agent that ``where`` names."""
    stand_in_key()
    return load_object(where)


def _called(thing: Any) -> Any:
    """Call a function that takes no arguments; return anything else unchanged."""
    return thing() if isfunction(thing) and not signature(thing).parameters else thing


def load_tasks(where: str) -> list[Any]:
    """Return the tasks of a .jsonl or .json file, or of a named object."""
    if not where.endswith((".jsonl", ".json")):
        if ":" not in where:
            raise ConfigError(
                f"{where!r} does not name tasks; write FILE.jsonl (a task per line), FILE.json (a list) or FILE.py:NAME"
            )
        named = load_object(where)
        with _own_code(f"{where} failed"):
            return _task_list(_called(named), where, "a list, or a function without arguments that returns one")
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"no such task file: {path}")
    if where.endswith(".json"):
        return _task_list(_parse_json(_read_text(path), where), where, "a list")
    # splitlines would also split at U+2028, within a task.
    lines = enumerate(_read_text(path).split("\n"), start=1)
    return [_parse_json(line, where, number) for number, line in lines if line.strip()]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigError(f"{path}, line {line}: the byte {byte:#04x} is not UTF-8; save the file as UTF-8") from error


def _task_list(tasks: Any, where: str, wanted: str) -> list[Any]:
    """Return the tasks as a list; ConfigError for a string, a dict, and anything that can't be iterated over."""
    iterable = any(hasattr(type(tasks), method) for method in ("__iter__", "__getitem__"))
    if not iterable or isinstance(tasks, str | Mapping):
        raise ConfigError(f"{where} must be a list of tasks, got {type(tasks).__name__}; pass {wanted}")
    return list(tasks)


def _parse_json(text: str, where: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {first_line - 1 + error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}, {place}: not JSON: {error.msg}") from error


def with_prompts(file: str | None) -> Any:
    """Return plugins that apply the file of ``art optimize`` to every request, or None without a file."""
    if file is None:
        return None
    try:
        from art_gepa.plugins import WithPrompts
    except ImportError as error:
        raise ConfigError(f"--prompts needs art-gepa; in the checkout of art: {how_to_install('art-gepa')}") from error
    return WithPrompts(file)


def load_reward(where: str) -> str | Callable[..., Any]:
    """Return the function that ``MODULE:NAME`` names; a name without a colon is a registered reward."""
    if where.endswith(".py"):
        raise ConfigError(f"{where!r} does not name a reward; write {where}:NAME")
    return load_object(where) if ":" in where else where


def parse_settings(pairs: list[str], options: Collection[str]) -> dict[str, Any]:
    """Return the settings of ``NAME=VALUE`` pairs. A value is None, True, False or JSON; anything else is a string.

    Raises ConfigError for a name in ``options``, which has its own command-line option.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: write NAME=VALUE")
        if name in options:
            option = "tracker" if name == "trackers" else name.replace("_", "-")  # --tracker is repeated instead
            raise ConfigError(f"--set {pair!r}: use --{option} {value}")
        try:
            settings[name] = PYTHON[value] if value in PYTHON else json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings
