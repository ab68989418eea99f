"""Serves the policy with vLLM, plans GPU memory and exports weights."""

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
    """Register ``engine="vllm"``, and ``"http"``, which serves addresses."""
    register("vllm", VllmEngine)
    register("http", AddressEngine)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Register ``art plan`` and ``art export``."""
    from art_vllm.export_command import add_to as add_export
    from art_vllm.plan_command import add_to as add_plan

    add_plan(app)
    add_export(app)
