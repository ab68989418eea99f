"""Chat chunks -> the events of an Anthropic stream, and the message that they add up to.

This API's blocks come one after another, but chat's tool calls may grow in parallel. So text and thinking are sent as they
arrive, and tool calls whole at the end. A whole completion is a stream of one chunk, so that both give the same message.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import orjson

from art_core.types import JsonDict
from art_gateway.dialects.reading import as_object, reasoning_in, written

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}
SIGNATURE = "policy"
"""Clients drop unsigned thinking. Signatures that come back aren't checked."""
_OWN_ID = re.compile(r"_art[0-9a-f]{32}$")


class MessageEvents:
    """One message: call ``add`` with every chunk, then ``end``; each returns the events to send."""

    def __init__(self) -> None:
        self._head: JsonDict | None = None
        self._blocks: list[JsonDict] = []
        self._open = False
        """Whether the last block is still growing."""
        self._calls: dict[int, JsonDict] = {}
        self.respelled: list[tuple[str, str, str]] = []
        """Tool calls whose arguments come back spelled differently: id, arguments as they come back, arguments as sampled."""
        self._finish: str | None = None
        self._stop_sequence: str | None = None
        self._usage: JsonDict = {}
        self._events: list[JsonDict] = []

    def add(self, chunk: JsonDict) -> list[JsonDict]:
        """Add a chunk or a whole completion."""
        self._usage = chunk.get("usage") or self._usage
        if self._head is None:
            self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
            self._head["model"] = chunk.get("model")
            self._emit("message_start", message=self.snapshot())
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0) == 0:
                self._finish = choice.get("finish_reason") or self._finish
                if isinstance(choice.get("stop_reason"), str):
                    # vLLM's field for the string at which sampling stopped.
                    self._stop_sequence = choice["stop_reason"]
                self._add_delta(choice.get("message") or choice.get("delta") or {})
        return self._take_events()

    def end(self) -> list[JsonDict]:
        """Close the open block and send the tool calls."""
        self._finish = self._finish or "stop"
        for index in sorted(self._calls):
            self._send_call(self._calls[index])
        if not any(block["type"] != "thinking" for block in self._blocks):
            # Agents read the first block's text without checking that it exists.
            self._start({"type": "text", "text": ""})
        self._stop()
        message = self.snapshot()
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        self._emit("message_delta", delta=delta, usage=message["usage"])
        self._emit("message_stop")
        return self._take_events()

    def snapshot(self) -> JsonDict:
        """Return the message object so far."""
        reason = self._finish and STOP_REASONS.get(self._finish, "end_turn")
        if reason == "end_turn" and self._calls:
            reason = "tool_use"  # A call that the request forced by name ends with "stop" in chat.
        elif reason == "end_turn" and self._stop_sequence is not None:
            reason = "stop_sequence"
        return {
            **(self._head or {}),
            "content": [dict(block) for block in self._blocks],
            "stop_reason": reason,
            "stop_sequence": self._stop_sequence if reason == "stop_sequence" else None,
            "usage": _usage(self._usage),
        }

    def _add_delta(self, delta: JsonDict) -> None:
        self._grow("thinking", reasoning_in(delta))
        self._grow("text", delta.get("content") or delta.get("refusal") or "")
        for position, part in enumerate(delta.get("tool_calls") or ()):
            call = self._calls.setdefault(part.get("index", position), {"id": None, "name": "", "arguments": ""})
            function = part.get("function") or {}
            call["id"] = call["id"] or part.get("id")
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def _grow(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._open or self._blocks[-1]["type"] != kind:
            self._start({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        self._emit_block("content_block_delta", delta={"type": DELTAS[kind], kind: text})

    def _send_call(self, call: JsonDict) -> None:
        call_id, value = call["id"] or f"call_{uuid.uuid4().hex}", as_object(call["arguments"])
        if (sent := written(value)) != call["arguments"]:
            # Some servers number their ids, so ids repeat across conversations.
            call_id += f"_art{uuid.uuid4().hex}"
            self.respelled.append((call_id, sent, call["arguments"]))
        self._start({"type": "tool_use", "id": call_id, "name": call["name"], "input": {}})
        self._blocks[-1]["input"] = value
        text = orjson.dumps(value).decode()
        self._emit_block("content_block_delta", delta={"type": "input_json_delta", "partial_json": text})

    def _start(self, block: JsonDict) -> None:
        self._stop()
        self._blocks.append(block)
        self._open = True
        self._emit_block("content_block_start", content_block=dict(block))

    def _stop(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = SIGNATURE
            self._emit_block("content_block_delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        self._emit_block("content_block_stop")

    def _emit_block(self, kind: str, **details: Any) -> None:
        self._emit(kind, index=len(self._blocks) - 1, **details)

    def _emit(self, kind: str, **details: Any) -> None:
        self._events.append({"type": kind, **details})

    def _take_events(self) -> list[JsonDict]:
        events, self._events = self._events, []
        return events


def sampled_id(call_id: str) -> str:
    """Return the server's id of a tool call from the client's."""
    return _OWN_ID.sub("", call_id)


def _usage(usage: JsonDict) -> JsonDict:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": (usage.get("prompt_tokens") or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }
