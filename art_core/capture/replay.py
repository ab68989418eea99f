"""Answers that were given before -> the same answers again, each once: a run that was cut off goes on where it was.

An agent that is run again asks again what it asked before; as long as it asks the very same, it gets the tokens that were
sampled then, and nothing is sampled twice. Knows nothing about HTTP, stores or why the run was cut off.
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
    """The calls of one rollout by what was asked; several answers to one question in the order in which they were given."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._left: dict[str, deque[list[Call]]] = {}
        for _, group in groupby(calls, key=lambda call: call.request_id):
            choices = list(group)
            # Of the tokens that a client asked to see, their texts are not kept.
            whole = all(call.finish_reason != "aborted" for call in choices) and not choices[0].request.get("logprobs")
            if whole:
                self._left.setdefault(_question(choices[0].request), deque()).append(choices)

    def before(self, upstream: Upstream) -> Upstream:
        """Return an upstream that gives these answers, and asks ``upstream`` where there is none left."""
        return _Replay(self, upstream) if self._left else upstream

    def take(self, request: Mapping[str, object]) -> list[Call] | None:
        """Return the next answer to ``request``, one call per choice; None where there is none."""
        question = _question(request)
        left = self._left.get(question)
        if left is None:
            return None
        if len(left) == 1:
            del self._left[question]
        return left.popleft()


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
    whole = _completion(calls, "delta")
    usage = whole.pop("usage")
    yield whole
    if (calls[0].request.get("stream_options") or {}).get("include_usage"):
        yield {**whole, "choices": [], "usage": usage}


def _completion(calls: list[Call], said: str) -> JsonDict:
    """Return the calls as an ``Upstream`` answers, with what was said under ``said``."""
    first, sampled = calls[0], sum(len(call.sampled_ids) for call in calls)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion" if said == "message" else "chat.completion.chunk",
        "created": int(time.time()),
        "model": first.request.get("model", "policy"),
        "choices": [
            {
                "index": call.choice,
                said: dict(call.response) if said == "message" else _delta(call.response),
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


def _delta(message: Mapping[str, object]) -> JsonDict:
    """Return a whole message as the only delta of its stream."""
    calls = message.get("tool_calls")
    numbered = {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]} if calls else {}
    return {**message, **numbered}


def _question(request: Mapping[str, object]) -> str:
    return json.dumps(request, sort_keys=True)
