"""What a provider's answer says, in any of the dialects, whole or streamed: assistant messages as in chat completions, and usage.

Every API accepts its own answers as part of the next request's conversation. So its dialect reads them too, once a stream's
events are put together.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from art_core.capture import CHAT, Dialect, merge_delta
from art_core.errors import UpstreamError
from art_core.types import JsonDict
from art_gateway.dialects.bedrock import unframed

FINISH = {
    "length": "length", "max_tokens": "length", "MAX_TOKENS": "length", "max_output_tokens": "length",
    "tool_calls": "tool_calls", "tool_use": "tool_calls", "function_call": "tool_calls",
}  # fmt: skip
"""Reasons of all APIs other than that the model was done."""
USAGE = {
    "prompt_tokens": ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_eval_count"),
    "completion_tokens": ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "eval_count"),
    "cached_tokens": ("cached_tokens", "cache_read_input_tokens", "cacheReadInputTokens", "cachedContentTokenCount"),
}
"""What each number is called by the APIs."""
BESIDE = ("cache_read_input_tokens", "cache_creation_input_tokens", "cacheReadInputTokens", "cacheWriteInputTokens")
"""Prompt tokens that are not in the number of prompt tokens."""


@dataclass
class Answer:
    """An answer that was read: its choices, each an assistant message and why it ended."""

    choices: list[tuple[JsonDict, str]] = field(default_factory=list)
    usage: dict[str, float] = field(default_factory=dict)


def read_answer(path: str, dialect: Dialect, content: bytes) -> Answer:
    """Read the answer of a dialect's path. Empty if it can't be read, because nothing may depend on it."""
    end = path.rpartition("/")[2].rpartition(":")[2]
    reader = _READERS.get(end)
    try:
        events = list(_BINARY.get(end, _events)(content))
        if not events:
            return Answer()
        if path == CHAT or reader is None:
            return _chat(events)
        whole = reader(events)
        messages = dialect.to_chat(whole.conversation)["messages"]
        message = next(message for message in reversed(messages) if message["role"] == "assistant")
        return Answer([(message, whole.finish)], usage_of(whole.usage))
    except (UpstreamError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return Answer()


def _events(content: bytes) -> Iterable[JsonDict]:
    """Yield the objects of server-sent events, of lines of JSON, or of one whole answer."""
    lines = [line.strip() for line in content.splitlines()]
    if any(line.startswith(b"data:") for line in lines):
        yield from (
            orjson.loads(line[5:]) for line in lines if line.startswith(b"data:") and line[5:].strip() != b"[DONE]"
        )
        return
    try:
        whole = orjson.loads(content)
        yield from whole if isinstance(whole, list) else [whole]
    except orjson.JSONDecodeError:
        yield from (orjson.loads(line) for line in lines if line)


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
    if "prompt_tokens" in found:
        found["prompt_tokens"] += sum(float(usage.get(name) or 0) for name in BESIDE)
    if thoughts := usage.get("thoughtsTokenCount"):
        found["completion_tokens"] = found.get("completion_tokens", 0.0) + float(thoughts)
    return found


def _chat(events: list[JsonDict]) -> Answer:
    """Chat completions, and completions, whose text is taken for the message's."""
    messages: dict[int, JsonDict] = {}
    finish: dict[int, str] = {}
    usage: JsonDict = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            message = messages.setdefault(index, {"role": "assistant", "content": None})
            merge_delta(message, choice.get("message") or choice.get("delta") or {"content": choice.get("text")})
            finish[index] = choice.get("finish_reason") or finish.get(index, "")
    choices = [(message, FINISH.get(finish[index], "stop")) for index, message in sorted(messages.items())]
    return Answer(choices, usage_of(usage))


@dataclass
class _Whole:
    """A whole answer, as the conversation that a next request would have.

    A user's turn follows it if the API would else take it for the beginning of an answer.
    """

    conversation: JsonDict
    finish: str = "stop"
    usage: JsonDict = field(default_factory=dict)


def _responses(events: list[JsonDict]) -> _Whole:
    response = next(
        event.get("response") or event for event in reversed(events) if "output" in (event.get("response") or event)
    )
    cut = (response.get("incomplete_details") or {}).get("reason")
    return _Whole({"model": "any", "input": response["output"]}, FINISH.get(cut, "stop"), response.get("usage") or {})


def _messages(events: list[JsonDict]) -> _Whole:
    message: JsonDict = {"content": []}
    blocks: dict[int, JsonDict] = {}
    for event in events:
        kind = event.get("type")
        if kind == "message":
            message = event
        elif kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            _grow_block(blocks[event["index"]], event["delta"])
        elif kind == "message_delta":
            message |= event.get("delta") or {}
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
    for _, block in sorted(blocks.items()):
        if isinstance(text := block.pop("partial", None), str):
            block["input"] = orjson.loads(text or "{}")
        message["content"].append(block)
    conversation = {
        "max_tokens": 1,
        "messages": [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "."}],
    }
    return _Whole(conversation, FINISH.get(message.get("stop_reason") or "", "stop"), message.get("usage") or {})


