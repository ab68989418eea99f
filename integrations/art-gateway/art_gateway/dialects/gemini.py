"""Gemini's ``models/{model}:generateContent`` and ``:streamGenerateContent`` <-> chat; ``gemini_answers`` builds the answers."""

from __future__ import annotations

from typing import Any

import orjson

from art_core.types import JsonDict
from art_gateway.dialects.from_events import FromEvents
from art_gateway.dialects.gemini_answers import GeminiAnswer, unsealed
from art_gateway.dialects.gemini_schemas import json_schema
from art_gateway.dialects.reading import (
    camel,
    chat_content,
    engine_settings,
    malformed,
    names,
    object_of,
    objects,
    refuse_unknown,
    refused,
    schema_format,
    text_of,
    written,
    written_value,
)
from art_gateway.dialects.tool_calls import ToolCalls

REFUSED = {"cachedContent": "send the whole conversation as 'contents'; the engine caches its beginning by itself"}
NEUTRAL = names("safetySettings labels serviceTier store")
"""Parameters that don't affect sampling."""
TRANSLATED = names("contents systemInstruction tools toolConfig generationConfig")
SETTINGS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "candidateCount": "n",
    "maxOutputTokens": "max_completion_tokens",
    "stopSequences": "stop",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
"""Fields of ``generationConfig`` -> chat's."""
FORMS = names("responseMimeType responseSchema responseJsonSchema responseModalities thinkingConfig mediaResolution")
MODES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Gemini(FromEvents[GeminiAnswer]):
    """The Gemini API, also at Vertex AI, without what Google's servers run or store: search, code, files, caches."""

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        """Whether the path is that of streams. The request doesn't say it."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request. Raises UpstreamError 400 if it can't be translated."""
        body = camel(body)
        request = engine_settings(body, REFUSED, NEUTRAL | TRANSLATED)
        request["messages"] = to_messages(body.get("contents"), object_of(body, "systemInstruction"))
        request |= _tools(body) | _output(camel(object_of(body, "generationConfig")))
        if self._streams:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        return request

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return Google's error shape."""
        name = STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code, "domain": "art"}
        return {"error": {"code": status, "message": message, "status": name, "details": [info] if code else []}}

    def _framed(self, part: JsonDict) -> bytes:
        return b"data: " + orjson.dumps(part) + b"\n\n"

    def _begin(self, body: JsonDict) -> GeminiAnswer:
        thinking = object_of(camel(object_of(camel(body), "generationConfig")), "thinkingConfig")
        return GeminiAnswer(thoughts=bool(camel(thinking).get("includeThoughts")))


def to_messages(contents: Any, system: JsonDict) -> list[JsonDict]:
    """Return the contents as chat messages; a content's function responses come first, each as a separate message."""
    messages: list[JsonDict] = []
    if parts := _parts(system):
        messages.append({"role": "system", "content": chat_content([_part(part) for part in parts])})
    calls = ToolCalls()
    for content in objects(contents, "'contents'"):
        role = content.get("role")
        if role == "model":
            _add_answer(messages, _parts(content), calls)
        elif role in (None, "user", "function", "tool"):
            messages += _user_messages(_parts(content), calls)
        else:
            raise malformed(f"a content has the role {role!r}; it must be user or model")
    if messages and messages[-1]["role"] == "assistant":
        raise refused("a prefilled answer (a content of the model at the end)", "describe its form in the prompt")
    return messages


def _parts(content: JsonDict) -> list[JsonDict]:
    return [camel(part) for part in objects(content.get("parts") or [], "a content's 'parts'")]


def _add_answer(messages: list[JsonDict], parts: list[JsonDict], calls: ToolCalls) -> None:
    """Add the model's parts to its message; a client that streamed it sends a content for each chunk."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    message = messages[-1]
    thoughts = ""
    for part in parts:
        sealed = unsealed(part.get("thoughtSignature"))
        if reasoning := sealed.get("reasoning"):
            message["reasoning_content"] = reasoning
        if part.get("functionCall") is not None:
            call = camel(object_of(part, "functionCall"))
            arguments = sealed.get("arguments") or written(object_of(call, "args"))
            name = text_of(call, "name", "a functionCall")
            message.setdefault("tool_calls", []).append(calls.add(name, arguments, _id(call)))
        elif part.get("thought"):
            thoughts += text_of(part, "text", "a thought")
        elif isinstance(message["content"], list) or "text" not in part:
            raise refused(f"a part of the model's with {_kind(part)}", "send its text")
        elif text := text_of(part, "text", "a part"):
            message["content"] = (message["content"] or "") + text
    if thoughts and not any(unsealed(part.get("thoughtSignature")).get("reasoning") for part in parts):
        message["reasoning_content"] = message.get("reasoning_content", "") + thoughts


def _user_messages(parts: list[JsonDict], calls: ToolCalls) -> list[JsonDict]:
    """Return a user's content as its tool results, followed by a user message with the rest."""
    results, rest = [], []
    for part in parts:
        if part.get("functionResponse") is None:
            rest.append(_part(part))
            continue
        response = camel(object_of(part, "functionResponse"))
        if response.get("parts"):
            raise refused("a functionResponse with 'parts'", "send its text in 'response'")
        name = text_of(response, "name", "a functionResponse")
        call_id = calls.answer(name, _id(response))
        if call_id is None:
            raise malformed(f"a functionResponse of {name!r} follows no functionCall of this name")
        results.append({"role": "tool", "tool_call_id": call_id, "content": _result(object_of(response, "response"))})
    return [*results, {"role": "user", "content": chat_content(rest)}] if rest or not results else results


