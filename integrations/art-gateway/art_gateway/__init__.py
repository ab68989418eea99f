"""Answers more wire formats at every rollout's address. Knows nothing about how calls are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from art_core import hookimpl
from art_gateway.dialects import dialects

__all__ = ["dialects"]


@hookimpl
def register_dialects(register: Callable[[str, Any], None]) -> None:
    """Offer Responses, Anthropic Messages and completions."""
    for path, dialect in dialects().items():
        register(path, dialect)