def _grow_block(block: JsonDict, delta: JsonDict) -> None:
    for name in ("text", "thinking", "signature"):
        if isinstance(delta.get(name), str):
            block[name] = (block.get(name) or "") + delta[name]
    if isinstance(delta.get("partial_json"), str):
        block["partial"] = block.get("partial", "") + delta["partial_json"]


def _gemini(events: list[JsonDict]) -> _Whole:
    parts: list[JsonDict] = []
    finish, usage = "", {}
    for event in events:
        usage = event.get("usageMetadata") or usage
        for candidate in event.get("candidates") or ():
            parts += (candidate.get("content") or {}).get("parts") or ()
            finish = candidate.get("finishReason") or finish
    joined: list[JsonDict] = []
    for part in parts:
        plain = set(part) <= {"text", "thought"}
        if plain and joined and set(joined[-1]) == set(part) and joined[-1].get("thought") == part.get("thought"):
            joined[-1]["text"] += part["text"]
        else:
            joined.append(dict(part))
    return _Whole(
        {"contents": [{"role": "model", "parts": joined}, {"role": "user", "parts": [{"text": "."}]}]},
        FINISH.get(finish, "stop"),
        usage,
    )


def _ollama(events: list[JsonDict]) -> _Whole:
    message: JsonDict = {"role": "assistant", "content": ""}
    for event in events:
        part = event.get("message") or {}
        for name in ("content", "thinking"):
            if part.get(name):
                message[name] = message.get(name, "") + part[name]
        message["tool_calls"] = [*message.get("tool_calls", []), *(part.get("tool_calls") or ())]
    last = events[-1]
    return _Whole({"model": "any", "messages": [message]}, FINISH.get(last.get("done_reason"), "stop"), last)


def _converse(events: list[JsonDict]) -> _Whole:
    [answer] = events if "output" in events[0] else [_whole_converse(events)]
    conversation = {"messages": [answer["output"]["message"], {"role": "user", "content": [{"text": "."}]}]}
    return _Whole(conversation, FINISH.get(answer.get("stopReason") or "", "stop"), answer.get("usage") or {})


def _converse_events(content: bytes) -> Iterable[JsonDict]:
    return ({kind: details} for kind, details in unframed(content))


def _invoke_events(content: bytes) -> Iterable[JsonDict]:
    return (orjson.loads(base64.b64decode(details["bytes"])) for kind, details in unframed(content) if kind == "chunk")


def _whole_converse(events: list[JsonDict]) -> JsonDict:
    blocks: dict[int, JsonDict] = {}
    whole: JsonDict = {}
    for event in events:
        [(kind, details)] = event.items()
        if kind == "contentBlockStart":
            blocks[details["contentBlockIndex"]] = {"toolUse": {**details["start"]["toolUse"], "input": ""}}
        elif kind == "contentBlockDelta":
            block = blocks.setdefault(details["contentBlockIndex"], {})
            _grow_converse(block, details["delta"])
        elif kind in ("messageStop", "metadata"):
            whole |= details
    content = [block for _, block in sorted(blocks.items())]
    for block in content:
        if "toolUse" in block:
            block["toolUse"]["input"] = orjson.loads(block["toolUse"]["input"] or "{}")
    return {**whole, "output": {"message": {"role": "assistant", "content": content}}}


def _grow_converse(block: JsonDict, delta: JsonDict) -> None:
    if "text" in delta:
        block["text"] = block.get("text", "") + delta["text"]
    if "toolUse" in delta:
        block["toolUse"]["input"] += delta["toolUse"]["input"]
    if thinking := delta.get("reasoningContent"):
        thought = block.setdefault("reasoningContent", {"reasoningText": {"text": ""}})["reasoningText"]
        thought["text"] += thinking.get("text", "")
        if "signature" in thinking:
            thought["signature"] = thinking["signature"]


def _invoke(events: list[JsonDict]) -> _Whole:
    whole = _messages(events)
    whole.conversation["anthropic_version"] = "any"
    return whole


_READERS: dict[str, Callable[[list[JsonDict]], Any]] = {
    "responses": _responses,
    "messages": _messages,
    "invoke": _invoke,
    "invoke-with-response-stream": _invoke,
    "generateContent": _gemini,
    "streamGenerateContent": _gemini,
    "chat": _ollama,
    "converse": _converse,
    "converse-stream": _converse,
}
"""By the end of the path; the others are read like chat completions."""
_BINARY = {"converse-stream": _converse_events, "invoke-with-response-stream": _invoke_events}
