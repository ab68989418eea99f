"""``/v1/completions`` <-> chat: the prompt is raw text or token ids, and no chat template is applied.

The translated request has ``prompt`` instead of ``messages``; its answer still has the shape of a chat completion.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import orjson

from art_core.capture import Dialect
from art_core.types import JsonDict
from art_gateway.dialects.reading import engine_settings, malformed, refused

REFUSED = {
    "echo": "prepend the prompt yourself",
    "suffix": "write the prompt with the model's own fill-in-the-middle tokens",
}
MAX_TOKENS = 16
"""The API's default."""


class Completions(Dialect):
    """OpenAI's legacy text completions, one prompt per request."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request, whose prompt is text or token ids. Raises UpstreamError 400 if it can't be translated."""
        request = engine_settings(body, REFUSED, {"prompt", "logprobs", "best_of", "max_tokens"})
        if body.get("best_of") not in (None, body.get("n") or 1):
            raise refused("'best_of' other than 'n'", "set 'n' and choose yourself: every sampled text is recorded")
        limit = body.get("max_tokens")
        request |= {"prompt": _prompt(body.get("prompt")), "max_tokens": MAX_TOKENS if limit is None else limit}
        if (count := body.get("logprobs")) is not None:
            if type(count) is not int or count < 0:
                raise malformed(f"'logprobs' must be the number of most likely tokens to return, not {count!r}")
            # Servers with a completions endpoint read the number in logprobs; engines that answer it as chat read both.
            request |= {"logprobs": count or True, "top_logprobs": count}
        return request

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return a ``text_completion``."""
        return _text_completion(completion, "message")

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[bytes]:
        """Yield a ``text_completion`` per chunk, then ``[DONE]``."""
        offsets: dict[int, int] = {}
        async for chunk in chunks:
            yield b"data: " + orjson.dumps(_text_completion(chunk, "delta", offsets)) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _prompt(prompt: Any) -> str | list[int]:
    """Return the prompt; a list with one prompt is unpacked."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        raise refused(
            f"a list of {len(prompt)} prompts", "send one request per prompt, or 'n' for several answers to one"
        )
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise malformed("'prompt' must be a non-empty string or a list of token ids")
    return prompt


def _text_completion(answer: JsonDict, part: str, offsets: dict[int, int] | None = None) -> JsonDict:
    choices = []
    for choice in answer.get("choices", ()):
        index = choice.get("index", 0)
        text = (choice.get(part) or {}).get("content") or ""
        start = (offsets or {}).get(index, 0)
        if offsets is not None:
            offsets[index] = start + len(text)
        logprobs = _logprobs(choice.get("logprobs"), start)
        choices.append(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.get("finish_reason")}
        )
    return {**answer, "id": _id(answer), "object": "text_completion", "choices": choices}


def _id(answer: JsonDict) -> str:
    return "cmpl-" + str(answer.get("id", "")).removeprefix("chatcmpl-").removeprefix("cmpl-")


def _logprobs(logprobs: JsonDict | None, start: int) -> JsonDict | None:
    """Return chat's list of tokens as this API's parallel lists."""
    if logprobs is None or "tokens" in logprobs:
        return logprobs
    tokens = logprobs.get("content") or []
    offsets, offset = [], start
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{top["token"]: top["logprob"] for top in token.get("top_logprobs") or ()} for token in tokens],
        "text_offset": offsets,
    }
