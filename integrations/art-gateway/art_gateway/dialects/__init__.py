"""The wire formats that are translated to and from chat completions."""

from __future__ import annotations

from art_gateway.dialects.completions import Completions
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.responses import Responses

__all__ = ["Completions", "Messages", "Responses", "dialects"]


def dialects() -> dict[str, Completions | Messages | Responses]:
    """Return path -> dialect: new instances on each call, which can be pickled."""
    return {"/v1/completions": Completions(), "/v1/messages": Messages(), "/v1/responses": Responses()}
