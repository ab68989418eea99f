"""OpenAI's ``/v1/responses`` <-> chat; ``response_events`` builds the answers."""

from __future__ import annotations

import uuid
from typing import Any

from art_core.types import JsonDict
from art_gateway.dialects.conversations import Conversations
from art_gateway.dialects.from_events import FromEvents
from art_gateway.dialects.reading import (
    chat_content,
    engine_settings,
    event,
    kind_of,
    names,
    object_of,
    objects,
    refuse_unknown,
    refused,
    text_of,
)
from art_gateway.dialects.response_events import ResponseEvents

REFUSED = {
    "background_options": "the policy answers right away: leave it out and wait for the answer",
    "background": "the policy answers right away: leave it out and wait for the answer",
    "conversation": "send the whole conversation as 'input', or the last answer's id as 'previous_response_id'",
    "prompt": "prompt templates are stored at OpenAI: send the text as 'instructions' and 'input'",
    "context_management": "shorten the conversation yourself and send it as 'input'",
    "moderation": "moderate in the agent",
    "access_programs": "they exist only at OpenAI: leave it out",
}
NEUTRAL = names(
    "image include max_tool_calls metadata prompt_cache_key prompt_cache_options prompt_cache_retention "
    "safety_identifier service_tier store truncation user"
)
"""Parameters that don't affect sampling: accounting, caches, built-in tools. ``truncation="auto"`` would drop messages that
don't fit; here the engine refuses a conversation that is too long."""
TRANSLATED = names(
    "input instructions max_output_tokens previous_response_id reasoning stream_options text tool_choice "
    "tools top_logprobs"
)
SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_p")
LOGPROBS = "message.output_text.logprobs"


class Responses(FromEvents[ResponseEvents]):
    """The Responses API, without what OpenAI's servers run or store: built-in tools, conversations, background."""

    def __init__(self) -> None:
        self._conversations = Conversations()

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        request = engine_settings(body, REFUSED, NEUTRAL | TRANSLATED | set(SAME))
        request |= {name: body[name] for name in SAME if body.get(name) is not None}
        instructions = body.get("instructions")
        request["messages"] = [{"role": "system", "content": instructions}] if instructions else []
        request["messages"] += self._conversation(body)
        request |= _tools(body) | _output(body)
        if body.get("stream"):
            request["stream_options"] = {"include_usage": True}
        return request

    def error_event(self, message: str, status: int, code: str | None) -> bytes:
        """Return the event for a stream that has failed, in both shapes that clients read."""
        details = {"code": code, "message": message, "param": None}
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return event({"type": "error", "sequence_number": 0, **details, "error": {"type": kind, **details}})

    def _begin(self, body: JsonDict) -> ResponseEvents:
        return ResponseEvents(body, f"resp_{uuid.uuid4().hex}")

    def _conversation(self, body: JsonDict) -> list[JsonDict]:
        previous = body.get("previous_response_id")
        before = self._conversations.before(previous) if previous else []
        return [message for items in (*before, body.get("input")) for message in to_messages(items)]

    def _remember(self, body: JsonDict, events: ResponseEvents) -> None:
        if body.get("store") is not False:
            self._conversations.add(events.id, body.get("previous_response_id"), [body.get("input"), events.output()])


def to_messages(items: Any) -> list[JsonDict]:
    """Return input items as chat messages; consecutive text, reasoning and calls of the assistant are joined into one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[JsonDict] = []
    for item in objects(items, "'input'"):
        kind = kind_of(item, "an input item") or ("message" if "role" in item else "item_reference")
        if kind == "function_call_output":
            content = _content(item.get("output"), "a function_call_output's 'output'")
            call_id = text_of(item, "call_id", "a function_call_output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            content = _content(item.get("content"), "a message's 'content'")
            messages.append({"role": text_of(item, "role", "a message"), "content": content})
        elif kind in _ASSISTANT_ITEMS:
            _ASSISTANT_ITEMS[kind](messages, item)
        else:
            raise refused(
                f"an input item of type {kind!r}",
                "send messages, reasoning, function_call and function_call_output items with their content",
            )
    return messages


def _add_text(messages: list[JsonDict], item: JsonDict) -> None:
    message = _assistant(messages)
    if message["content"] is not None:
        message = _assistant(messages, new=True)
    message["content"] = _content(item.get("content"), "a message's 'content'")


def _add_call(messages: list[JsonDict], item: JsonDict) -> None:
    where = "a function_call"
    function = {"name": text_of(item, "name", where), "arguments": text_of(item, "arguments", where)}
    call = {"id": text_of(item, "call_id", where), "type": "function", "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_reasoning(messages: list[JsonDict], item: JsonDict) -> None:
    parts = objects(item.get("content") or item.get("summary") or [], "a reasoning item's 'content'")
    if not parts and item.get("encrypted_content"):
        raise refused("encrypted reasoning", "leave out reasoning items of other models: the policy can't read them")
    if text := "".join(text_of(part, "text", "a reasoning part") for part in parts):
        _assistant(messages, new=True)["reasoning_content"] = text


_ASSISTANT_ITEMS = {"message": _add_text, "function_call": _add_call, "reasoning": _add_reasoning}


def _assistant(messages: list[JsonDict], *, new: bool = False) -> JsonDict:
    """Return the last message if it is the assistant's, else append one."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: Any, where: str) -> str | list[JsonDict]:
    if isinstance(content, str):
        return content
    return chat_content([_part(part) for part in objects(content, where)])


def _part(part: JsonDict) -> JsonDict:
    kind = kind_of(part, "a part")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": text_of(part, "text", f"a part of type {kind}")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": text_of(part, "refusal", "a refusal")}
    if kind == "input_image" and part.get("image_url"):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    what = "an uploaded image (file_id)" if kind == "input_image" else f"a part of type {kind!r}"
    raise refused(what, "send its text as input_text, or an image as a data: or http URL in image_url")


def _tools(body: JsonDict) -> JsonDict:
    request: JsonDict = {}
    if tools := [_tool(tool) for tool in objects(body.get("tools") or [], "'tools'")]:
        request["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": text_of(choice, "name", "'tool_choice'")}}
    elif isinstance(choice, dict):
        raise refused(
            f"'tool_choice' of type {choice.get('type')!r}", "name a function, or send only the allowed tools"
        )
    if choice is not None:
        request["tool_choice"] = choice
    return request


def _tool(tool: JsonDict) -> JsonDict:
    if tool.get("type") != "function":
        raise refused(f"the tool {tool.get('type')!r}", "it runs at OpenAI: define a function that the agent runs")
    refuse_unknown(tool, {"type", "name", "description", "parameters", "strict", "output_schema"}, "a function tool")
    optional = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": text_of(tool, "name", "a function tool"), **optional}}


def _output(body: JsonDict) -> JsonDict:
    """Return the settings of the answer: length, format, effort, logprobs."""
    request: JsonDict = {}
    text, reasoning = object_of(body, "text"), object_of(body, "reasoning")
    if body.get("max_output_tokens") is not None:
        request["max_completion_tokens"] = body["max_output_tokens"]
    form = object_of(text, "format")
    if form.get("type") == "json_schema":
        fields = ("name", "description", "schema", "strict")
        schema = {key: form[key] for key in fields if form.get(key) is not None}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type") not in (None, "text"):
        request["response_format"] = form
    if text.get("verbosity"):
        request["verbosity"] = text["verbosity"]
    if reasoning.get("effort"):
        request["reasoning_effort"] = reasoning["effort"]
    included = body.get("include")
    if body.get("top_logprobs") is not None or (isinstance(included, list) and LOGPROBS in included):
        request |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    return request
