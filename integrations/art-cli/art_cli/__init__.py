"""The ``art`` command, and advice about plugins that are missing."""

from __future__ import annotations

from art_cli import catalogue
from art_core import hookimpl


@hookimpl
def suggest(kind: str, wanted: object) -> str | None:
    """Say how to install what other distributions of this repository provide, or why it is refused."""
    if kind == "agent":
        return catalogue.for_agent(wanted)
    own = "a command line names your own as FILE.py:NAME or MODULE:NAME" if kind == "reward" else None
    return catalogue.for_name(str(wanted)) or own
