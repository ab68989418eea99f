"""What traces hold as a model's input and output -> chat messages in OpenAI's form.

Pure. Reads what the usual instrumentations write: OpenAI's chat and Responses, LangChain's messages, Anthropic's blocks,
Gemini's and OpenTelemetry's parts. What cannot be read is refused, with the reason, and never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from art_core.types import JsonDict

ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool", "AIMessageChunk": "assistant"}
"""Other names of roles."""
MESSAGE, KINDS = {"role", "parts", "choices", "tool_calls"}, {"message", "function_call", "reasoning", "ai", *ROLES}
"""By what an output is known as a message or an API's answer, and not as the data that a model answered with."""


class Unreadable(ValueError):
    """It is no conversation in text."""


def value_of(shown: Any) -> Any:
    """Return what Langfuse shows as text, as the object or list that was sent; "42" stays the text that it most likely was."""
    try:
        return json.loads(shown) if isinstance(shown, str) and shown.lstrip()[:1] in ("{", "[") else shown
    except (ValueError, RecursionError):
        return shown


def shown_of(given: Any) -> tuple[list[JsonDict], list[JsonDict]]:
    """Return the messages and the tools that a model was shown; raises Unreadable."""
    given, tools = value_of(given), []
    if isinstance(given, Mapping):
        tools = [_tool(it) for it in given.get("tools") or ()]
        if "messages" in given:
            items = given["messages"]
        elif "input" in given or "instructions" in given:
            system = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
            items = [*system, *_listed(given.get("input") or [])]
        elif "contents" in given:
            items = given["contents"]
        elif "role" in given or "type" in given:
            items = [given]
        else:
            raise Unreadable(f"its input has none of messages, input and contents: {sorted(map(str, given))[:5]}")
    else:
        items = given
    items = _listed(items)
    if len(items) == 1 and isinstance(items[0], list):  # LangChain's batches of one
        items = items[0]
    messages = [message for item in items for message in _messages(item, tools)]
    if not messages:
        raise Unreadable("its input has no message")
    return messages, tools


def answer_of(gave: Any) -> JsonDict:
    """Return the message that a model answered; raises Unreadable."""
    said, gave = gave, value_of(gave)
    if gave in (None, "", [], {}):
        raise Unreadable("it has no output")
    if not _is_message(gave):  # an answer as data, which was sent as text or read by somebody
        gave = said if isinstance(said, str) else json.dumps(said)
    if isinstance(gave, Mapping) and gave.get("choices"):
        gave = gave["choices"][0]
    if isinstance(gave, Mapping):
        gave = gave.get("message", gave)
    if isinstance(gave, str):
        return {"role": "assistant", "content": gave}
    items = gave.get("output") if isinstance(gave, Mapping) and "output" in gave else gave
    found = [it for item in _listed(items) for it in _messages(_with_role(item), [])]
    if not found or any(it["role"] != "assistant" for it in found):
        raise Unreadable("its output is no assistant's message")
    return _joined(found)


def _is_message(gave: Any) -> bool:
    """Whether an output is one of a model, and not the data that it answered with."""
    if isinstance(gave, list):
        return all(_is_message(it) for it in gave)
    if not isinstance(gave, Mapping):
        return False
    nested = isinstance(gave.get("message"), Mapping) or isinstance(gave.get("output"), list)
    return nested or not MESSAGE.isdisjoint(gave) or gave.get("type") in KINDS


def _listed(items: Any) -> list[Any]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if isinstance(items, Mapping):
        return [items]
    if isinstance(items, list):
        return items
    raise Unreadable(f"it is neither text nor messages, but a {type(items).__name__}")


def _with_role(item: Any) -> Any:
    """Return an answer that says no role as the assistant's; the Responses API's items have types instead."""
    if isinstance(item, Mapping) and not item.get("role") and item.get("type") in (None, "message"):
        return {**item, "role": "assistant"}
    return item


