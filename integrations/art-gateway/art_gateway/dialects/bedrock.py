"""Amazon Bedrock's ``converse`` and ``invoke``, whole and as streams, as Anthropic's Messages.

Converse has the blocks and events of Messages under names of its own. ``invoke`` has the body that each model's maker chose; only
Anthropic's is translated.
"""

from __future__ import annotations

import base64
import copy
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from art_core.types import JsonDict
from art_gateway.dialects.message_events import MessageEvents
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.reading import (
    engine_settings,
    malformed,
    names,
    object_of,
    objects,
    read_leniently,
    refuse_unknown,
    refused,
    text_of,
    written_value,
)

REFUSED = {
    "guardrailConfig": "guardrails run at Amazon: leave it out, or check the texts in the agent",
    "promptVariables": "prompts are stored at Amazon: send the whole conversation as 'messages'",
    "additionalModelResponseFieldPaths": "the policy's answers have no additional fields: leave it out",
}
NEUTRAL = names("requestMetadata performanceConfig serviceTier projectIdentifier")
"""Parameters that don't affect sampling: accounting and routing."""
TRANSLATED = names("model messages system inferenceConfig toolConfig outputConfig additionalModelRequestFields stream")
INFERENCE = {
    "maxTokens": "max_tokens",
    "temperature": "temperature",
    "topP": "top_p",
    "stopSequences": "stop_sequences",
}
ADDITIONAL = names(
    "anthropic_beta thinking top_k min_p seed presence_penalty frequency_penalty repetition_penalty chat_template_kwargs"
)
"""Known ``additionalModelRequestFields``: Anthropic's, and settings of engines."""
OF_INVOKE = names("anthropic_version anthropic_beta stream")
ERRORS = {
    401: "UnrecognizedClientException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    429: "ThrottlingException",
    503: "ServiceUnavailableException",
}
"""Others are ValidationException below 500, InternalServerException above."""
IN_STREAMS = names("internalServerException serviceUnavailableException throttlingException validationException")


class Bedrock(Messages):
    """What both APIs share: errors, and the framing of streams."""

    media_type = "application/vnd.amazon.eventstream"
    _streams = False
    """Whether the path is that of streams. The request doesn't say it."""

    def streaming(self) -> Bedrock:
        """Return the dialect of the path for streams, which shares what is remembered."""
        dialect = copy.copy(self)
        dialect._streams = True
        return dialect

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return Amazon's error shape. The type is in the body, which clients read if no header has it."""
        kind = ERRORS.get(status, "InternalServerException" if status >= 500 else "ValidationException")
        return {"__type": kind, "message": message}

    def error_event(self, message: str, status: int, code: str | None) -> bytes:
        """Return the exception that ends a stream."""
        kind = self.error(message, status, code)["__type"]
        kind = kind[0].lower() + kind[1:]
        return framed("exception", kind if kind in IN_STREAMS else "validationException", {"message": message})


class Converse(Bedrock):
    """Converse, without what Amazon's servers run or store: guardrails, prompts, system tools, documents."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        refuse_unknown(engine_settings(body, REFUSED, NEUTRAL | TRANSLATED), (), "a request")
        inference, additional = object_of(body, "inferenceConfig"), object_of(body, "additionalModelRequestFields")
        refuse_unknown(inference, INFERENCE, "'inferenceConfig'")
        refuse_unknown(additional, ADDITIONAL, "'additionalModelRequestFields'")
        turns = [_turn(turn) for turn in objects(body.get("messages"), "'messages'")]
        translated = {name: value for name, value in additional.items() if name != "anthropic_beta"}
        translated |= {INFERENCE[name]: value for name, value in inference.items() if name in INFERENCE}
        translated |= {"model": body.get("model"), "messages": turns, "stream": self._streams or None}
        translated |= {"system": _blocks(body.get("system") or [], "'system'"), **_tools(object_of(body, "toolConfig"))}
        return super().to_chat(translated | {"output_config": _output(object_of(body, "outputConfig"))})

    def _begin(self, body: JsonDict) -> Any:
        return ConverseEvents()

    def _framed(self, part: JsonDict) -> bytes:
        [(kind, details)] = part.items()
        return framed("event", kind, details)


class Invoke(Bedrock):
    """``invoke`` with the body of Anthropic's Messages."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        if not body.get("anthropic_version"):
            raise refused(
                "an 'invoke' whose body isn't Anthropic's", "use 'converse', whose body is the same for all models"
            )
        return super().to_chat(
            {k: v for k, v in body.items() if k not in OF_INVOKE} | {"stream": self._streams or None}
        )

    def _framed(self, part: JsonDict) -> bytes:
        return framed("event", "chunk", {"bytes": base64.b64encode(orjson.dumps(part)).decode()})


