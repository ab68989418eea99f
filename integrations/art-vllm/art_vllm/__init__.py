"""Serving by vLLM, and what belongs to it: planning memory, exporting weights. Says what the plugin offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_core import hookimpl
from art_vllm.address import AddressEngine
from art_vllm.engine import VllmEngine

if TYPE_CHECKING:
    import typer

__all__ = ["AddressEngine", "VllmEngine"]


@hookimpl
def register_engines(register: Callable[[str, Any], None]) -> None:
    """Offer ``engine="vllm"``, and ``"http"`` for an address."""
    register("vllm", VllmEngine)
    register("http", AddressEngine)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art plan`` and ``art export``."""
    from art_vllm.export_command import add_to as add_export
    from art_vllm.plan_command import add_to as add_plan

    add_plan(app)
    add_export(app)
