"""Paths that count a prompt's tokens."""

from __future__ import annotations

from art_core.capture import Dialect
from art_core.types import JsonDict

UNCOUNTED = ("stream", "stream_options", "tool_choice", "response_format")
"""Settings of the answer, which may not fit in its one token."""


class Counting(Dialect):
    """Counts the prompts of a dialect's requests. Its answers are ``answer`` and the number as ``name``."""

    counts_tokens = True

    def __init__(self, dialect: Dialect, name: str, **answer: str) -> None:
        self._dialect, self._name, self._answer = dialect, name, answer
        self.error = dialect.error

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request of the prompt that ``body`` asks about."""
        # Gemini's, if it has more than a conversation.
        whole = body.get("generateContentRequest")
        request = self._dialect.to_chat(whole if isinstance(whole, dict) else body)
        return {name: value for name, value in request.items() if name not in UNCOUNTED}

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the number of the prompt's tokens."""
        return {**self._answer, self._name: completion["usage"]["prompt_tokens"]}
