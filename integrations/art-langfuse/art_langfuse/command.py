"""The command line of ``art import langfuse``. What is heavy is imported when it runs."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Make runs of what a production agent has recorded elsewhere.")


def add_to(art: typer.Typer) -> None:
    """Add ``art import``."""
    art.add_typer(app, name="import")
