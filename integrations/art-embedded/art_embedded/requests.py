"""Parses and checks chat-completions requests; what is invalid or unsupported becomes a 400 in OpenAI's format.

A body with ``prompt`` (text, or a list of token ids) instead of ``messages`` is a raw completion: it bypasses the chat
template and is answered in the same format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import GREEDY, JsonDict

LARGEST_TOP_K = 2**31 - 1
UNSUPPORTED: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "min_p": 0, "typical_p": 1,
    "tfs_z": 1, "mirostat": 0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "bad_words": [],
    "allowed_token_ids": None, "use_beam_search": False, "structured_outputs": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "regex": None, "ebnf": None, "logits_processors": [], "chat_template": None,
    "add_generation_prompt": True, "continue_final_message": False, "truncate_prompt_tokens": None,
}  # fmt: skip
"""Settings of OpenAI's API, vLLM, SGLang and Ollama that change what is sampled -> the value that, like null, changes nothing."""
NAME = re.compile(r"[\w./:-]+")
"""Valid names of functions whose calls are constrained by a grammar."""
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Schema:
    """A JSON schema that part of the answer must match."""

    schema: JsonDict
    strict: bool = True
    """Whether keywords that the grammar library doesn't support are an error; else they are ignored, as OpenAI may do."""


@dataclass(frozen=True)
class Shape:
    """The constraints of a request on its answer."""

    content: Schema | None
    """Schema of the content; None: any text, unless a call is required."""
    calls: dict[str, Schema]
    """Functions that may be called -> schemas of their arguments."""
    required: bool = False
    """Whether the answer must be a call, and nothing else."""
    several: bool = True
    """Whether more than one call is allowed."""
    named: bool = False
    """Whether ``tool_choice`` names the function to call: OpenAI's finish reason is then "stop"."""


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request."""

    messages: list[JsonDict]
    """Empty for a raw completion."""
    prompt: str | list[int] | None
    """The prompt of a raw completion, else None."""
    shape: Shape | None
    """None: the answer is unconstrained."""
    tools: list[JsonDict] | None
    """None if the request has no tools or forbids calling them."""
    template_arguments: JsonDict
    """Additional variables for the chat template, such as ``enable_thinking``."""
    n: int
    max_tokens: int
    """The requested limit, not yet capped by the context."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    """Whether a stream ends with a chunk of usage counts."""
    model: str

    def schemas(self) -> dict[str, JsonDict]:
        """Return function name -> parameters for the tools that have parameters."""
        schemas = {}
        for function in map(_function, self.tools or ()):
            name, parameters = function.get("name"), function.get("parameters")
            if isinstance(name, str) and isinstance(parameters, dict):
                schemas[name] = parameters
        return schemas


def refuse(message: str, code: str | None = None) -> UpstreamError:
    """Return the error for an invalid or unsupported request: status 400."""
    return UpstreamError(message, status=400, code=code)


def parse(request: JsonDict, default_max_tokens: int) -> ChatRequest:
    """Parse an OpenAI chat-completions body. Raises UpstreamError 400 for invalid or unsupported requests."""
    messages, prompt = request.get("messages"), request.get("prompt")
    if prompt is not None:
        messages = _checked_prompt(request)
    elif not isinstance(messages, list) or not messages:
        raise refuse("messages is missing or empty; send at least one message")
    for name, neutral in UNSUPPORTED.items():
        if request.get(name) not in (None, neutral):
            raise refuse(
                f"the embedded engine doesn't support {name}, and ignoring it would change the distribution of the answers; "
                "omit it, or serve the policy with another engine such as vLLM"
            )
    limit = request.get("max_completion_tokens")
    if limit is None:
        limit = request.get("max_tokens")
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
        max_tokens=default_max_tokens if limit is None else int(_checked(limit, "max_tokens", 1, None)),
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
    """Check the prompt of a raw completion; return its messages: none."""
    prompt = request["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise refuse("prompt must be a string or a list of token ids; send several prompts as several requests")
    for name in ("messages", "tools", "echo", "suffix"):
        if request.get(name):
            raise refuse(f"the embedded engine can't combine {name} with prompt; omit one of them")
    return []


def _shape(request: JsonDict, tools: Sequence[JsonDict]) -> Shape | None:
    """Return the constraints from tool_choice, parallel_tool_calls, strict ``tools`` and response_format; None if free."""
    choice = request.get("tool_choice") or "auto"
    content = _content(request.get("response_format") or {"type": "text"})
    required, chosen = _chosen(choice)
    if not tools and (required or chosen is not None):
        raise refuse(f"tool_choice={choice!r} needs tools; send at least one, or omit tool_choice")
    several = request.get("parallel_tool_calls") is not False
    strict = any(_function(tool).get("strict") for tool in tools)
    if not (required or content or (tools and (chosen is not None or strict or not several))):
        return None
    calls = dict(map(_call, tools))
    if missing := sorted(set(chosen or ()) - set(calls)):
        raise refuse(f"tool_choice names {', '.join(missing)}, but the tools are {', '.join(calls)}; name one of these")
    if chosen is not None:
        calls = {name: calls[name] for name in calls if name in chosen}
    named = isinstance(choice, dict) and choice.get("type") == "function"
    return Shape(content, calls, required, several and not named, named)


def _chosen(choice: Any) -> tuple[bool, Sequence[str] | None]:
    """Return whether a call is required, and the names of the allowed tools; None allows all."""
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
        f"tool_choice must be 'none', 'auto', 'required', an object of type 'function' with a name, or an object of type "
        f"'allowed_tools', got {choice!r}"
    )


def _function(tool: Any) -> JsonDict:
    """Return the function of ``{"type": "function", "function": ...}``, or of the Responses API's flat format; else {}."""
    function = (tool.get("function") or tool) if isinstance(tool, dict) else {}
    return function if isinstance(function, dict) else {}


