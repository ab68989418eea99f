"""Ollama's ``/api/chat`` <-> chat."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import orjson

from art_core.types import JsonDict
from art_gateway.dialects.conversations import Cache
from art_gateway.dialects.from_events import FromEvents, grow, text_in
from art_gateway.dialects.reading import (
    as_object,
    engine_settings,
    malformed,
    names,
    object_of,
    objects,
    reasoning_in,
    schema_format,
    text_of,
    written,
)
from art_gateway.dialects.tool_calls import ToolCalls

TRANSLATED = names("model messages tools format options stream think keep_alive logprobs top_logprobs")
OF_THE_SERVER = names(
    "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only num_thread "
    "num_keep"
)
"""Options of how Ollama runs a model."""
RENAMED = {"num_predict": "max_completion_tokens", "repeat_penalty": "repetition_penalty"}
IMAGES = {"/9j/": "image/jpeg", "R0lG": "image/gif", "UklG": "image/webp"}
"""How images of a type begin in base64. Others are PNG."""


class Ollama(FromEvents["OllamaAnswer"]):
    """Ollama's own API, whose streams have a JSON object on every line."""

    media_type = "application/x-ndjson"

    def __init__(self) -> None:
        self._arguments = Cache(8 * 2**20)
        """A call's name and its arguments as they come back -> its arguments as sampled. Without ids, the newest such call's."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        options = object_of(body, "options")
        request = engine_settings(body, {}, TRANSLATED) | engine_settings(options, {}, OF_THE_SERVER | RENAMED.keys())
        request |= {RENAMED[name]: value for name, value in options.items() if name in RENAMED and value is not None}
        if isinstance(limit := request.get("max_completion_tokens"), int) and limit < 0:
            del request["max_completion_tokens"]  # no limit
        if request.get("repetition_penalty") in (0, 1):
            del request["repetition_penalty"]  # none; LiteLLM sends frequency_penalty=0 as a repeat_penalty of 0
        request["messages"] = self._to_messages(body.get("messages"))
        request |= {name: body[name] for name in ("model", "tools", "logprobs", "top_logprobs") if body.get(name)}
        if isinstance(body.get("format"), dict) and body["format"]:
            request["response_format"] = schema_format(body["format"])
        elif body.get("format"):
            request["response_format"] = {"type": "json_object"}
        if isinstance(body.get("think"), str):
            request["reasoning_effort"] = body["think"]
        elif body.get("think") is not None:
            request["chat_template_kwargs"] = {"enable_thinking": bool(body["think"])}
        if body.get("stream", True):
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        return request

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return Ollama's error shape."""
        return {"error": message, "code": code}

    def _framed(self, part: JsonDict) -> bytes:
        return orjson.dumps(part) + b"\n"

    def _begin(self, body: JsonDict) -> OllamaAnswer:
        return OllamaAnswer(body.get("model"))

    def _remember(self, body: JsonDict, events: OllamaAnswer) -> None:
        for function in events.functions():
            sampled = function.get("arguments") or ""
            if (sent := written(as_object(sampled))) != sampled:
                self._arguments.put(f"{function.get('name')} {sent}", sampled.encode())

    def _to_messages(self, messages: Any) -> list[JsonDict]:
        calls = ToolCalls()
        translated = [_message(message, calls) for message in objects(messages, "'messages'")]
        for message in translated:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                if (sampled := self._arguments.get(f"{function['name']} {function['arguments']}")) is not None:
                    function["arguments"] = sampled.decode()
        return translated


def _message(message: JsonDict, calls: ToolCalls) -> JsonDict:
    role, content = message.get("role"), message.get("content") or ""
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise malformed("a message needs 'content' as a string, and the role system, user, assistant or tool")
    if role == "tool":
        name, call_id = message.get("tool_name") or message.get("name"), message.get("tool_call_id")
        # Some clients leave the calls out.
        return {"role": "tool", "tool_call_id": calls.answer(name, call_id) or "call_0", "content": content}
    found: JsonDict = {"role": role, "content": content}
    images = message.get("images") or []
    if not isinstance(images, list):
        raise malformed("'images' must be a list of base64 strings")
    if images:
        found["content"] = [{"type": "text", "text": content}] if content else []
        found["content"] += [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    if message.get("thinking"):
        found["reasoning_content"] = text_of(message, "thinking", "a message")
    for call in objects(message.get("tool_calls") or [], "'tool_calls'"):
        function = object_of(call, "function")
        call_id = text_of(call, "id", "a tool call") if call.get("id") else None
        called = calls.add(text_of(function, "name", "a function"), written(object_of(function, "arguments")), call_id)
        found.setdefault("tool_calls", []).append(called)
    if "tool_calls" in found and not content:
        found["content"] = None
    return found


def _url(image: Any) -> str:
    if not isinstance(image, str):
        raise malformed("'images' must be a list of base64 strings")
    return f"data:{IMAGES.get(image[:4], 'image/png')};base64,{image}"


class OllamaAnswer:
    """One answer: call ``add`` with every chunk, then ``end``; each returns the lines to send."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._begun = time.monotonic_ns()
        self._message: JsonDict = {}
        self._finish: str | None = None
        self._usage: JsonDict = {}

    def add(self, chunk: JsonDict) -> list[JsonDict]:
        """Add a chunk or a whole completion."""
        self._usage = chunk.get("usage") or self._usage
        lines = []
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0):
                continue
            self._finish = choice.get("finish_reason") or self._finish
            if sent := _shown(grow(self._message, choice)):
                lines.append(self._line(sent))
        return lines

    def end(self) -> list[JsonDict]:
        """Return the line with the tool calls, if there are any, and the last one."""
        calls = self._tool_calls()
        return [*([self._line(calls)] if calls else []), self._line({}) | self._end()]

    def snapshot(self) -> JsonDict:
        """Return the whole answer."""
        return self._line(_shown(self._message) | self._tool_calls()) | self._end()

    def _tool_calls(self) -> JsonDict:
        calls = []
        for index, function in enumerate(self.functions()):
            call_id = self._message["tool_calls"][index].get("id")
            arguments = as_object(function.get("arguments") or "")
            called = {"index": index, "name": function.get("name") or "", "arguments": arguments}
            calls.append({**({"id": call_id} if call_id else {}), "function": called})
        return {"tool_calls": calls} if calls else {}

    def functions(self) -> list[JsonDict]:
        """Return the functions that the answer calls, with their arguments as sampled."""
        return [call.get("function") or {} for call in self._message.get("tool_calls") or ()]

    def _line(self, message: JsonDict) -> JsonDict:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        message = {"role": "assistant", "content": "", **message}
        return {"model": self._model, "created_at": created, "message": message, "done": False}

    def _end(self) -> JsonDict:
        spent = time.monotonic_ns() - self._begun
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": spent,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens") or 0,
            "prompt_eval_duration": 0,
            "eval_count": self._usage.get("completion_tokens") or 0,
            "eval_duration": spent,
        }


def _shown(delta: JsonDict) -> JsonDict:
    """Return the text and the reasoning of a message or delta, those that it has."""
    found = {"content": text_in(delta), "thinking": reasoning_in(delta)}
    return {name: text for name, text in found.items() if text}
