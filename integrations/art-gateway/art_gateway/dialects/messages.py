"""Anthropic's ``/v1/messages`` <-> chat; ``message_events`` builds the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_core.types import JsonDict
from art_gateway.dialects.conversations import Cache
from art_gateway.dialects.from_events import FromEvents
from art_gateway.dialects.message_events import MessageEvents, sampled_id
from art_gateway.dialects.reading import (
    chat_content,
    engine_settings,
    kind_of,
    malformed,
    names,
    object_of,
    objects,
    refuse_unknown,
    refused,
    schema_format,
    text_of,
    written,
)

REFUSED = {
    "mcp_servers": "call the MCP server from the agent and offer its tools as functions",
    "container": "containers run at Anthropic: run the code in the agent",
    "compaction": "shorten the conversation yourself and send it as 'messages'",
    "fallbacks": "the policy always answers, whatever the model name: leave it out",
    "fallback_credit_token": "leave it out",
    "thread": "send the whole conversation as 'messages'",
}
NO_THREADS = "thread_unsupported_request"
"""Anthropic's error code for a request with ``thread``; its SDK's tool runner then sends whole conversations instead."""
KEPT = ("clear_thinking", "clear_tool_uses")
"""Beginnings of edits of ``context_management`` that have no effect: the policy is shown the whole conversation."""
NEUTRAL = names(
    "betas billing_policy cache_control diagnostics inference_geo metadata service_tier speed "
    "user_profile_id workspace_id"
)
"""Parameters that don't affect sampling: accounting, routing, caches."""
TRANSLATED = names(
    "messages system max_tokens stop_sequences output_config output_format thinking tool_choice tools context_management"
)
SAME = ("model", "stream", "temperature", "top_p", "top_k")
TOOL_FIELDS = names("type name description input_schema strict cache_control eager_input_streaming")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages(FromEvents[MessageEvents]):
    """The Messages API, without what Anthropic's servers run or store: server tools, containers, documents, citations."""

    def __init__(self) -> None:
        self._arguments = Cache(8 * 2**20)
        """A tool call's id at the client and its arguments as they come back -> its arguments as sampled."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        if body.get("thread"):
            raise refused("'thread'", REFUSED["thread"], NO_THREADS)
        request = engine_settings(body, REFUSED, NEUTRAL | TRANSLATED | set(SAME))
        _check_edits(object_of(body, "context_management"))
        request |= {name: body[name] for name in SAME if body.get(name) is not None}
        request["messages"] = to_messages(body.get("messages"), body.get("system"))
        for message in request["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = self._as_sampled(call)
                call["id"] = sampled_id(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = sampled_id(message["tool_call_id"])
        request |= _tools(body) | _output(body)
        if body.get("stream"):
            request["stream_options"] = {"include_usage": True}
        return request

    def agent(self, headers: Mapping[str, str]) -> str | None:
        """Return what Claude Code calls the kind of a request: ``main``, ``subagent``, ``auxiliary``, ``compaction``..."""
        return headers.get("x-claude-code-request-class")

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return Anthropic's error shape."""
        kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error: JsonDict = {"type": kind, "message": message, "code": code}
        if code == NO_THREADS:
            error["details"] = {"error_code": code, "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": None}

    def _begin(self, body: JsonDict) -> MessageEvents:
        return MessageEvents()

    def _remember(self, body: JsonDict, events: MessageEvents) -> None:
        for call_id, sent, sampled in events.respelled:
            self._arguments.put(f"{call_id} {sent}", sampled.encode())

    def _as_sampled(self, call: JsonDict) -> str:
        sent = call["function"]["arguments"]
        sampled = self._arguments.get(f"{call['id']} {sent}")
        return sent if sampled is None else sampled.decode()


def _check_edits(management: JsonDict) -> None:
    """Refuse edits that change what a conversation says, instead of leaving out old parts of it."""
    refuse_unknown(management, ("edits",), "'context_management'")
    for edit in objects(management.get("edits") or [], "'edits'"):
        if not (kind_of(edit, "an edit") or "").startswith(KEPT):
            raise refused(
                f"the edit {edit.get('type')!r}", "shorten the conversation yourself and send it as 'messages'"
            )


def to_messages(turns: Any, system: Any = None) -> list[JsonDict]:
    """Return the turns as chat messages; a turn's tool results come first, each as a separate message."""
    messages: list[JsonDict] = []
    if system:
        messages.append({"role": "system", "content": _content(system, "'system'")})
    turns = objects(turns, "'messages'")
    if turns and turns[-1].get("role") == "assistant":
        raise refused(
            "a prefilled answer (an assistant message at the end)", "describe the form of the answer in the prompt"
        )
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "assistant":
            messages.append(_assistant_message(content))
        elif role == "user" and isinstance(content, list):
            messages += _user_messages(content)
        elif role in ("user", "system"):
            messages.append({"role": role, "content": _content(content, "a message's 'content'")})
        else:
            raise malformed(f"a message has the role {role!r}; it must be user, assistant or system")
    return messages


