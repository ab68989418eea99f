"""``art tasks``: which suites there are, what a task looks like, and tasks from traffic."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

import art_core as art
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins, plural
from art_tasks.console import say
from art_tasks.from_mcp import from_mcp

if TYPE_CHECKING:
    from art_tasks.traffic import Curated, Traffic

SHOW = "show"
KINDS_SHOWN = 5
TEXT_CHARS = 80


class Suites(TyperGroup):
    """Treats an unknown command as the name of a suite."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [SHOW, *args]
        return super().parse_args(ctx, args or [SHOW])


app = typer.Typer(
    cls=Suites,
    help="List third-party tasks, or make tasks from what your users asked for or for the tools of an MCP server.",
    epilog="Examples: `art tasks`; `art tasks bfcl/simple`; `art tasks from runs/production --redact`; "
    "`art tasks from-mcp 'uvx mcp-server-time' --author openai/gpt-6-luna`",
)


@app.command(SHOW, epilog="Example: `art tasks`; `art tasks bfcl/simple`")
def show(
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


@app.command(
    "from",
    epilog="Examples: `art tasks from runs/production --redact`; `art tasks from spans.jsonl --system 'You are a travel agent'`; "
    "`art tasks from runs/production --known held_out.jsonl --out new.jsonl --held-out new_held_out.jsonl`",
)
def from_(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder (of art gateway, art eval --live, art import langfuse, training), or a .jsonl or .json file: "
            "OpenTelemetry spans, LangSmith runs, rows with input and output, chat messages, or inputs."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File for the training tasks.")] = Path("tasks.jsonl"),
    held_out: Annotated[Path, typer.Option(help="File for the newest conversations.")] = Path("held_out.jsonl"),
    share: Annotated[float, typer.Option(help="Share of the conversations to hold out.")] = 0.2,
    same: Annotated[float, typer.Option(help="Inputs at least this similar, 0.5 to 1, are the same task.")] = 0.8,
    per_kind: Annotated[int | None, typer.Option(min=1, help="Keep at most the N newest tasks of one kind.")] = None,
    system: Annotated[str | None, typer.Option(help="Only requests whose system prompt contains this text.")] = None,
    known: Annotated[
        list[Path] | None, typer.Option(help="A file of tasks, such as an earlier held-out set, to leave out; repeatable.")
    ] = None,
    redact: Annotated[bool, typer.Option("--redact", help="Replace secrets and personal data by tags.")] = False,
) -> None:  # fmt: skip
    """Make tasks from what users asked an agent for: without duplicates, and with the newest conversations held out.

    Each line of the files is one task to read and edit. Exit code 1: no task.
    """
    from art_cli.arguments import load_tasks
    from art_tasks.traffic import curate, read
    from art_tasks.traffic.curate import as_lines
    from art_tasks.traffic.redact import Redactor

    for path in (out, held_out):
        if path.exists():
            raise ConfigError(
                f"{path} exists and may have been edited; delete it, or pass another --out and --held-out"
            )
    if out.resolve() == held_out.resolve():
        raise ConfigError(
            f"{out} can't have both the training and the held-out tasks; pass another --out or --held-out"
        )
    traffic = read(source)
    left_out = [task for path in known or () for task in load_tasks(str(path))]
    curated = curate(
        traffic.requests, held_out=share, same=same, per_kind=per_kind, system=system, known=left_out,
        redact=Redactor() if redact else None,
    )  # fmt: skip
    _print(traffic, curated)
    if not curated.tasks:
        say("nothing to make tasks from")
        raise typer.Exit(1)
    for path, content in [(out, as_lines(curated.train)), (held_out, as_lines(curated.held_out))]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    say(f"{out}: {plural(len(curated.train), 'task')} for training")
    say(f"{held_out}: {plural(len(curated.held_out), 'task')} of the newest conversations, held out")
    if not redact:
        say("the files contain what users wrote, including any secrets: --redact replaces keys and personal data")
    measured = held_out if curated.held_out else out
    say(f"next: art eval AGENT {shlex.quote(str(measured))} --reward REWARD --live --run-dir runs/live")


app.command(
    "from-mcp",
    epilog="Examples: `art tasks from-mcp 'uvx mcp-server-time' --author openai/gpt-6-luna`; "
    "`art tasks from-mcp 'uvx mcp-server-git --repository demo' --author anthropic/claude-sonnet-5-5 --solver Qwen/Qwen3-4B "
    "--about 'demo is a checkout of a web shop'`",
)(from_mcp)


def _print(traffic: Traffic, curated: Curated) -> None:
    from art_tasks.traffic.curate import text_of
    from art_tasks.traffic.sources import describe

    say(describe(traffic))
    for reason, count in traffic.unread.most_common():
        say(f"not read: {count}, {reason} (the first: {traffic.first_unread[reason]})")
    for reason, count in curated.dropped.most_common():
        say(f"dropped: {count}, {reason}")
    for sort, count in curated.redacted.most_common():
        say(f"redacted: {count} x {sort}")
    kinds = Counter(task["kind"] for task in curated.tasks)
    for kind, count in kinds.most_common(KINDS_SHOWN):
        text = " ".join(text_of(next(it for it in curated.tasks if it["kind"] == kind)["input"]).split())
        say(f"kind {kind}: {plural(count, 'task')}, such as {text[:TEXT_CHARS]!r}")
    if len(kinds) > KINDS_SHOWN:
        say(f"and {len(kinds) - KINDS_SHOWN} more kinds, in the field kind")
