"""Answers that a grammar constrained: vLLM tells their logprobs after the grammar's mask, ``Call.logprobs`` are before it.

What was sampled is scored once more as a text, which no grammar touches. Knows nothing about servers or versions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import GREEDY, JsonDict

Score = Callable[[Sequence[int]], Awaitable[list[float]]]
"""Token ids to the logprobs (temperature 1) of all but the first."""
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's own ways to ask for one."""


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Whether a grammar decides which tokens may be sampled; a field of no known shape asks for none, and vLLM refuses it."""
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
    """Put right the choices of a completion: ``token_logprobs``, and ``forced`` where one token was legal."""
    for choice in answer["choices"]:
        ids, logprobs = choice.get("token_ids") or [], choice["token_logprobs"]
        choice |= await _right(answer.get("prompt_token_ids") or [], ids, logprobs, score)


async def unmask_stream(chunks: AsyncIterator[JsonDict], score: Score) -> AsyncIterator[JsonDict]:
    """Yield the chunks at once, without their tokens; those come with each choice's last chunk, put right."""
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
                choice |= {"token_ids": ids, **await _right(prompt, ids, logprobs, score)}
        yield chunk


async def _right(prompt: list[int], ids: list[int], logprobs: list[float], score: Score) -> JsonDict:
    # A masked softmax over one token is exactly 0. Elsewhere that means a certainty, which teaches nothing either.
    forced = [place for place, logprob in enumerate(logprobs) if logprob == 0.0]
    if prompt and ids:
        try:
            logprobs = (await score(prompt + ids))[len(prompt) - 1 :]
        except UpstreamError as error:
            if error.status != 400:
                raise
            # There is no room for one more token after an answer that fills the context: then it is not trained.
            forced = list(range(len(ids)))
    return {"token_logprobs": logprobs, "forced": forced}


def is_plain(temperature: float | None) -> bool:
    """Whether logprobs of answers at this temperature are those at 1."""
    return temperature is None or temperature < GREEDY or temperature == 1
