"""``art tasks``: which suites there are, and what a task looks like."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

import art_core as art
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins


def tasks(
    name: Annotated[str | None, typer.Argument(help="A suite, or SUITE/NAME to see a task.")] = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
) -> None:
    """List the task suites, the tasks of one, or show a task."""
    console, suites = Console(highlight=False, soft_wrap=True), Plugins().registered("register_tasks")
    if name is None:
        table = Table("suite", Column("tasks", overflow="fold"), Column("origin", overflow="fold"))
        for suite, loaded in suites.items():
            try:
                names = loaded.names()
                listed = ", ".join(names) if len(names) < 10 else f"{len(names)}: art tasks {suite}"
            except (ConfigError, ImportError) as error:
                listed = str(error)
            table.add_row(suite, listed, loaded.origin)
        return console.print(table)
    if "/" not in name:
        suite = Plugins().choose("register_tasks", name)
        return console.print("\n".join(f"{name}/{each}" for each in suite.names()), markup=False)
    found = art.tasks(name, split)
    console.print(f"{len(found)} {split} tasks; {found.origin}; the first:", markup=False)
    console.print(json.dumps(found[0], indent=2, ensure_ascii=False), markup=False)
