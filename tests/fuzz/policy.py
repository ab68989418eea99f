"""An engine that reads requests as the embedded one does, to its prompt and its grammar, and then samples nothing.

It says the same to everything: "ok", or a call of the first tool where one must be called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache

from art_core.config import model_folder
from art_core.learner.pretrained import load_generation_config, load_tokenizer
from art_core.types import JsonDict
from art_embedded.chat import Chat
from art_embedded.grammar import Grammars
from art_embedded.loading import stop_ids
from art_embedded.requests import parse, refuse

SAID = "ok"


class Policy:
    """Answers with what ``shown`` is, so many tokens as it has letters."""

    async def chat(self, request: JsonDict) -> JsonDict:
        asked = parse(request, 16)
        chat, grammars = _tiny()
        ids = chat.raw_ids(asked.prompt) if asked.prompt is not None else chat.encode(
            chat.render(asked.messages, asked.tools, asked.template_arguments)
        )  # fmt: skip
        if not ids or any(not 0 <= token < len(chat.tokenizer) for token in ids):
            raise refuse("the prompt is empty, or has ids that the model has not")
        if asked.shape is not None:
            grammars.begin(asked.shape)
        message: JsonDict = {"role": "assistant", "content": SAID}
        if asked.shape is not None and asked.shape.required:
            function = {"name": next(iter(asked.shape.calls)), "arguments": "{}"}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            }
        tokens = {"token_ids": [5, 6], "token_logprobs": [-0.5, -1.0], "logprobs": None}
        if asked.logprobs:
            tokens["logprobs"] = {"content": [{"token": "o", "logprob": -0.5, "top_logprobs": []}]}
        end = "tool_calls" if message.get("tool_calls") else "stop"
        choices = [{"index": it, "message": message, "finish_reason": end, **tokens} for it in range(asked.n)]
        return {"id": "c", "object": "chat.completion", "created": 1, "model": asked.model, "choices": choices,
                "prompt_token_ids": ids, "policy_version": 3}  # fmt: skip

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        whole = await self.chat(request)
        for choice in whole["choices"]:
            message = choice.pop("message")
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
            choice["delta"] = {**message, **({"tool_calls": calls} if calls else {})}
            yield {**whole, "object": "chat.completion.chunk", "choices": [choice]}
        if parse(request, 16).include_usage:
            usage = {"prompt_tokens": len(whole["prompt_token_ids"]), "completion_tokens": 2}
            yield {**whole, "object": "chat.completion.chunk", "choices": [], "usage": usage}


@cache
def _tiny() -> tuple[Chat, Grammars]:
    """Return how the model that is shipped reads messages."""
    folder = model_folder("tiny")
    tokenizer = load_tokenizer(folder)
    ends = stop_ids(load_generation_config(folder), tokenizer.eos_token_id)
    return Chat(tokenizer, ends), Grammars(tokenizer, ends, len(tokenizer))
