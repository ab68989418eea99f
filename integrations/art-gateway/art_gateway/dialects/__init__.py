"""The wire formats that are translated to and from chat completions."""

from __future__ import annotations

from art_core.capture import Dialect
from art_gateway.dialects.bedrock import Converse, Invoke
from art_gateway.dialects.completions import Completions
from art_gateway.dialects.counting import Counting
from art_gateway.dialects.gemini import Gemini
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.ollama import Ollama
from art_gateway.dialects.responses import Responses

__all__ = ["Completions", "Converse", "Gemini", "Invoke", "Messages", "Ollama", "Responses", "dialects"]

GOOGLE = ("/projects/{project}/locations/{location}/publishers/google", "/publishers/google", "")
"""What stands before ``/models/``: that of Vertex AI, of its express mode, of the Gemini API. The longest is matched first."""


def dialects() -> dict[str, Dialect]:
    """Return path -> dialect: new instances on each call, which can be pickled."""
    messages, responses, gemini = Messages(), Responses(), Gemini(streams=False)
    converse, invoke = Converse(), Invoke()
    of_gemini: dict[str, Dialect] = {
        ":generateContent": gemini,
        ":streamGenerateContent": Gemini(streams=True),
        ":countTokens": Counting(gemini, "totalTokens", ["generateContentRequest"]),
    }
    return {
        "/v1/completions": Completions(),
        "/v1/messages": messages,
        "/v1/messages/count_tokens": Counting(messages, "input_tokens"),
        "/v1/responses": responses,
        "/v1/responses/input_tokens": Counting(responses, "input_tokens", object="response.input_tokens"),
        **{f"{before}/models/{{model}}{verb}": dialect for before in GOOGLE for verb, dialect in of_gemini.items()},
        "/model/{model}/converse": converse,
        "/model/{model}/converse-stream": converse.streaming(),
        "/model/{model}/invoke": invoke,
        "/model/{model}/invoke-with-response-stream": invoke.streaming(),
        "/model/{model}/count-tokens": Counting(converse, "inputTokens", ["input", "converse"]),
        "/api/chat": Ollama(),
    }
