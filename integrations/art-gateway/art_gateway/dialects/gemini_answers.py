"""Chat chunks -> the events of a Gemini stream, and the answer that they add up to.

Text and thoughts are sent as they arrive, function calls whole at the end. A whole completion is a stream of one chunk, so that
both give the same answer. What clients don't send back, they return in a signature, as with Gemini itself: the reasoning, and
arguments as they were sampled. So the next prompt continues the answer token by token, and nothing has to be remembered.
"""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from art_core.types import JsonDict
from art_gateway.dialects.from_events import grow, text_in
from art_gateway.dialects.reading import as_object, reasoning_in, written

FINISH = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
OURS = b"art:"


@dataclass
class _Candidate:
    message: JsonDict = field(default_factory=dict)
    finish: str | None = None

    def last(self) -> list[JsonDict]:
        """Return the calls; without calls an empty text, which has the signature if there is one."""
        reasoning = reasoning_in(self.message)
        kept = {"reasoning": reasoning} if reasoning else {}
        parts = []
        for call in self.message.get("tool_calls") or ():
            name, arguments = call["function"].get("name") or "", call["function"].get("arguments") or ""
            value = as_object(arguments)
            if written(value) != arguments:
                kept["arguments"] = arguments
            named = {"id": call["id"]} if call.get("id") else {}
            parts.append({"functionCall": {**named, "name": name, "args": value}} | _sealed(kept))
            kept = {}
        return parts or [{"text": ""} | _sealed(kept)]

    def whole(self, *, thoughts: bool) -> list[JsonDict]:
        """Return all parts."""
        parts, last = _parts(self.message, thoughts=thoughts), self.last()
        if "text" in last[0]:
            text = parts.pop()["text"] if parts and "thought" not in parts[-1] else ""
            last[0]["text"] = text
        return parts + last


def _parts(delta: JsonDict, *, thoughts: bool) -> list[JsonDict]:
    """Return the parts of a message or delta without its calls."""
    reasoning, text = reasoning_in(delta), text_in(delta)
    parts: list[JsonDict] = [{"text": reasoning, "thought": True}] if reasoning and thoughts else []
    return [*parts, {"text": text}] if text else parts


class GeminiAnswer:
    """One answer: call ``add`` with every chunk, then ``end``; each returns the events to send."""

    def __init__(self, *, thoughts: bool) -> None:
        self._thoughts = thoughts
        self._candidates: dict[int, _Candidate] = {}
        self._usage: JsonDict = {}
        self._head = {"responseId": uuid.uuid4().hex}

    def add(self, chunk: JsonDict) -> list[JsonDict]:
        """Add a chunk or a whole completion."""
        self._usage = chunk.get("usage") or self._usage
        if chunk.get("model"):
            self._head["modelVersion"] = chunk["model"]
        candidates = []
        for choice in chunk.get("choices", ()):
            index = choice.get("index", 0)
            candidate = self._candidates.setdefault(index, _Candidate())
            candidate.finish = choice.get("finish_reason") or candidate.finish
            if parts := _parts(grow(candidate.message, choice), thoughts=self._thoughts):
                candidates.append({"content": {"role": "model", "parts": parts}, "index": index})
        return [{"candidates": candidates, **self._head}] if candidates else []

    def end(self) -> list[JsonDict]:
        """Return the event with the calls and the reasons for which the candidates ended."""
        return [self._answer(_Candidate.last)]

    def snapshot(self) -> JsonDict:
        """Return the whole answer."""
        return self._answer(lambda candidate: candidate.whole(thoughts=self._thoughts))

    def _answer(self, parts: Any) -> JsonDict:
        candidates = [
            {
                "content": {"role": "model", "parts": parts(candidate)},
                "finishReason": FINISH.get(candidate.finish or "", "STOP"),
                "index": index,
            }
            for index, candidate in sorted(self._candidates.items())
        ]
        return {"candidates": candidates, "usageMetadata": _usage(self._usage), **self._head}


def _usage(usage: JsonDict) -> JsonDict:
    prompt, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "candidatesTokenCount": sampled - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": prompt + sampled,
    }


def _sealed(kept: JsonDict) -> JsonDict:
    return {"thoughtSignature": base64.b64encode(OURS + orjson.dumps(kept)).decode()} if kept else {}


def unsealed(signature: Any) -> dict[str, str]:
    """Return what a signature of ours keeps; nothing for one of another model."""
    if not isinstance(signature, str):
        return {}
    try:
        # Clients that decode it may encode it with the other alphabet.
        content = base64.b64decode(signature.replace("-", "+").replace("_", "/") + "==")
        kept = orjson.loads(content.removeprefix(OURS)) if content.startswith(OURS) else {}
    except ValueError:
        return {}
    return {name: value for name, value in kept.items() if isinstance(value, str)} if isinstance(kept, dict) else {}
