"""What a provider's answer says, in any of the dialects, whole or streamed: assistant messages as in chat completions, and usage.

Read leniently, because it is only recorded: what has no place in a chat message (server tools, images, citations) is left out.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from art_core.types import FinishReason, JsonDict
from art_gateway.dialects.bedrock import unframed
from art_gateway.dialects.reading import read_leniently

LENGTH = frozenset({"length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_context_window_exceeded"})
"""What the APIs call the end at a token limit."""
USAGE = {
    "prompt_tokens": ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_eval_count"),
    "completion_tokens": ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "eval_count"),
    "cached_tokens": ("cached_tokens", "cache_read_input_tokens", "cacheReadInputTokens", "cachedContentTokenCount"),
    "cache_write_tokens": ("cache_creation_input_tokens", "cacheWriteInputTokens"),
}
"""What each number is called by the APIs. The numbers of prompt tokens include those of the cache."""
APART = ("input_tokens", "inputTokens")
"""Names of Anthropic's and Amazon's numbers, which don't include them (OpenAI's Responses have ``input_tokens_details``)."""


@dataclass
class Choice:
    """One answer, as it grows."""

    text: str = ""
    thoughts: str = ""
    calls: dict[Any, JsonDict] = field(default_factory=dict)
    """Tool calls by anything that identifies them in the stream, each with id, name and arguments."""
    reason: str | None = None
    """Why it ended, in the API's own words."""

    def call(self, key: Any, id: Any = None, name: str | None = None, arguments: str | None = None) -> None:
        """Add a tool call, or what comes next of it."""
        call = self.calls.setdefault(key, {"id": None, "name": "", "arguments": ""})
        call["id"] = id or call["id"]
        call["name"] += name or ""
        call["arguments"] += arguments or ""

    def message(self) -> JsonDict:
        """Return the assistant message."""
        message: JsonDict = {"role": "assistant", "content": self.text or None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = [
                {"id": call.pop("id"), "type": "function", "function": call}
                for call in (dict(call) for call in self.calls.values())
            ]
        return message

    @property
    def finish(self) -> FinishReason:
        return "length" if self.reason in LENGTH else "tool_calls" if self.calls else "stop"


@dataclass
class Answer:
    """An answer, read from its events."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    """Whether its last event has arrived."""
    failed: bool = False
    """Whether it ended with an error."""

    def choice(self, index: Any = 0) -> Choice:
        """Return a choice, new if it is the first part of it."""
        return self.choices.setdefault(index if isinstance(index, int) else 0, Choice())

    def spend(self, usage: Any) -> None:
        """Take over the numbers of an API's usage; later ones replace earlier ones."""
        if isinstance(usage, dict):
            self.usage |= usage_of(usage)


def read_answer(path: str, content: bytes) -> Answer:
    """Read what has arrived of an answer to a dialect's path. What can't be read is left out; nothing is raised."""
    end = path.rpartition("/")[2].rpartition(":")[2]
    answer, read = Answer(), _READERS.get(end, _chat)
    for event in _EVENTS.get(end, _events)(content):
        # Whatever its shape: nothing may depend on this text.
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            if event.get("error") and "choices" not in event:
                answer.failed = True
            else:
                read(answer, event)
    return answer


def _events(content: bytes) -> Iterator[JsonDict]:
    """Yield the objects of server-sent events, of lines of JSON, or of one whole answer. A line that is cut off is left out."""
    with suppress(ValueError):
        whole = read_leniently(content)
        yield from (each for each in (whole if isinstance(whole, list) else [whole]) if isinstance(each, dict))
        return
    for line in content.splitlines():
        with suppress(ValueError):
            event = read_leniently(line.removeprefix(b"data:").strip())
            if isinstance(event, dict):
                yield event


def usage_of(usage: JsonDict) -> dict[str, float]:
    """Return the numbers of ``USAGE`` that an API's usage has."""
    numbers = {**usage}
    for details in ("prompt_tokens_details", "input_tokens_details"):
        numbers |= usage.get(details) or {}
    found = {}
    for name, theirs in USAGE.items():
        value = next((numbers[each] for each in theirs if isinstance(numbers.get(each), int | float)), None)
        if value is not None:
            found[name] = float(value)
    apart = any(isinstance(usage.get(name), int | float) for name in APART)
    if apart and usage.get("prompt_tokens") is None and "input_tokens_details" not in usage:
        found["prompt_tokens"] += found.get("cached_tokens", 0.0) + found.get("cache_write_tokens", 0.0)
    if thoughts := usage.get("thoughtsTokenCount"):
        found["completion_tokens"] = found.get("completion_tokens", 0.0) + float(thoughts)
    return found


def _chat(answer: Answer, event: JsonDict) -> None:
    """Chat completions; and completions, whose text is taken for the message's."""
    answer.spend(event.get("usage"))
    for part in event.get("choices") or ():
        choice, whole = answer.choice(part.get("index", 0)), part.get("message")
        said = whole or part.get("delta") or {"content": part.get("text")}
        choice.text += _text(said.get("content")) + (said.get("refusal") or "")
        choice.thoughts += said.get("reasoning_content") or said.get("reasoning") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            called = call.get("function") or call.get("custom") or {}
            key = place if whole else call.get("index", place)
            choice.call(key, call.get("id"), called.get("name"), called.get("arguments") or called.get("input"))
        choice.reason = part.get("finish_reason") or choice.reason
    answer.ended = all(choice.reason for choice in answer.choices.values())


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def _responses(answer: Answer, event: JsonDict) -> None:
    kind, choice = str(event.get("type")), answer.choice()
    response = event.get("response") or (event if "output" in event else {})
    if kind == "response.output_text.delta":
        choice.text += event["delta"]
    elif kind == "response.output_item.done" and event["item"].get("type") != "message":
        _response_item(choice, event["item"])
    elif response.get("status") in ("completed", "incomplete", "failed", "cancelled"):
        answer.choices[0] = choice = Choice(reason=(response.get("incomplete_details") or {}).get("reason"))
        for item in response.get("output") or ():
            _response_item(choice, item)
        answer.spend(response.get("usage"))
        answer.ended, answer.failed = True, response["status"] in ("failed", "cancelled")


def _response_item(choice: Choice, item: JsonDict) -> None:
    parts = item.get("content") or item.get("summary") or ()
    text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    match item.get("type"):
        case "message":
            choice.text += text
        case "reasoning":
            choice.thoughts += text
        case "function_call" | "custom_tool_call":
            choice.call(
                len(choice.calls), item.get("call_id"), item.get("name"), item.get("arguments") or item.get("input")
            )


def _messages(answer: Answer, event: JsonDict) -> None:
    choice = answer.choice()
    match event:
        case {"type": "message", "content": blocks}:
            for index, block in enumerate(blocks):
                _message_block(choice, index, block)
            answer.spend(event.get("usage"))
            choice.reason, answer.ended = event.get("stop_reason"), True
        case {"type": "message_start", "message": message}:
            answer.spend(message.get("usage"))
        case {"type": "content_block_start", "index": index, "content_block": block}:
            _message_block(choice, index, {**block, "input": None})
        case {"type": "content_block_delta", "index": index, "delta": delta}:
            choice.text += delta.get("text") or ""
            choice.thoughts += delta.get("thinking") or ""
            if index in choice.calls:
                choice.call(index, arguments=delta.get("partial_json"))
        case {"type": "message_delta", "delta": delta}:
            answer.spend(event.get("usage"))
            choice.reason = delta.get("stop_reason") or choice.reason
            answer.ended = True


def _message_block(choice: Choice, index: int, block: JsonDict) -> None:
    choice.text += block.get("text") or ""
    choice.thoughts += block.get("thinking") or ""
    if block.get("type") == "tool_use":
        value = block.get("input")
        choice.call(index, block.get("id"), block.get("name"), None if value is None else _written(value))


def _written(value: Any) -> str:
    return orjson.dumps(value).decode()


def _gemini(answer: Answer, event: JsonDict) -> None:
    answer.spend(event.get("usageMetadata"))
    for candidate in event.get("candidates") or ():
        choice = answer.choice(candidate.get("index", 0))
        for part in (candidate.get("content") or {}).get("parts") or ():
            if part.get("thought"):
                choice.thoughts += part.get("text") or ""
            else:
                choice.text += part.get("text") or ""
            if called := part.get("functionCall"):
                choice.call(len(choice.calls), called.get("id"), called.get("name"), _written(called.get("args") or {}))
        choice.reason = candidate.get("finishReason") or choice.reason
    answer.ended = all(choice.reason for choice in answer.choices.values())


def _ollama(answer: Answer, event: JsonDict) -> None:
    choice, said = answer.choice(), event.get("message") or {}
    choice.text += said.get("content") or ""
    choice.thoughts += said.get("thinking") or ""
    for call in said.get("tool_calls") or ():
        function = call["function"]
        choice.call(len(choice.calls), call.get("id"), function.get("name"), _written(function.get("arguments") or {}))
    if event.get("done"):
        answer.spend(event)
        choice.reason, answer.ended = event.get("done_reason"), True


def _converse(answer: Answer, event: JsonDict) -> None:
    choice = answer.choice()
    match event:
        case {"output": {"message": message}}:
            for index, block in enumerate(message.get("content") or ()):
                _converse_block(choice, index, block)
            answer.spend(event.get("usage"))
            choice.reason, answer.ended = event.get("stopReason"), True
        case {"contentBlockStart": {"start": {"toolUse": called}, "contentBlockIndex": index}}:
            choice.call(index, called.get("toolUseId"), called.get("name"))
        case {"contentBlockDelta": {"delta": delta, "contentBlockIndex": index}}:
            _converse_block(choice, index, delta)
        case {"messageStop": stop}:
            choice.reason, answer.ended = stop.get("stopReason"), True
        case {"metadata": metadata}:
            answer.spend(metadata.get("usage"))


def _converse_block(choice: Choice, index: int, block: JsonDict) -> None:
    choice.text += block.get("text") or ""
    thought = block.get("reasoningContent") or {}
    choice.thoughts += (thought.get("reasoningText") or thought).get("text") or ""
    if called := block.get("toolUse"):
        value = called.get("input")
        choice.call(
            index, called.get("toolUseId"), called.get("name"), value if isinstance(value, str) else _written(value)
        )


def _of_converse(content: bytes) -> Iterator[JsonDict]:
    with suppress(ValueError, LookupError, struct.error):
        yield from ({kind: details} for kind, details in unframed(content))


def _of_invoke(content: bytes) -> Iterator[JsonDict]:
    with suppress(ValueError, LookupError, struct.error):
        for kind, details in unframed(content):
            if kind == "chunk":
                yield read_leniently(base64.b64decode(details["bytes"]))


_READERS: dict[str, Callable[[Answer, JsonDict], None]] = {
    "responses": _responses,
    "messages": _messages,
    "invoke": _messages,
    "invoke-with-response-stream": _messages,
    "generateContent": _gemini,
    "streamGenerateContent": _gemini,
    "chat": _ollama,
    "converse": _converse,
    "converse-stream": _converse,
}
"""By the end of the path; the others are read like chat completions."""
_EVENTS = {"converse-stream": _of_converse, "invoke-with-response-stream": _of_invoke}
