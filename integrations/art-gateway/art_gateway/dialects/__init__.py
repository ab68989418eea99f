"""The wire formats that are translated to and from chat completions. Knows nothing about rollouts or who answers."""

from __future__ import annotations

from art_gateway.dialects.completions import Completions
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.responses import Responses

__all__ = ["Completions", "Messages", "Responses", "dialects"]


def dialects() -> dict[str, Completions | Messages | Responses]:
    """Return path -> dialect, fresh ones each time; they can be pickled."""
    return {"/v1/completions": Completions(), "/v1/messages": Messages(), "/v1/responses": Responses()}