def _name(tool: Any) -> str:
    name = _function(tool).get("name")
    if not isinstance(name, str):
        raise refuse(f"{tool!r} has no function name; the embedded engine supports only tools of type 'function'")
    return name


def _call(tool: Any) -> tuple[str, Schema]:
    name, function = _name(tool), _function(tool)
    if not NAME.fullmatch(name):
        raise refuse(
            f"the tool name {name!r} can't be enforced in every call format; use only letters, digits and the characters _-./: "
            "in it, or omit tool_choice, strict, parallel_tool_calls and response_format"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise refuse(f"the parameters of the tool {name} must be a JSON schema of type 'object', got {parameters!r}")
    return name, Schema({"type": "object"} | parameters, bool(function.get("strict")))


def _content(response_format: Any) -> Schema | None:
    fields = response_format if isinstance(response_format, dict) else {"type": response_format}
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Schema({"type": "object"})
    if kind != "json_schema":
        raise refuse(f"response_format must be of type 'text', 'json_object' or 'json_schema', got {kind!r}")
    json_schema = fields.get("json_schema")
    if not isinstance(json_schema, dict) or not isinstance(json_schema.get("schema"), dict):
        raise refuse("response_format of type 'json_schema' has no schema; send it as json_schema.schema")
    return Schema(json_schema["schema"], bool(json_schema.get("strict")))


def _tools(request: JsonDict) -> list[JsonDict]:
    """Return the tools to show to the model: none with tool_choice "none"."""
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise refuse(f"tools must be a list of objects of type 'function', got {tools!r:.200}")
    return [] if request.get("tool_choice") == "none" else tools


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refuse(f"stop must be a string or a list of strings, got {stop!r:.200}")
    return tuple(text for text in texts if text)


def _object(request: JsonDict, name: str) -> JsonDict:
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise refuse(f"{name} must be an object, got {value!r:.200}")
    return value


def _number(request: JsonDict, name: str, default: float, low: float | None, high: float | None) -> float:
    value = request.get(name)
    return default if value is None else _checked(value, name, low, high)


def _checked(value: Any, name: str, low: float | None, high: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(f"{name} must be a number, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise refuse(f"{name} must be {bounds}, got {value!r}")
    return value
