"""Serving by vLLM, and what belongs to it: planning memory, exporting weights. Says what the plugin offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art plan`` and ``art export``."""
    from art_vllm.export_command import add_to as add_export
    from art_vllm.plan_command import add_to as add_plan

    add_plan(app)
    add_export(app)
