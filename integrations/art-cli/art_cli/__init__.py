"""The ``art`` command, and advice about plugins that are missing."""

from __future__ import annotations

from art_cli import catalogue
from art_core import hookimpl


@hookimpl
def suggest(kind: str, wanted: object) -> str | None:
    """Say how to install what the other distributions of this repository provide, and what is refused."""
    return catalogue.for_agent(wanted) if kind == "agent" else catalogue.for_name(str(wanted))