def framed(message_type: str, kind: str, details: JsonDict) -> bytes:
    """Return a message of an event stream: lengths, their CRC32, headers, JSON, the CRC32 of all."""
    named = {":message-type": message_type, f":{message_type}-type": kind, ":content-type": "application/json"}
    head, payload = b"", orjson.dumps(details)
    for name, value in named.items():
        # 7 is the type of a text.
        head += bytes([len(name)]) + name.encode() + struct.pack(">BH", 7, len(value)) + value.encode()
    lengths = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    message = lengths + struct.pack(">I", zlib.crc32(lengths)) + head + payload
    return message + struct.pack(">I", zlib.crc32(message))


def unframed(content: bytes) -> Iterator[tuple[str, JsonDict]]:
    """Yield the kind and the JSON of each message of an event stream, as far as it is whole. Nothing is verified."""
    while len(content) >= 16:
        length, head_length = struct.unpack_from(">II", content)
        if not 16 + head_length <= length <= len(content):
            return
        head, payload = content[12 : 12 + head_length], content[12 + head_length : length - 4]
        headers: JsonDict = {}
        while head:
            name, head = head[1 : 1 + head[0]].decode(), head[1 + head[0] :]
            _, size = struct.unpack_from(">BH", head)
            headers[name], head = head[3 : 3 + size].decode(), head[3 + size :]
        yield headers.get(":event-type", ""), read_leniently(payload)
        content = content[length:]


def _turn(turn: JsonDict) -> JsonDict:
    return {"role": turn.get("role"), "content": _blocks(turn.get("content"), "a message's 'content'")}


def _blocks(content: Any, where: str) -> list[JsonDict]:
    """Return the blocks of Messages, without the marks of caches."""
    found = []
    for block in objects(content, where):
        kind, value = _member(block, "a block")
        if kind == "text":
            found.append({"type": "text", "text": text_of(block, "text", "a block")})
        elif kind == "json":
            found.append({"type": "text", "text": written_value(value)})
        elif kind in BLOCKS:
            found.append(BLOCKS[kind](object_of(block, kind)))
        elif kind != "cachePoint":
            raise refused(f"a block with {kind!r}", "send its text as 'text', or an image as 'bytes'")
    return found


def _member(union: JsonDict, where: str) -> tuple[str, Any]:
    """Return the name and the value of the one field that a union has."""
    present = [(name, value) for name, value in union.items() if value is not None]
    if len(present) != 1:
        raise malformed(f"{where} must have one field, not {len(present)}: {', '.join(name for name, _ in present)}")
    return present[0]


def _tool_use(call: JsonDict) -> JsonDict:
    refuse_unknown(call, ("toolUseId", "name", "input"), "a toolUse")
    named = {"id": text_of(call, "toolUseId", "a toolUse"), "name": text_of(call, "name", "a toolUse")}
    return {"type": "tool_use", **named, "input": object_of(call, "input")}


def _tool_result(result: JsonDict) -> JsonDict:
    refuse_unknown(result, ("toolUseId", "content", "status"), "a toolResult")
    content = _blocks(result.get("content") or [], "a toolResult's 'content'")
    call_id = text_of(result, "toolUseId", "a toolResult")
    return {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": content,
        "is_error": result.get("status") == "error",
    }


def _reasoning(reasoning: JsonDict) -> JsonDict:
    if reasoning.get("redactedContent"):
        raise refused("a reasoningContent with 'redactedContent'", "the policy can't read it: leave it out")
    return {"type": "thinking", "thinking": text_of(object_of(reasoning, "reasoningText"), "text", "a reasoningText")}


def _image(image: JsonDict) -> JsonDict:
    source = object_of(image, "source")
    if source.get("bytes") is None:
        raise refused("an image whose source isn't 'bytes'", "send it as 'bytes'")
    data, form = text_of(source, "bytes", "an image's 'source'"), text_of(image, "format", "an image")
    return {"type": "image", "source": {"type": "base64", "media_type": f"image/{form}", "data": data}}


BLOCKS: dict[str, Callable[[JsonDict], JsonDict]] = {
    "toolUse": _tool_use,
    "toolResult": _tool_result,
    "reasoningContent": _reasoning,
    "image": _image,
}


