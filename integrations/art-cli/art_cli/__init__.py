"""The ``art`` command, and advice about plugins that are missing."""

from __future__ import annotations

from art_cli import catalogue
from art_core import hookimpl


@hookimpl
def suggest(kind: str, wanted: object) -> str | None:
    """Say how to install what other distributions of this repository provide, or why it is refused."""
    return catalogue.for_agent(wanted) if kind == "agent" else catalogue.for_name(str(wanted))
