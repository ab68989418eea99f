"""The ``art export`` command. Imports torch and transformers only when it runs."""

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
    """Data types of the merged weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Output folder, new or empty; default: exports/step-N in the run.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint to export; default: the newest.")] = None,
    merged: Annotated[
        bool, typer.Option("--merged/--no-merged", help="Also write the model with the adapter merged in.")
    ] = True,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Data type of the merged weights; default: as the start weights.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Load the export and compare its logprobs with the trained weights'."),
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export trained weights for PEFT, transformers and vLLM, and check that the export gives the same logprobs."""
    try:
        from art_vllm.export import export
    except ImportError as error:
        raise ConfigError(
            f"art export needs torch, transformers and peft ({error}); install art-core[train], see docs/install.md"
        ) from error

    with _progress() as show:
        exported = export(run, out, step=step, merged=merged, dtype=dtype and dtype.value, check=check, progress=show)
    if json_:
        typer.echo(json.dumps(asdict(exported), default=str))
    else:
        _print(exported)


def add_to(art: typer.Typer) -> None:
    """Register ``art export``."""
    art.command("export", epilog="Example: `art export runs/my-run --out my-model`")(export_run)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current stage: a spinner on a terminal, else one line per stage."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading the run", total=None)

        def show(stage: str) -> None:
            bars.update(task, description=stage)
            if bars.disable:
                console.print(stage)

        yield show


def _print(exported: Exported) -> None:
    for name, folder in (("adapter", exported.adapter), ("merged", exported.merged)):
        if folder is not None:
            typer.echo(f"{name}: {folder}" + (f" ({exported.dtype})" if name == "merged" else ""))
    if exported.check is None:
        typer.echo("not checked")
    else:
        check = exported.check
        typer.echo(
            f"checked: its logprobs match the trained weights' within {check.largest:.2g} nats "
            f"(allowed {check.tolerance:g}) on {check.tokens} tokens of {check.text}"
        )
    for note in exported.notes:
        typer.echo(f"note: {note}")
    for way, command in exported.commands.items():
        typer.echo(f"\nserve {way}:\n{command}")
