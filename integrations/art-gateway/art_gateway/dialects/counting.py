"""Paths that count a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art_core.capture import Dialect
from art_core.types import JsonDict

UNCOUNTED = ("stream", "stream_options", "tool_choice", "response_format")
"""Settings of the answer, which may not fit in its one token."""


class Counting(Dialect):
    """Counts the prompts of a dialect's requests. Its answers are ``answer`` and the number as ``name``.

    ``within`` are the names of the fields that a whole request is in, if the body is more than a conversation.
    """

    counts_tokens = True

    def __init__(self, dialect: Dialect, name: str, within: Sequence[str] = (), **answer: str) -> None:
        self._dialect, self._name, self._within, self._answer = dialect, name, tuple(within), answer
        self.error = dialect.error

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request of the prompt that ``body`` asks about."""
        whole: Any = body
        for name in self._within:
            whole = whole.get(name) if isinstance(whole, dict) else None
        request = self._dialect.to_chat(whole if isinstance(whole, dict) else body)
        return {name: value for name, value in request.items() if name not in UNCOUNTED}

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the number of the prompt's tokens."""
        return {**self._answer, self._name: completion["usage"]["prompt_tokens"]}