def _id(item: JsonDict) -> str | None:
    return None if item.get("id") is None else text_of(item, "id", "a function's call or response")


def _result(response: JsonDict) -> str:
    """Return a tool's result as text. Google's clients put it under one of these names."""
    for name, prefix in (("result", ""), ("output", ""), ("error", "Error: ")):
        if response.keys() == {name}:
            value = response[name]
            return prefix + (value if isinstance(value, str) else written_value(value))
    return written_value(response)


def _part(part: JsonDict) -> JsonDict:
    if "text" in part:
        return {"type": "text", "text": text_of(part, "text", "a part")}
    for name, data in (("inlineData", "data"), ("fileData", "fileUri")):
        if part.get(name) is None:
            continue
        blob = camel(object_of(part, name))
        kind, value = blob.get("mimeType") or "image/", text_of(blob, data, name)
        if str(kind).startswith("image/") and (data == "data" or value.startswith(("http:", "https:"))):
            url = f"data:{kind};base64,{value}" if data == "data" else value
            return {"type": "image_url", "image_url": {"url": url}}
        raise refused(f"a part with {name} of type {kind!r}", "send text, or an image as inlineData or by URL")
    raise refused(f"a part with {_kind(part)}", "send its text, or an image as inlineData")


def _kind(part: JsonDict) -> str:
    return ", ".join(sorted(map(repr, part))) or "nothing in it"


def _tools(body: JsonDict) -> JsonDict:
    tools: list[JsonDict] = []
    for tool in map(camel, objects(body.get("tools") or [], "'tools'")):
        for name, value in tool.items():
            if name != "functionDeclarations" and value is not None:
                raise refused(f"the tool {name!r}", "it runs at Google: declare a function that the agent runs")
        declared = objects(tool.get("functionDeclarations") or [], "'functionDeclarations'")
        tools += [_tool(camel(declaration)) for declaration in declared]
    request: JsonDict = {"tools": tools} if tools else {}
    choice = camel(object_of(camel(object_of(body, "toolConfig")), "functionCallingConfig"))
    mode, allowed = choice.get("mode"), choice.get("allowedFunctionNames") or []
    if mode in (None, "MODE_UNSPECIFIED"):
        return request
    if mode not in list(MODES) or not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        raise malformed(f"'functionCallingConfig' is {choice!r}; its mode must be one of {', '.join(MODES)}")
    if not allowed:
        request["tool_choice"] = MODES[mode]
    elif len(allowed) == 1 and mode == "ANY":
        request["tool_choice"] = {"type": "function", "function": {"name": allowed[0]}}
    else:
        raise refused("'allowedFunctionNames' of several functions", "declare only these")
    return request


def _tool(declaration: JsonDict) -> JsonDict:
    refuse_unknown(
        declaration,
        names("name description parameters parametersJsonSchema response responseJsonSchema behavior"),
        "a functionDeclaration",
    )
    schema = declaration.get("parametersJsonSchema") or json_schema(object_of(declaration, "parameters"))
    # In this order, because chat templates print a tool's fields in the order of the request.
    function = {
        "name": text_of(declaration, "name", "a functionDeclaration"),
        "description": declaration.get("description"),
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _output(config: JsonDict) -> JsonDict:
    """Return the settings of the answer: sampling, length, stops, format, thinking."""
    refuse_unknown(config, FORMS | SETTINGS.keys(), "'generationConfig'")
    request = {SETTINGS[name]: value for name, value in config.items() if name in SETTINGS and value is not None}
    if isinstance(request.get("top_k"), float):
        request["top_k"] = int(request["top_k"])
    modalities = config.get("responseModalities")
    if modalities and modalities != ["TEXT"]:
        raise refused(f"'responseModalities' {modalities!r}", "the policy answers with text: leave it out")
    schema = config.get("responseJsonSchema") or json_schema(config.get("responseSchema"))
    form = config.get("responseMimeType") or ("application/json" if schema else "text/plain")
    if form == "application/json" and schema:
        request["response_format"] = schema_format(schema)
    elif form == "application/json":
        request["response_format"] = {"type": "json_object"}
    elif form != "text/plain":
        raise refused(f"'responseMimeType' {form!r}", "use application/json with a schema")
    thinking = camel(object_of(config, "thinkingConfig"))
    if thinking.get("thinkingBudget") is not None:
        request["chat_template_kwargs"] = {"enable_thinking": thinking["thinkingBudget"] != 0}
    if isinstance(level := thinking.get("thinkingLevel"), str) and level != "THINKING_LEVEL_UNSPECIFIED":
        request["reasoning_effort"] = level.lower()
    return request
