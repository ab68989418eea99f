"""The command line of ``art import langfuse``. Heavy imports wait until it runs."""

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
"""Seconds to try to read a page: a rate-limiting server asks to wait for up to a minute."""
SHOWN = 5
"""Most reasons for skipped traces and calls that are printed."""

app = typer.Typer(
    no_args_is_help=True,
    help="Import traces of an agent in production as rollouts.",
    epilog="Example: `art import langfuse --since 7d --tag production --run-dir runs/imported`",
)


@app.callback()
def group() -> None:
    """Import traces of an agent in production as rollouts."""


@app.command(
    "langfuse",
    epilog="Example: `art import langfuse --since 7d --tag production --run-dir runs/imported --tasks tasks.jsonl`. "
    "Then: `art judge runs/imported --single`, or art.load_trajectories and learn_sft. LANGFUSE_PUBLIC_KEY, "
    "LANGFUSE_SECRET_KEY and LANGFUSE_HOST name the project.",
)
def langfuse(
    run_dir: Annotated[Path, typer.Option(help="Run folder to import into; traces that it already has are skipped.")] = RUNS,
    model: Annotated[str, typer.Option(help="The model to train on the imports; its chat template makes the tokens.")] = "tiny",
    since: Annotated[str | None, typer.Option(help="Start time, in ISO 8601, or as an age such as 30m, 12h, 7d, 4w.")] = None,
    until: Annotated[str | None, typer.Option(help="End time, in the same form as --since.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Import at most the N newest traces.")] = 100,
    tag: Annotated[list[str] | None, typer.Option(help="Only traces with all of these tags; repeatable.")] = None,
    name: Annotated[str | None, typer.Option(help="Only traces with this name.")] = None,
    session: Annotated[str | None, typer.Option(help="Only traces of this session.")] = None,
    user: Annotated[str | None, typer.Option(help="Only traces of this user.")] = None,
    environment: Annotated[str | None, typer.Option(help="Only traces of this environment.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="The score to use as reward; default: reward, or the only score of a trace.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="File to write the inputs to, one per line, for `art train`.")] = None,
) -> None:  # fmt: skip
    """Import traces of a Langfuse project as rollouts, for judging, imitation (SFT), or as tasks.

    Another model sampled their tokens, so they cannot be used for GRPO. Exit code 1: nothing to import.
    """
    from art_core.store import Store
    from art_core.store.run_folder import claimed
    from art_embedded.rendering import Renderer
    from art_langfuse.account import account
    from art_langfuse.api import Project, conditions
    from art_langfuse.importing import import_traces, write_tasks

    trace_conditions = conditions(
        name=name, tags=tag or (), session=session, user=user, environment=environment,
        since=_moment(since, "--since"), until=_moment(until, "--until"),
    )  # fmt: skip
    langfuse_account, renderer = account(), Renderer(model)
    with claimed(run_dir), Store(run_dir / "run.sqlite") as store:
        imported_for = store.meta("imported_for", model)
        if imported_for != model:
            raise typer.BadParameter(
                f"{run_dir} has rollouts with tokens of {imported_for}, not of {model}; pass another --run-dir",
                param_hint="--model",
            )
        store.set_meta("imported_for", model)
        project = Project(langfuse_account, patience=PATIENCE)
        try:
            imported = import_traces(project, store, trace_conditions, renderer, limit=limit, reward=reward)
        finally:
            project.close()
    _print(imported, run_dir)
    if tasks is not None:
        typer.echo(f"{write_tasks(tasks, imported)} tasks written to {tasks}")
    if not imported.runs and not imported.already:
        raise typer.Exit(1)


def add_to(art: typer.Typer) -> None:
    """Add ``art import``."""
    art.add_typer(app, name="import")


def _moment(value: str | None, option: str) -> str | None:
    """Return a time in ISO 8601, with its zone."""
    if value is None:
        return None
    if match := AGO.fullmatch(value):
        return (datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})).isoformat()
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat()
    except ValueError as error:
        raise typer.BadParameter(
            f"{value!r} is not a time: {error}; use a date such as 2026-11-22, or an age such as 7d", param_hint=option
        ) from error


def _print(imported: Imported, run_dir: Path) -> None:
    typer.echo(
        f"{imported.traces} traces read: {len(imported.runs)} rollouts with {imported.calls} model calls added to {run_dir}, "
        f"{imported.already} already there, {imported.rewarded} with a reward"
    )
    for reason, count in imported.left_out.most_common(SHOWN):
        typer.echo(f"skipped: {count} {reason}")
    if imported.runs or imported.already:
        comparable = sum(count > 1 for count in imported.groups.values())
        single = "" if comparable else " --single"
        typer.echo(
            f"{len(imported.groups)} different inputs, {comparable} of them with several rollouts; next: art judge "
            f"{run_dir}{single}"
        )