def _joined(found: Sequence[JsonDict]) -> JsonDict:
    """Return one message of those that the Responses API made of an answer."""
    content = "".join(it["content"] or "" for it in found)
    calls = [call for it in found for call in it.get("tool_calls", ())]
    thoughts = "".join(it.get("reasoning_content", "") for it in found)
    if not (content or calls):
        raise Unreadable("it has no output")
    return {
        "role": "assistant",
        "content": content or None,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def _messages(item: Any, tools: list[JsonDict]) -> Iterator[JsonDict]:
    """Yield the messages that an item stands for: Anthropic puts several tools' results into one."""
    if isinstance(item, str):
        yield {"role": "user", "content": item}
        return
    if not isinstance(item, Mapping):
        raise Unreadable(f"a message is a {type(item).__name__}")
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
        tools.append(_tool(content))  # LangChain's handler shows the tools as messages
        return
    read = _Parts(item.get("parts") if "parts" in item else content)
    yield from read.results
    calls = [*map(_call, _asked(item))] or read.calls  # LangChain has Anthropic's calls in both places
    if role == "tool" and not read.results:
        yield {
            "role": "tool",
            "tool_call_id": str(item.get("tool_call_id") or item.get("name") or ""),
            "content": read.text,
        }
    elif read.text or calls or read.thoughts or not read.results:  # nothing is left of a message of results alone
        yield {
            "role": role,
            "content": read.text if read.text or not calls else None,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": thoughts} if (thoughts := item.get("reasoning_content") or read.thoughts) else {}),
        }


def _of_responses(item: Mapping[str, Any]) -> Iterator[JsonDict]:
    if item["type"] == "function_call_output":
        yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": _text(item.get("output"))}
    elif said := "".join(part.get("text", "") for part in item.get("summary") or ()):
        yield {"role": "assistant", "content": "", "reasoning_content": said}


def _asked(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    more = item.get("additional_kwargs") or {}
    return item.get("tool_calls") or more.get("tool_calls") or ()


class _Parts:
    """A message's content, which is text or a list of parts, taken apart."""

    def __init__(self, content: Any) -> None:
        self.text, self.thoughts = "", ""
        self.calls: list[JsonDict] = []
        self.results: list[JsonDict] = []
        for part in [content] if isinstance(content, str | Mapping) else content or ():
            self._take(part)

    def _take(self, part: Any) -> None:
        if isinstance(part, str):
            self.text += part
            return
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text", "refusal") or (kind is None and _is_text(part)):
            self.text += str(part.get("text", part.get("content", part.get("refusal", ""))) or "")
        elif kind in ("thinking", "reasoning"):
            self.thoughts += str(part.get("thinking") or part.get("content") or part.get("text") or "")
        elif kind in ("tool_use", "tool_call"):
            self.calls.append(_call({**part, "args": part.get("input", part.get("arguments", part.get("args")))}))
        elif kind in ("tool_result", "tool_call_response"):
            said = part.get("content", part.get("response", part.get("result")))
            name = str(part.get("tool_use_id") or part.get("id") or "")
            self.results.append({"role": "tool", "tool_call_id": name, "content": _text(said)})
        elif kind is None and isinstance(part, Mapping) and "functionCall" in part:
            self.calls.append(_call(part["functionCall"]))
        elif kind is None and isinstance(part, Mapping) and not {"inlineData", "functionResponse"} & set(part):
            self.text += json.dumps(part)  # an answer as data, which instrumentations parse
        else:
            raise Unreadable(f"a message has a part of kind {kind or sorted(map(str, part))[:3]}, not text")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and set(part) <= {"text", "annotations"}


def _text(value: Any) -> str:
    """Return a tool's result as the model was shown it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(it, Mapping) and "text" in it for it in value):
        return "".join(str(it["text"]) for it in value)
    return json.dumps(value)


def _call(call: Mapping[str, Any]) -> JsonDict:
    """Return a tool call in OpenAI's form; raises Unreadable where it has no name."""
    function = call.get("function") or call
    name = function.get("name")
    if not isinstance(name, str):
        raise Unreadable("a tool call has no name")
    arguments = next((function[it] for it in ("arguments", "args") if function.get(it) is not None), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(call.get("id") or name), "type": "function", "function": {"name": name, "arguments": text}}


def _tool(tool: Mapping[str, Any]) -> JsonDict:
    """Return a tool in OpenAI's form: Anthropic's has ``input_schema``, that of the Responses API no ``function``."""
    if "function" in tool:
        return {"type": "function", "function": dict(tool["function"])}
    parameters = tool.get("parameters", tool.get("input_schema", {}))
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool.get("name"), **described, "parameters": parameters}}