def _assistant_message(content: Any) -> JsonDict:
    """Return an assistant's turn as one chat message."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    parts: list[JsonDict] = []
    calls: list[JsonDict] = []
    reasoning = ""
    for block in objects(content, "a message's 'content'"):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = _arguments(block.get("input"))
            function = {"name": text_of(block, "name", "a tool_use"), "arguments": arguments}
            calls.append({"id": text_of(block, "id", "a tool_use"), "type": "function", "function": function})
        elif kind == "thinking":
            reasoning += text_of(block, "thinking", "a thinking block")
        else:
            parts.append(_part(block))
    message: JsonDict = {"role": "assistant", "content": chat_content(parts) if parts or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(value: Any) -> str:
    if not isinstance(value, dict):
        raise malformed(f"a tool_use's 'input' must be an object, not {value!r}")
    return written(value)


def _user_messages(content: list[Any]) -> list[JsonDict]:
    """Return a user's turn as its tool results, followed by a user message with the rest."""
    results, parts = [], []
    for block in objects(content, "a message's 'content'"):
        if block.get("type") == "tool_result":
            call_id = text_of(block, "tool_use_id", "a tool_result")
            results.append({"role": "tool", "tool_call_id": call_id, "content": _result(block)})
        else:
            parts.append(_part(block))
    return [*results, {"role": "user", "content": chat_content(parts)}] if parts or not results else results


def _result(block: JsonDict) -> str | list[JsonDict]:
    content = _content(block.get("content") or "", "a tool_result's 'content'")
    if not block.get("is_error"):
        return content
    # Chat has no field for errors, and the policy must see that its call failed.
    if isinstance(content, list):
        return [{"type": "text", "text": "Error:"}, *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


def _content(content: Any, where: str) -> str | list[JsonDict]:
    if isinstance(content, str):
        return content
    return chat_content([_part(block) for block in objects(content, where)])


def _part(block: JsonDict) -> JsonDict:
    kind = kind_of(block, "a block")
    if kind == "text":
        return {"type": "text", "text": text_of(block, "text", "a text block")}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    if kind == "image" and isinstance(source, dict) and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    what = "an uploaded image" if kind == "image" else f"a block of type {kind!r}"
    raise refused(what, "send its text in a text block, or an image by url or base64")


def _tools(body: JsonDict) -> JsonDict:
    request: JsonDict = {}
    if tools := [_tool(tool) for tool in objects(body.get("tools") or [], "'tools'")]:
        request["tools"] = tools
    choice = object_of(body, "tool_choice")
    if not choice:
        return request
    kind = kind_of(choice, "'tool_choice'")
    if kind == "tool":
        name = text_of(choice, "name", "'tool_choice'")
        request["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in CHOICES:
        request["tool_choice"] = CHOICES[kind]
    else:
        raise malformed(f"'tool_choice' is {choice!r}; it must be of type auto, any, tool or none")
    if choice.get("disable_parallel_tool_use"):
        request["parallel_tool_calls"] = False
    return request


def _tool(tool: JsonDict) -> JsonDict:
    if tool.get("type") not in (None, "custom"):
        raise refused(
            f"the tool {tool['type']!r}", "it runs at Anthropic: define a tool with 'input_schema' that the agent runs"
        )
    refuse_unknown(tool, TOOL_FIELDS, "a tool")
    # In this order, because chat templates print a tool's fields in the order of the request.
    function = {
        "name": text_of(tool, "name", "a tool"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema") or {"type": "object"},
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _output(body: JsonDict) -> JsonDict:
    """Return the settings of the answer: length, stops, format, effort, thinking."""
    request: JsonDict = {}
    config, thinking = object_of(body, "output_config"), object_of(body, "thinking")
    refuse_unknown(config, ("format", "effort"), "'output_config'")
    if body.get("max_tokens") is not None:
        request["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        request["stop"] = body["stop_sequences"]
    if form := object_of(config, "format") or object_of(body, "output_format"):
        if form.get("type") != "json_schema":
            raise malformed(f"the output format is {form!r}; it must be of type json_schema")
        request["response_format"] = schema_format(form.get("schema"))
    if config.get("effort"):
        request["reasoning_effort"] = config["effort"]
    if thinking:
        request["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled"}
    return request
