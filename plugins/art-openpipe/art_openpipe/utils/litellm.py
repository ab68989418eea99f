"""``art.utils.litellm``: choices that LiteLLM returned. Knows nothing about trajectories."""

from __future__ import annotations

from typing import Any

from openai.types.chat.chat_completion import Choice

from art_openpipe.dialect import MARK


def convert_litellm_choice_to_openai(choice: Any) -> Choice:
    """Return a choice of LiteLLM's as OpenAI's, with what says which recorded call it is."""
    given = choice.model_dump(exclude_none=True)
    kept = given.pop("provider_specific_fields", None) or {}
    given.setdefault("finish_reason", "stop")
    given["message"].setdefault("content", None)
    given["message"].setdefault("refusal", None)
    return Choice.model_validate({**given, **{name: kept[name] for name in (MARK,) if name in kept}})
