"""A chat-completions request -> checked settings, or OpenAI's 400. Knows nothing about models, templates or grammars.

A body with ``prompt`` (text, or a list of token ids) instead of ``messages`` is a raw completion: it is answered without
the chat template, in the same form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import GREEDY, JsonDict

LARGEST_TOP_K = 2**31 - 1
UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias")
NAME = re.compile(r"[\w./:-]+")
"""Of a function whose calls have a grammar."""
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Schema:
    """A JSON schema that a part of the answer must have."""

    schema: JsonDict
    strict: bool = True
    """False: what the grammar library does not know in it is left out, as OpenAI promises nothing there; else refused."""


@dataclass(frozen=True)
class Shape:
    """What a request demands of its answer."""

    content: Schema | None
    """None: any text, where no call is demanded."""
    calls: dict[str, Schema]
    """The functions that may be called, with the schemas of their arguments."""
    required: bool = False
    """Whether there must be a call; then nothing else is said."""
    several: bool = True
    """Whether there may be more than one call."""
    named: bool = False
    """Whether the request names the one function to call: OpenAI's finish reason is then "stop"."""


@dataclass(frozen=True)
class ChatRequest:
    """What the engine acts on."""

    messages: list[JsonDict]
    """Empty where there is a prompt."""
    prompt: str | list[int] | None
    """Of a raw completion."""
    shape: Shape | None
    """None where the answer is free."""
    tools: list[JsonDict] | None
    """None where the request has none or forbids them."""
    template_arguments: JsonDict
    """Further variables for the chat template, such as ``enable_thinking``."""
    n: int
    max_tokens: int
    """Before the context's limit is applied."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    """In the last chunk of a stream."""
    model: str

    def schemas(self) -> dict[str, JsonDict]:
        """Return the parameters of the tools that have some, by the functions' names."""
        found = {}
        for function in map(_function, self.tools or ()):
            name, parameters = function.get("name"), function.get("parameters")
            if isinstance(name, str) and isinstance(parameters, dict):
                found[name] = parameters
        return found


def refuse(message: str, code: str | None = None) -> UpstreamError:
    """Return the error for a request that cannot be answered as asked."""
    return UpstreamError(message, status=400, code=code)


def parse(request: JsonDict, default_max_tokens: int) -> ChatRequest:
    """Read an OpenAI chat-completions body. Raises UpstreamError with status 400 for what cannot be done."""
    messages, prompt = request.get("messages"), request.get("prompt")
    if prompt is not None:
        messages = _checked_prompt(request)
    elif not isinstance(messages, list) or not messages:
        raise refuse("messages is missing or empty; send at least one message")
    for name in UNSUPPORTED:
        if request.get(name):
            raise refuse(
                f"{name} is not applied by the embedded engine, and ignoring it would answer from another distribution; "
                "leave it out, or serve the policy with another engine such as vLLM"
            )
    asked = request.get("max_completion_tokens")
    if asked is None:
        asked = request.get("max_tokens")
    temperature = _number(request, "temperature", 1.0, 0, None)
    top_k = _number(request, "top_k", 0, -1, None)
    tools = _tools(request)
    return ChatRequest(
        messages=messages,
        prompt=prompt,
        shape=_shape(request, tools),
        tools=tools or None,
        template_arguments=dict(_object(request, "chat_template_kwargs")),
        n=int(_number(request, "n", 1, 1, 128)),
        max_tokens=default_max_tokens if asked is None else int(_checked(asked, "max_tokens", 1, None)),
        temperature=0.0 if temperature < GREEDY else temperature,
        top_p=_number(request, "top_p", 1.0, 0, 1),
        top_k=max(int(min(top_k, LARGEST_TOP_K)), 0),
        seed=None if request.get("seed") is None else int(_checked(request["seed"], "seed", None, None)),
        stop=_stop(request.get("stop")),
        logprobs=bool(request.get("logprobs")),
        top_logprobs=int(_number(request, "top_logprobs", 0, 0, 20)),
        include_usage=bool(_object(request, "stream_options").get("include_usage")),
        model=str(request.get("model") or "policy"),
    )


