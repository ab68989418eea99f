"""Converts a model's input and output, as traces record them, into chat messages in OpenAI's form.

Supports the common instrumentations: OpenAI's chat completions and Responses, LangChain's messages, Anthropic's blocks, Gemini's
and OpenTelemetry's parts. Anything else is refused with a reason, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from art_core.types import JsonDict

ROLES = {
    "human": "user",
    "ai": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "AIMessageChunk": "assistant",
}
"""Alternative names of roles."""
SPEAKERS = ("system", "developer", "user", "assistant", "tool", *ROLES)
"""What a role may be called."""
MESSAGE, KINDS = {"role", "parts", "choices", "tool_calls"}, {"message", "function_call", "reasoning", "ai", *ROLES}
"""Keys and types that distinguish a message or an API's answer from data that a model answered with."""


class Unreadable(ValueError):
    """Not a conversation in text."""


def value_of(recorded: Any) -> Any:
    """Parse a JSON object or list that Langfuse recorded as text; other text, such as "42", stays text."""
    try:
        return json.loads(recorded) if isinstance(recorded, str) and recorded.lstrip()[:1] in ("{", "[") else recorded
    except (ValueError, RecursionError):
        return recorded


def shown_of(recorded: Any) -> tuple[list[JsonDict], list[JsonDict]]:
    """Return the messages and the tools of a model's input; raises Unreadable."""
    value, tools = value_of(recorded), []
    if isinstance(value, Mapping):
        tools = [_tool(tool) for tool in value.get("tools") or ()]
        if "messages" in value:
            items = value["messages"]
        elif "input" in value or "instructions" in value:
            system = [{"role": "system", "content": value["instructions"]}] if value.get("instructions") else []
            items = [*system, *_listed(value.get("input") or [])]
        elif "contents" in value:
            items = value["contents"]
        elif "role" in value or "type" in value:
            items = [value]
        else:
            raise Unreadable(f"the input has none of messages, input and contents: {sorted(map(str, value))[:5]}")
    else:
        items = value
    items = _unbatched(_listed(items))
    messages = [message for item in items for message in _messages(item, tools)]
    if not messages:
        raise Unreadable("the input has no messages")
    return messages, tools


def is_chat(items: Any) -> bool:
    """Whether a list is one of chat messages, rather than of other data."""
    items = _unbatched(items)
    return bool(items) and all(
        _is_pair(item) or (isinstance(item, Mapping) and not {"role", "type"}.isdisjoint(item)) for item in items
    )


def _unbatched(items: Sequence[Any]) -> Sequence[Any]:
    """Return the only list of a batch, as LangChain records one conversation, and other items as they are."""
    return items[0] if len(items) == 1 and isinstance(items[0], list) and not _is_pair(items[0]) else items


def _is_pair(item: Any) -> bool:
    """Whether it is LangGraph's short form of a message: its role and its text."""
    return isinstance(item, list) and len(item) == 2 and item[0] in SPEAKERS and isinstance(item[1], str)


def answer_of(recorded: Any) -> JsonDict:
    """Return a model's output as a message; raises Unreadable."""
    value = value_of(recorded)
    if value in (None, "", [], {}):
        raise Unreadable("there is no output")
    if not _is_message(value):  # a structured answer, recorded as text or already parsed
        value = recorded if isinstance(recorded, str) else json.dumps(recorded)
    if isinstance(value, Mapping) and value.get("choices"):
        value = value["choices"][0]
    if isinstance(value, Mapping):
        value = value.get("message", value)
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    items = value.get("output") if isinstance(value, Mapping) and "output" in value else value
    messages = [message for item in _listed(items) for message in _messages(_with_role(item), [])]
    if not messages or any(message["role"] != "assistant" for message in messages):
        raise Unreadable("the output is not an assistant message")
    return _joined(messages)


def _is_message(value: Any) -> bool:
    """Whether an output is a message or an API's answer, not data that a model answered with."""
    if isinstance(value, list):
        return all(map(_is_message, value))
    if not isinstance(value, Mapping):
        return False
    nested = isinstance(value.get("message"), Mapping) or isinstance(value.get("output"), list)
    return nested or not MESSAGE.isdisjoint(value) or value.get("type") in KINDS


def _listed(items: Any) -> list[Any]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if isinstance(items, Mapping):
        return [items]
    if isinstance(items, list):
        return items
    raise Unreadable(f"expected text or messages, got {type(items).__name__}")


def _with_role(item: Any) -> Any:
    """Add the role ``assistant`` to an answer without a role, except to the Responses API's items, which have types instead."""
    if isinstance(item, Mapping) and not item.get("role") and item.get("type") in (None, "message"):
        return {**item, "role": "assistant"}
    return item


