"""Chat chunks -> the events of a Responses stream, and the response that they add up to.

A whole completion is a stream of one chunk, so that both give the same response.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from art_core.types import JsonDict
from art_gateway.dialects.reading import reasoning_in

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
ECHOED: JsonDict = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""The request's fields that a response repeats -> the API's defaults."""


@dataclass
class _Item:
    """An output item, possibly still growing."""

    id: str
    kind: str
    """``reasoning``, ``message`` or ``function_call``."""
    index: int
    text: str = ""
    """The reasoning, the message or the arguments."""
    name: str = ""
    call_id: str = ""
    logprobs: list[JsonDict] = field(default_factory=list)
    done: bool = False

    def part(self) -> JsonDict:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def as_dict(self, status: str, *, empty: bool = False) -> JsonDict:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": "" if empty else self.text}
        content = [] if empty else [self.part()]
        return head | ({"role": "assistant"} if self.kind == "message" else {"summary": []}) | {"content": content}


class ResponseEvents:
    """One response: call ``add`` with every chunk, then ``end``; each returns the events to send."""

    def __init__(self, body: JsonDict, response_id: str) -> None:
        self.id = response_id
        self._body = body
        self._head: JsonDict | None = None
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._finish: str | None = None
        self._usage: JsonDict | None = None
        self._ended = False
        self._events: list[JsonDict] = []
        self._number = 0

    def add(self, chunk: JsonDict) -> list[JsonDict]:
        """Add a chunk or a whole completion."""
        if self._head is None:
            self._head = {"created_at": chunk.get("created") or int(time.time()), "model": chunk.get("model")}
            self._emit("response.created", response=self.snapshot())
            self._emit("response.in_progress", response=self.snapshot())
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0) == 0:
                self._finish = choice.get("finish_reason") or self._finish
                self._add_delta(choice.get("message") or choice.get("delta") or {}, choice.get("logprobs") or {})
        return self._take_events()

    def end(self) -> list[JsonDict]:
        """Close the open items."""
        self._ended = True
        if not any(item.kind != "reasoning" for item in self._items):
            self._open("message")
        for item in self._items:
            self._close(item)
        response = self.snapshot()
        self._emit(f"response.{response['status']}", response=response)
        return self._take_events()

    def output(self) -> list[JsonDict]:
        """Return the closed items."""
        return [item.as_dict(self._status(item)) for item in self._items if item.done]

    def snapshot(self) -> JsonDict:
        """Return the response object so far."""
        reason = INCOMPLETE.get(self._finish or "")
        status = "in_progress" if not self._ended else "incomplete" if reason else "completed"
        body = self._body
        echoed = {key: default if body.get(key) is None else body[key] for key, default in ECHOED.items()}
        return {
            "id": self.id,
            "object": "response",
            **(self._head or {}),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if self._ended and reason else None,
            "output": self.output(),
            **echoed,
            "usage": _usage(self._usage) if self._ended else None,
        }

    def _add_delta(self, delta: JsonDict, logprobs: JsonDict) -> None:
        if reasoning := reasoning_in(delta):
            self._grow(self._item("reasoning"), "response.reasoning_text.delta", reasoning, content_index=0)
        text = delta.get("content") or delta.get("refusal") or ""
        if text:
            item, new = self._item("message"), logprobs.get("content") or []
            item.logprobs += new
            self._grow(item, "response.output_text.delta", text, content_index=0, logprobs=new)
        for position, part in enumerate(delta.get("tool_calls") or ()):
            self._add_call(part.get("index", position), part)

    def _add_call(self, index: int, part: JsonDict) -> None:
        function = part.get("function") or {}
        item = self._calls.get(index)
        if item is None:
            call_id = part.get("id") or f"call_{uuid.uuid4().hex}"
            item = self._calls[index] = self._open("function_call", name=function.get("name") or "", call_id=call_id)
        if arguments := function.get("arguments"):
            self._grow(item, "response.function_call_arguments.delta", arguments)

    def _item(self, kind: str) -> _Item:
        """Return the open item of this kind, or a new one."""
        return next((item for item in self._items if item.kind == kind and not item.done), None) or self._open(kind)

    def _open(self, kind: str, **call: str) -> _Item:
        for item in self._items:
            # Calls may grow in parallel; reasoning and messages alternate.
            if item.kind == "reasoning" or (item.kind == "message" and kind == "reasoning"):
                self._close(item)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = _Item(f"{prefix}_{uuid.uuid4().hex}", kind, len(self._items), **call)
        self._items.append(item)
        output_item = item.as_dict("in_progress", empty=True)
        self._emit("response.output_item.added", output_index=item.index, item=output_item)
        if kind != "function_call":
            self._emit_item(item, "response.content_part.added", content_index=0, part=item.part())
        return item

    def _grow(self, item: _Item, kind: str, text: str, **details: Any) -> None:
        item.text += text
        self._emit_item(item, kind, delta=text, **details)

    def _close(self, item: _Item) -> None:
        if item.done:
            return
        item.done = True
        if item.kind == "function_call":
            done = {"name": item.name, "arguments": item.text}
            self._emit_item(item, "response.function_call_arguments.done", **done)
        else:
            details = {"logprobs": item.logprobs} if item.kind == "message" else {}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            self._emit_item(item, f"response.{kind}.done", content_index=0, text=item.text, **details)
            self._emit_item(item, "response.content_part.done", content_index=0, part=item.part())
        output_item = item.as_dict(self._status(item))
        self._emit("response.output_item.done", output_index=item.index, item=output_item)

    def _status(self, item: _Item) -> str:
        cut = self._finish in INCOMPLETE and item is self._items[-1]
        return "incomplete" if cut else "completed"

    def _emit_item(self, item: _Item, kind: str, **details: Any) -> None:
        self._emit(kind, item_id=item.id, output_index=item.index, **details)

    def _emit(self, kind: str, **details: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **details})
        self._number += 1

    def _take_events(self) -> list[JsonDict]:
        events, self._events = self._events, []
        return events


def _usage(usage: JsonDict | None) -> JsonDict | None:
    if usage is None:
        return None
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.get("total_tokens") or prompt + completion,
    }
