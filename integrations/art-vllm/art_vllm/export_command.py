"""The command line of ``art export``. Knows nothing about how weights are written; what is heavy is imported when it runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_vllm.export import Exported


class Dtype(StrEnum):
    """Number formats of the merged weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, new or empty; default: exports/step-N in the run.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of a checkpoint that is kept; default: the newest.")] = None,
    merged: Annotated[
        bool, typer.Option("--merged/--no-merged", help="Write the whole model, not the adapter alone.")
    ] = True,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the merged weights; default: the start weights'.")] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load the export back and compare its logprobs.")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write what a run trained as folders that PEFT, transformers and vLLM load, and check that they compute the same."""
    try:
        from art_vllm.export import export
    except ImportError as error:
        raise ConfigError(
            f"art export loads the trained model ({error}); install art-core[train], as docs/install.md says"
        ) from error

    with _progress() as say:
        exported = export(run, out, step=step, merged=merged, dtype=dtype and dtype.value, check=check, progress=say)
    if json_:
        typer.echo(json.dumps(asdict(exported), default=str))
    else:
        _print(exported)


def add_to(art: typer.Typer) -> None:
    """Add ``art export``."""
    art.command("export", epilog="Example: `art export runs/my-run --out my-model`")(export_run)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done now: a spinner on a terminal, a line elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading the run", total=None)

        def say(what: str) -> None:
            bars.update(task, description=what)
            if bars.disable:
                console.print(what)

        yield say


def _print(exported: Exported) -> None:
    for name, folder in (("adapter", exported.adapter), ("merged", exported.merged)):
        if folder is not None:
            typer.echo(f"{name}: {folder}" + (f" ({exported.dtype})" if name == "merged" else ""))
    if exported.check is None:
        typer.echo("not checked")
    else:
        found = exported.check
        typer.echo(
            f"checked: loaded back, it gives the logprobs that were trained within {found.largest:.2g} nats "
            f"(allowed {found.tolerance:g}) on {found.tokens} tokens of {found.text}"
        )
    for note in exported.notes:
        typer.echo(f"note: {note}")
    for way, command in exported.commands.items():
        typer.echo(f"\nserve {way}:\n{command}")
