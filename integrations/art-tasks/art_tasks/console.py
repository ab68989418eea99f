"""What the commands print."""

from __future__ import annotations

from rich.console import Console

from art_core.plugin_api import printable


def say(text: str) -> None:
    """Print a line, whatever it contains, without breaking or styling it."""
    Console().print(printable(text), markup=False, highlight=False, soft_wrap=True)