def _joined(messages: Sequence[JsonDict]) -> JsonDict:
    """Join the messages into which the Responses API splits an answer."""
    content = "".join(message["content"] or "" for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    thoughts = "".join(message.get("reasoning_content", "") for message in messages)
    if not (content or calls):
        raise Unreadable("there is no output")
    return {
        "role": "assistant",
        "content": content or None,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def _unpacked(item: Any) -> Mapping[str, Any]:
    """Return a message that was recorded in a short or a serialized form as a message."""
    if isinstance(item, str):
        return {"role": "user", "content": item}
    if _is_pair(item):
        return dict(zip(("role", "content"), item, strict=True))
    if not isinstance(item, Mapping):
        raise Unreadable(f"a message is a {type(item).__name__}")
    if item.get("type") == "constructor" and isinstance(
        fields := item.get("kwargs"), Mapping
    ):  # LangChain's, serialized
        kind = str((item.get("id") or [""])[-1]).removesuffix("Message").removesuffix("MessageChunk").lower()
        return {"type": kind, **fields}
    return item


def _messages(item: Any, tools: list[JsonDict]) -> Iterator[JsonDict]:
    """Yield the messages of an item; Anthropic puts the results of several tools into one."""
    item = _unpacked(item)
    kind, content = item.get("type"), item.get("content")
    if kind == "function_call":
        yield {"role": "assistant", "content": None, "tool_calls": [_call({**item, "id": item.get("call_id")})]}
        return
    if kind in ("function_call_output", "reasoning"):
        yield from _of_responses(item)
        return
    role = str(item.get("role") or kind or "")
    role = ROLES.get(role, role)
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Unreadable(f"a message has the role {role!r}")
    if role == "tool" and isinstance(content, Mapping) and ("function" in content or "parameters" in content):
        tools.append(_tool(content))  # LangChain's handler records tools as messages
        return
    parts = _Parts(item.get("parts") if "parts" in item else content, "" if role == "assistant" else "\n")
    yield from parts.results
    calls = [*map(_call, _tool_calls(item))] or parts.calls  # LangChain records Anthropic's calls in both places
    if role == "tool" and not parts.results:
        tool_call_id = str(item.get("tool_call_id") or item.get("name") or "")
        yield {"role": "tool", "tool_call_id": tool_call_id, "content": parts.text}
    elif parts.text or calls or parts.thoughts or not parts.results:  # a message of results alone is done
        thoughts = item.get("reasoning_content") or parts.thoughts
        yield {
            "role": role,
            "content": parts.text if parts.text or not calls else None,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": thoughts} if thoughts else {}),
        }


def _of_responses(item: Mapping[str, Any]) -> Iterator[JsonDict]:
    if item["type"] == "function_call_output":
        yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": _text(item.get("output"))}
    elif summary := "".join(part.get("text", "") for part in item.get("summary") or ()):
        yield {"role": "assistant", "content": "", "reasoning_content": summary}


def _tool_calls(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    additional = item.get("additional_kwargs") or {}
    return item.get("tool_calls") or additional.get("tool_calls") or ()


class _Parts:
    """A message's content, a string or a list of parts, sorted into text, reasoning, tool calls and tool results."""

    def __init__(self, content: Any, between: str) -> None:
        self.texts: list[str] = []
        self._between, self.thoughts = between, ""
        self.calls: list[JsonDict] = []
        self.results: list[JsonDict] = []
        for part in [content] if isinstance(content, str | Mapping) else content or ():
            self._add(part)

    @property
    def text(self) -> str:
        return self._between.join(self.texts)

    def _add(self, part: Any) -> None:
        if isinstance(part, str):
            self.texts.append(part)
            return
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text", "refusal") or (kind is None and _is_text(part)):
            self.texts.append(str(part.get("text", part.get("content", part.get("refusal", ""))) or ""))
        elif kind in ("thinking", "reasoning"):
            self.thoughts += str(part.get("thinking") or part.get("content") or part.get("text") or "")
        elif kind in ("tool_use", "tool_call"):
            self.calls.append(_call({**part, "args": part.get("input", part.get("arguments", part.get("args")))}))
        elif kind in ("tool_result", "tool_call_response"):
            result = part.get("content", part.get("response", part.get("result")))
            tool_call_id = str(part.get("tool_use_id") or part.get("id") or "")
            self.results.append({"role": "tool", "tool_call_id": tool_call_id, "content": _text(result)})
        elif kind is None and isinstance(part, Mapping) and "functionCall" in part:
            self.calls.append(_call(part["functionCall"]))
        elif kind is None and isinstance(part, Mapping) and not {"inlineData", "functionResponse"} & set(part):
            self.texts.append(json.dumps(part))  # a structured answer, parsed by the instrumentation
        else:
            raise Unreadable(f"a message has a part of kind {kind or sorted(map(str, part))[:3]}, not text")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and set(part) <= {"text", "annotations"}


def _text(value: Any) -> str:
    """Return a tool's result as text, as the model saw it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "\n".join(str(part["text"]) for part in value if part["text"])
    return json.dumps(value)


def _call(call: Mapping[str, Any]) -> JsonDict:
    """Return a tool call in OpenAI's form; raises Unreadable if it has no name."""
    function = call.get("function") or call
    name = function.get("name")
    if not isinstance(name, str):
        raise Unreadable("a tool call has no name")
    arguments = next((function[key] for key in ("arguments", "args") if function.get(key) is not None), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(call.get("id") or name), "type": "function", "function": {"name": name, "arguments": text}}


def _tool(tool: Mapping[str, Any]) -> JsonDict:
    """Return a tool in OpenAI's form; Anthropic's has ``input_schema``, and the Responses API's has no ``function``."""
    if "function" in tool:
        return {"type": "function", "function": dict(tool["function"])}
    parameters = tool.get("parameters", tool.get("input_schema", {}))
    description = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool.get("name"), **description, "parameters": parameters}}
