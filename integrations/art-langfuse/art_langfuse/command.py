"""The command line of ``art import langfuse``. What is heavy is imported when it runs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from art_langfuse.importing import Imported

AGO = re.compile(r"(\d+)([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
RUNS = Path("runs/imported")
PATIENCE = 120.0
"""Seconds for a page: a server that wants fewer requests asks to wait up to a minute."""
SHOWN = 5
"""Reasons for which something was left out."""

app = typer.Typer(
    no_args_is_help=True,
    help="Make runs of what an agent in production has recorded elsewhere.",
    epilog="Example: `art import langfuse --since 7d --tag production --run-dir runs/imported`",
)


@app.callback()
def group() -> None:
    """Make runs of what an agent in production has recorded elsewhere."""


@app.command(
    "langfuse",
    epilog="Example: `art import langfuse --since 7d --tag production --run-dir runs/imported --tasks tasks.jsonl`. "
    "Then: `art judge runs/imported --single`, or art.load_trajectories and learn_sft. LANGFUSE_PUBLIC_KEY, "
    "LANGFUSE_SECRET_KEY and LANGFUSE_HOST name the project.",
)
def langfuse(
    run_dir: Annotated[Path, typer.Option(help="Folder of runs; what is in it stays, and is not imported twice.")] = RUNS,
    model: Annotated[str, typer.Option(help="The model that shall learn from them: its template makes the tokens.")] = "tiny",
    since: Annotated[str | None, typer.Option(help="ISO 8601, or 30m, 12h, 7d, 4w ago.")] = None,
    until: Annotated[str | None, typer.Option(help="As --since.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many traces.")] = 100,
    tag: Annotated[list[str] | None, typer.Option(help="Traces with all of these tags; repeatable.")] = None,
    name: Annotated[str | None, typer.Option(help="Traces of this name.")] = None,
    session: Annotated[str | None, typer.Option(help="Traces of this session.")] = None,
    user: Annotated[str | None, typer.Option(help="Traces of this user.")] = None,
    environment: Annotated[str | None, typer.Option(help="Traces of this environment.")] = None,
    reward: Annotated[str | None, typer.Option(help="The score that is the reward; default: reward, or the only.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Write the inputs there, one a line, for `art train`.")] = None,
) -> None:  # fmt: skip
    """Read traces of a Langfuse project and keep them as runs: to judge, to imitate (SFT), to take tasks from.

    Their tokens were sampled by another model, so no step of GRPO is taken on them. Exit code 1: there was nothing to take.
    """
    from art_core.store import Store
    from art_core.store.run_folder import claimed
    from art_embedded.rendering import Renderer
    from art_langfuse.account import account
    from art_langfuse.api import Project, conditions
    from art_langfuse.importing import import_traces, write_tasks

    wanted = conditions(
        name=name, tags=tag or (), session=session, user=user, environment=environment,
        since=_moment(since, "--since"), until=_moment(until, "--until"),
    )  # fmt: skip
    found_account, renderer = account(), Renderer(model)
    with claimed(run_dir), Store(run_dir / "run.sqlite") as store:
        theirs = store.meta("imported_for", model)
        if theirs != model:
            raise typer.BadParameter(
                f"{run_dir} holds runs with tokens of {theirs}, not of {model}; give another --run-dir",
                param_hint="--model",
            )
        store.set_meta("imported_for", model)
        project = Project(found_account, patience=PATIENCE)
        try:
            found = import_traces(project, store, wanted, renderer, limit=limit, reward=reward)
        finally:
            project.close()
    _say(found, run_dir)
    if tasks is not None:
        typer.echo(f"{write_tasks(tasks, found)} tasks written to {tasks}")
    if not found.runs and not found.already:
        raise typer.Exit(1)


def add_to(art: typer.Typer) -> None:
    """Add ``art import``."""
    art.add_typer(app, name="import")


def _moment(said: str | None, option: str) -> str | None:
    """Return a moment in ISO 8601, with its zone."""
    if said is None:
        return None
    if match := AGO.fullmatch(said):
        return (datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})).isoformat()
    try:
        return datetime.fromisoformat(said).astimezone(UTC).isoformat()
    except ValueError as error:
        raise typer.BadParameter(
            f"{said!r} is no moment: {error}; give 2026-11-22, or 7d", param_hint=option
        ) from error


def _say(found: Imported, run_dir: Path) -> None:
    typer.echo(
        f"{found.traces} traces read: {len(found.runs)} runs with {found.calls} model calls added to {run_dir}, "
        f"{found.already} were there, {found.rewarded} have a reward"
    )
    for reason, count in found.left_out.most_common(SHOWN):
        typer.echo(f"left out: {count} {reason}")
    if found.runs or found.already:
        compared = sum(count > 1 for count in found.groups.values())
        single = "" if compared else " --single"
        typer.echo(
            f"{len(found.groups)} different inputs, {compared} of them with several runs: art judge {run_dir}{single}"
        )