def _checked_prompt(request: JsonDict) -> list[JsonDict]:
    """Return the messages of a raw completion, none."""
    prompt = request["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise refuse("prompt must be a string or a list of token ids; send several prompts as several requests")
    for name in ("messages", "tools", "echo", "suffix"):
        if request.get(name):
            raise refuse(f"{name} cannot be combined with prompt in the embedded engine; leave one of them out")
    return []


def _shape(request: JsonDict, tools: Sequence[JsonDict]) -> Shape | None:
    """Read tool_choice, parallel_tool_calls, strict ``tools`` and response_format."""
    choice = request.get("tool_choice") or "auto"
    content = _content(request.get("response_format") or {"type": "text"})
    required, chosen = _chosen(choice)
    if not tools and (required or chosen is not None):
        raise refuse(f"tool_choice={choice!r} needs tools; send at least one, or leave tool_choice out")
    several = request.get("parallel_tool_calls") is not False
    strict = any(_function(tool).get("strict") for tool in tools)
    if not (required or content or (tools and (chosen is not None or strict or not several))):
        return None
    calls = dict(map(_call, tools))
    if missing := sorted(set(chosen or ()) - set(calls)):
        raise refuse(
            f"tool_choice names {', '.join(missing)}, and the tools are {', '.join(calls)}; choose among these"
        )
    if chosen is not None:
        calls = {name: calls[name] for name in calls if name in chosen}
    named = isinstance(choice, dict) and choice.get("type") == "function"
    return Shape(content, calls, required, several and not named, named)


def _chosen(choice: Any) -> tuple[bool, Sequence[str] | None]:
    """Return whether a tool must be called, and the names of those that may be; None for all."""
    if choice in ("auto", "none", "required"):
        return choice == "required", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return True, [_name(choice)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            raise refuse(f"tool_choice={choice!r} names no tool; name at least one, or send tool_choice='none'")
        return allowed.get("mode") == "required", [_name(tool) for tool in allowed["tools"]]
    raise refuse(
        f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required', an object of type 'function' that names one, "
        "or one of type 'allowed_tools'"
    )


def _function(tool: Any) -> JsonDict:
    """Return what ``{"type": "function", "function": ...}`` says, also in the flat form of the Responses API; else nothing."""
    said = (tool.get("function") or tool) if isinstance(tool, dict) else {}
    return said if isinstance(said, dict) else {}


def _name(tool: Any) -> str:
    name = _function(tool).get("name")
    if not isinstance(name, str):
        raise refuse(f"{tool!r} names no function; the embedded engine calls tools of type 'function' only")
    return name


def _call(tool: Any) -> tuple[str, Schema]:
    name, function = _name(tool), _function(tool)
    if not NAME.fullmatch(name):
        raise refuse(
            f"a tool is named {name!r}, which not every format of calls can say; give it a name of letters, digits and _-./: "
            "or leave out tool_choice, strict, parallel_tool_calls and response_format"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise refuse(
            f"the parameters of the tool {name} are {parameters!r}; they must be a JSON schema of type 'object'"
        )
    return name, Schema({"type": "object"} | parameters, bool(function.get("strict")))


def _content(response_format: Any) -> Schema | None:
    said = response_format if isinstance(response_format, dict) else {"type": response_format}
    kind = said.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Schema({"type": "object"})
    if kind != "json_schema":
        raise refuse(f"response_format is of type {kind!r}; it must be 'text', 'json_object' or 'json_schema'")
    described = said.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise refuse("response_format of type 'json_schema' has no schema; give one as json_schema.schema")
    return Schema(described["schema"], bool(described.get("strict")))


def _tools(request: JsonDict) -> list[JsonDict]:
    """Return the tools that the model is shown: none with tool_choice "none"."""
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise refuse(f"tools is {tools!r:.200}; it must be a list of objects of type 'function'")
    return [] if request.get("tool_choice") == "none" else tools


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refuse(f"stop is {stop!r:.200}; it must be a string or a list of strings")
    return tuple(text for text in texts if text)


def _object(request: JsonDict, name: str) -> JsonDict:
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise refuse(f"{name} is {value!r:.200}; it must be an object")
    return value


def _number(request: JsonDict, name: str, default: float, low: float | None, high: float | None) -> float:
    value = request.get(name)
    return default if value is None else _checked(value, name, low, high)


def _checked(value: Any, name: str, low: float | None, high: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(f"{name} is {value!r}; it must be a number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise refuse(f"{name} is {value!r}; it must be {bounds}")
    return value
