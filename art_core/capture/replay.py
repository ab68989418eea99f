"""The recorded answers of an interrupted rollout, each returned once, so that nothing is sampled twice.

The agent starts again and repeats its requests. As long as they are the same, it gets the tokens sampled before.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from itertools import groupby

from art_core.types import Call, JsonDict, Upstream


class Answers:
    """The recorded calls of one rollout, by request. Equal requests are answered in their original order."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._answers: dict[str, deque[list[Call]]] = {}
        for _, group in groupby(calls, key=lambda call: call.request_id):
            choices = list(group)
            # A client that requests logprobs expects the tokens' texts, which aren't stored.
            if all(call.finish_reason != "aborted" for call in choices) and not choices[0].request.get("logprobs"):
                self._answers.setdefault(_key(choices[0].request), deque()).append(choices)

    def before(self, upstream: Upstream) -> Upstream:
        """Return an upstream that replays these answers, and passes other requests to ``upstream``."""
        return _Replay(self, upstream) if self._answers else upstream

    def take(self, request: Mapping[str, object]) -> list[Call] | None:
        """Remove and return the next answer to ``request``, one call per choice; None if there is none."""
        key = _key(request)
        answers = self._answers.get(key)
        if answers is None:
            return None
        if len(answers) == 1:
            del self._answers[key]
        return answers.popleft()


class _Replay:
    def __init__(self, answers: Answers, upstream: Upstream) -> None:
        self._answers, self._upstream = answers, upstream

    async def chat(self, request: JsonDict) -> JsonDict:
        calls = self._answers.take(request)
        return await self._upstream.chat(request) if calls is None else _completion(calls, "message")

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        calls = self._answers.take(request)
        return self._upstream.stream(request) if calls is None else _chunks(calls)


async def _chunks(calls: list[Call]) -> AsyncIterator[JsonDict]:
    chunk = _completion(calls, "delta")
    usage = chunk.pop("usage")
    for choice in chunk["choices"]:
        if tool_calls := choice["delta"].get("tool_calls"):
            choice["delta"]["tool_calls"] = [{"index": index, **call} for index, call in enumerate(tool_calls)]
    yield chunk
    if (calls[0].request.get("stream_options") or {}).get("include_usage"):
        yield {**chunk, "choices": [], "usage": usage}


def _completion(calls: list[Call], message: str) -> JsonDict:
    """Return the calls as an ``Upstream``'s answer, with the text under the key ``message``: "message" or "delta"."""
    first, sampled = calls[0], sum(len(call.sampled_ids) for call in calls)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion" if message == "message" else "chat.completion.chunk",
        "created": int(time.time()),
        "model": first.request.get("model", "policy"),
        "choices": [
            {
                "index": call.choice,
                message: dict(call.response),
                "finish_reason": call.finish_reason,
                "token_ids": list(call.sampled_ids),
                "token_logprobs": list(call.logprobs),
                "forced": list(call.forced),
            }
            for call in calls
        ],
        "usage": {
            "prompt_tokens": len(first.prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(first.prompt_ids) + sampled,
        },
        "prompt_token_ids": list(first.prompt_ids),
        "policy_version": first.policy_version,
        "logprobs_temperature": first.temperature,
    }


def _key(request: Mapping[str, object]) -> str:
    return json.dumps(request, sort_keys=True)
