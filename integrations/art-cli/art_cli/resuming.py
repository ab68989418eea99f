"""Resuming an interrupted command: how it is said, and what ``art train --resume`` starts again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from art_cli.variables import load_env_file
from art_core.errors import ConfigError, Terminated
from art_core.plugin_api import LEFT_OUT
from art_core.store import Store
from art_core.store.run_folder import store_file


def quoted(run_dir: Path) -> str:
    """Return a folder as a shell takes it."""
    return shlex.quote(str(run_dir))


def same_command(run_dir: Path) -> str:
    """Return how to resume a command that has no ``--resume``."""
    return f"the same command with --run-dir {quoted(run_dir)}"


@contextmanager
def resume_hint(run_dir: Path, command: str, effect: str = "resumes after the last finished step") -> Iterator[None]:
    """On Ctrl-C or SIGTERM, print the command that resumes the run, and exit."""
    try:
        yield
    except KeyboardInterrupt as stop:
        text = f"{command} {effect}" if run_dir.exists() else "stopped before anything was recorded"
        Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None


def _command_of(run_dir: Path) -> dict[str, Any]:
    """Return the arguments (``given``) and the working ``folder`` with which ``art train`` last started a run.

    Raises ConfigError if ``art train`` did not start it, or if that folder is gone.
    """
    with Store(store_file(run_dir)) as store:
        command = store.meta("command")
    if not command:
        raise ConfigError(
            f"{run_dir} was not started by `art train`, so its agent is unknown; to resume it, repeat the call that started it "
            f"with run_dir={str(run_dir)!r}"
        )
    if not Path(command["folder"]).is_dir():
        raise ConfigError(
            f"{run_dir} was started in {command['folder']}, which no longer exists; pass AGENT and TASKS to `art train`, with "
            f"--run-dir {quoted(run_dir)}"
        )
    return command


def resumed(run_dir: Path, arguments: Mapping[str, Any], overrides: Collection[str]) -> dict[str, Any]:
    """Change to the folder in which a run was last started; return its arguments then, with ``overrides`` from ``arguments``."""
    last_start = _command_of(run_dir)
    os.chdir(last_start["folder"])
    load_env_file()
    settings = {**last_start["given"]["set_"], **arguments["set_"]}
    if redacted := [name for name, value in settings.items() if value == LEFT_OUT]:
        raise ConfigError(
            f"{run_dir} was started with secret values, which a run folder does not store; pass them again: "
            f"art train --resume {quoted(run_dir)} {' '.join(f'--set {name}=VALUE' for name in redacted)}"
        )
    return {**arguments, **last_start["given"], **{name: arguments[name] for name in overrides}, "set_": settings}
