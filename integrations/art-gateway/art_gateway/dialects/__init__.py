"""The wire formats that are translated to and from chat completions."""

from __future__ import annotations

from art_core.capture import Dialect
from art_gateway.dialects.completions import Completions
from art_gateway.dialects.counting import Counting
from art_gateway.dialects.gemini import Gemini
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.ollama import Ollama
from art_gateway.dialects.responses import Responses

__all__ = ["Completions", "Gemini", "Messages", "Ollama", "Responses", "dialects"]


def dialects() -> dict[str, Dialect]:
    """Return path -> dialect: new instances on each call, which can be pickled."""
    messages, responses, gemini = Messages(), Responses(), Gemini(streams=False)
    return {
        "/v1/completions": Completions(),
        "/v1/messages": messages,
        "/v1/messages/count_tokens": Counting(messages, "input_tokens"),
        "/v1/responses": responses,
        "/v1/responses/input_tokens": Counting(responses, "input_tokens", object="response.input_tokens"),
        "/models/{model}:generateContent": gemini,
        "/models/{model}:streamGenerateContent": Gemini(streams=True),
        "/models/{model}:countTokens": Counting(gemini, "totalTokens"),
        "/api/chat": Ollama(),
    }
