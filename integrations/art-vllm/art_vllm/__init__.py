"""Serves the policy with vLLM, plans GPU memory and exports weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register
from art_vllm import environment as environments
from art_vllm.address import AddressEngine
from art_vllm.engine import VllmEngine

if TYPE_CHECKING:
    import typer

__all__ = ["AddressEngine", "VllmEngine"]


@hookimpl
def register_engines(register: Register) -> None:
    """Register ``engine="vllm"``, and ``"http"``, which serves addresses."""
    register("vllm", VllmEngine, check=environments.find, install=environments.install, describe=environments.describe)
    register("http", AddressEngine)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Register ``art plan`` and ``art export``."""
    from art_vllm.export_command import add_to as add_export
    from art_vllm.plan_command import add_to as add_plan

    add_plan(app)
    add_export(app)
