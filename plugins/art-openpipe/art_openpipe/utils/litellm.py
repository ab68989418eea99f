"""``art.utils.litellm``: converts LiteLLM's choices."""

from __future__ import annotations

from typing import Any

from openai.types.chat.chat_completion import Choice

from art_openpipe.record import MARK


def convert_litellm_choice_to_openai(choice: Any) -> Choice:
    """Convert a LiteLLM choice to OpenAI's, with the mark that names its recorded call."""
    fields = choice.model_dump(exclude_none=True)
    extra = fields.pop("provider_specific_fields", None) or {}
    fields.setdefault("finish_reason", "stop")
    fields["message"].setdefault("content", None)
    fields["message"].setdefault("refusal", None)
    if MARK in extra:
        fields[MARK] = extra[MARK]
    return Choice.model_validate(fields)
