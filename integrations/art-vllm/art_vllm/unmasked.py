"""Corrects the logprobs of grammar-constrained answers, which vLLM reports after the grammar's mask.

``Call.logprobs`` are before the mask. The sampled tokens are scored again as plain text, without a grammar.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import GREEDY, JsonDict

Score = Callable[[Sequence[int]], Awaitable[list[float]]]
"""Token ids -> logprobs (temperature 1) of all tokens except the first."""
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's own request fields for grammars."""


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Return whether a grammar constrains the sampling. Malformed fields count as no grammar: vLLM rejects them."""
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    if _object(request.get("response_format")).get("type", "text") != "text":
        return True
    tools = request.get("tools")
    strict = isinstance(tools, list) and any(_object(_object(tool).get("function")).get("strict") for tool in tools)
    return (strict and choice != "none") or any(request.get(name) for name in GRAMMARS)


def _object(value: Any) -> JsonDict:
    return value if isinstance(value, dict) else {}


async def unmask(answer: JsonDict, score: Score) -> None:
    """Correct ``token_logprobs`` in the choices of a completion, and set ``forced`` for positions with one legal token."""
    for choice in answer["choices"]:
        ids, logprobs = choice.get("token_ids") or [], choice["token_logprobs"]
        choice |= await _corrected(answer.get("prompt_token_ids") or [], ids, logprobs, score)


async def unmask_stream(chunks: AsyncIterator[JsonDict], score: Score) -> AsyncIterator[JsonDict]:
    """Yield the chunks immediately but without tokens; each choice's last chunk carries all of its tokens, corrected."""
    prompt: list[int] = []
    sampled: dict[int, tuple[list[int], list[float]]] = {}
    async for chunk in chunks:
        prompt = chunk.get("prompt_token_ids") or prompt
        for choice in chunk.get("choices", ()):
            ids, logprobs = sampled.setdefault(choice.get("index", 0), ([], []))
            ids += choice.get("token_ids") or []
            logprobs += choice["token_logprobs"]
            choice |= {"token_ids": [], "token_logprobs": []}
            if choice.get("finish_reason"):
                choice |= {"token_ids": ids, **await _corrected(prompt, ids, logprobs, score)}
        yield chunk


async def _corrected(prompt: list[int], ids: list[int], logprobs: list[float], score: Score) -> JsonDict:
    # The masked logprob of the only legal token is exactly 0. So is that of a certain token, which can't be trained either.
    forced = [position for position, logprob in enumerate(logprobs) if logprob == 0.0]
    if prompt and ids:
        try:
            logprobs = (await score(prompt + ids))[len(prompt) - 1 :]
        except UpstreamError as error:
            if error.status != 400:
                raise
            # The answer fills the context, so there is no room to score it with one more token: don't train it.
            forced = list(range(len(ids)))
    return {"token_logprobs": logprobs, "forced": forced}


def is_plain(temperature: float | None) -> bool:
    """Return whether the logprobs at this sampling temperature equal those at 1."""
    return temperature is None or temperature < GREEDY or temperature == 1