def _tools(config: JsonDict) -> JsonDict:
    refuse_unknown(config, ("tools", "toolChoice"), "'toolConfig'")
    tools = []
    for tool in objects(config.get("tools") or [], "'tools'"):
        kind, _ = _member(tool, "a tool")
        if kind == "toolSpec":
            spec = object_of(tool, kind)
            schema = {"input_schema": object_of(object_of(spec, "inputSchema"), "json")}
            tools.append({name: value for name, value in spec.items() if name != "inputSchema"} | schema)
        elif kind != "cachePoint":
            raise refused(f"the tool {kind!r}", "it runs at Amazon: define a 'toolSpec' that the agent runs")
    if not (choice := object_of(config, "toolChoice")):
        return {"tools": tools}
    kind, value = _member(choice, "'toolChoice'")
    if kind not in ("auto", "any", "tool") or not isinstance(value, dict):
        raise malformed(f"'toolChoice' is {choice!r}; it must have auto, any or tool, with an object")
    return {"tools": tools, "tool_choice": {**value, "type": kind}}


def _output(config: JsonDict) -> JsonDict:
    refuse_unknown(config, ("textFormat", "effort"), "'outputConfig'")
    output = {"effort": config.get("effort")}
    if form := object_of(config, "textFormat"):
        schema = text_of(object_of(object_of(form, "structure"), "jsonSchema"), "schema", "a jsonSchema")
        try:
            output["format"] = {"type": form.get("type"), "schema": json.loads(schema)}
        except (ValueError, RecursionError) as error:
            raise malformed(f"a jsonSchema's 'schema' isn't JSON: {error}") from None
    return output


class ConverseEvents:
    """One answer: call ``add`` with every chunk, then ``end``; each returns the events to send, by their names."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._message = MessageEvents()
        self.respelled = self._message.respelled

    def add(self, chunk: JsonDict) -> list[JsonDict]:
        """Add a chunk or a whole completion."""
        return [sent for event in self._message.add(chunk) for sent in self._translated(event)]

    def end(self) -> list[JsonDict]:
        """Close the open block and send the tool calls."""
        return [sent for event in self._message.end() for sent in self._translated(event)]

    def snapshot(self) -> JsonDict:
        """Return the whole answer."""
        message = self._message.snapshot()
        answer = {"role": "assistant", "content": [_shown(block) for block in message["content"]]}
        return {"output": {"message": answer}, "stopReason": _reason(message), **self._spent(message["usage"])}

    def _translated(self, event: JsonDict) -> list[JsonDict]:
        index = {"contentBlockIndex": event.get("index")}
        match event:
            case {"type": "message_start"}:
                return [{"messageStart": {"role": "assistant"}}]
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "id": call_id, "name": name}}:
                return [{"contentBlockStart": {"start": {"toolUse": {"toolUseId": call_id, "name": name}}, **index}}]
            case {"type": "content_block_start", "content_block": {"type": "text"}}:
                # Only tools' blocks have a start. An empty text would have an end and nothing before it.
                return [{"contentBlockDelta": {"delta": {"text": ""}, **index}}]
            case {"type": "content_block_delta", "delta": delta}:
                return [{"contentBlockDelta": {"delta": _delta(delta), **index}}]
            case {"type": "content_block_stop"}:
                return [{"contentBlockStop": index}]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                return [{"messageStop": {"stopReason": _reason(delta)}}, {"metadata": self._spent(usage)}]
        return []

    def _spent(self, usage: JsonDict) -> JsonDict:
        read, write = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        spent = {"inputTokens": usage["input_tokens"], "outputTokens": usage["output_tokens"]}
        spent |= {"totalTokens": sum(spent.values()) + read + write, "cacheReadInputTokens": read}
        latency = {"latencyMs": round((time.monotonic() - self._begun) * 1000)}
        return {"usage": {**spent, "cacheWriteInputTokens": write}, "metrics": latency}


def _reason(message: JsonDict) -> str:
    return "content_filtered" if message["stop_reason"] == "refusal" else message["stop_reason"]


def _delta(delta: JsonDict) -> JsonDict:
    match delta:
        case {"text": text}:
            return {"text": text}
        case {"partial_json": text}:
            return {"toolUse": {"input": text}}
        case {"thinking": text}:
            return {"reasoningContent": {"text": text}}
    return {"reasoningContent": {"signature": delta["signature"]}}


def _shown(block: JsonDict) -> JsonDict:
    match block:
        case {"type": "tool_use", "id": call_id, "name": name, "input": value}:
            return {"toolUse": {"toolUseId": call_id, "name": name, "input": value}}
        case {"thinking": text, "signature": signature}:
            return {"reasoningContent": {"reasoningText": {"text": text, "signature": signature}}}
    return {"text": block["text"]}
