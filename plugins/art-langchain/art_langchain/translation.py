"""Translates the arguments of a provider's chat model into those of ``ChatOpenAI``.

The model's class binds tools, tool choice and output formats in the provider's form; here they become OpenAI's. Arguments that a
chat completion cannot express are refused by name, and those that do not affect the prompt are dropped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from art_core.errors import CaptureError

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import BaseMessage

logger = logging.getLogger("art")

SAME = {"temperature", "top_p", "n", "seed", "stop", "logprobs", "top_logprobs"}
SAME |= {"presence_penalty", "frequency_penalty", "logit_bias", "parallel_tool_calls", "timeout", "extra_body"}
"""Arguments with the same meaning for all providers."""
RENAMED = {"stop_sequences": "stop"}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "num_predict")
"""Names of the answer's token limit; the first that is set wins."""
FORMATS = ("response_format", "output_format", "format", "response_json_schema", "response_schema")
"""Arguments with a schema of the answer."""
READ = {"tools", "tool_choice", "top_k", "output_config", "response_mime_type", *LIMITS, *FORMATS}
LEFT_OUT = {"model", "stream", "stream_usage", "thinking", "reasoning", "reasoning_effort", "effort", "betas", "strict"}
LEFT_OUT |= {"metadata", "user", "service_tier", "extra_headers", "inference_geo", "cache_control", "safety_settings"}
LEFT_OUT |= {"ls_structured_output_format", "structured_output_format"}
"""Arguments that are dropped; whether the policy thinks is up to its chat template."""
OWN = ("top_p", "top_k", "n", "stop", "stop_sequences", "output_config", "format")
"""Attributes in which model classes store such arguments."""
CALLED_TOOLS = {"function", "object", None}
"""The ``type`` of a tool that the agent runs itself: an OpenAI tool, a JSON schema, or no type in other forms."""
UNSEEN = {"thinking", "redacted_thinking", "reasoning", "reasoning_content", "tool_call", "invalid_tool_call"}
"""Content blocks that repeat another part of the message, or that providers do not show the model again."""


def for_openai(model: BaseChatModel, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for ``ChatOpenAI``. Raises CaptureError for what a chat completion cannot express."""
    kind = type(model).__name__
    own, passed = _own(model), {key: value for key, value in kwargs.items() if value is not None}
    arguments = own | passed
    settings = {RENAMED.get(key, key): value for key, value in arguments.items() if key in SAME or key in RENAMED}
    for key in arguments.keys() - SAME - RENAMED.keys() - READ - LEFT_OUT:
        _warn_once(kind, key)
    limit = next((source[name] for source in (passed, own) for name in LIMITS if name in source), 0)
    if limit > 0:  # Ollama uses values below 1 for "no limit"
        settings["max_tokens"] = limit
    if stop is not None:
        settings["stop"] = stop
    if arguments.get("tools"):
        settings["tools"] = [_tool(kind, tool) for tool in arguments["tools"]]
    if arguments.get("tool_choice") is not None:
        settings |= _tool_choice(kind, arguments["tool_choice"])
    # As arguments of ChatOpenAI itself, they would make it parse the answer, which is up to the model's class.
    body = {"top_k": arguments.get("top_k"), "response_format": _response_format(kind, arguments)}
    body = settings.pop("extra_body", {}) | {key: value for key, value in body.items() if value is not None}
    return settings | ({"extra_body": body} if body else {})


def _own(model: BaseChatModel) -> dict[str, Any]:
    """Return the settings that the model was created with."""
    described = model._get_ls_params()
    max_tokens = described.get("ls_max_tokens")
    # If a provider requires a limit, its class defaults to the model's maximum, which means nothing for the policy.
    fields = vars(model)
    if max_tokens == (fields.get("profile") or {}).get("max_output_tokens"):
        max_tokens = None
    own = {"temperature": described.get("ls_temperature"), "max_tokens": max_tokens}
    own |= {name: fields.get(name) for name in OWN} | (fields.get("model_kwargs") or {})
    return {key: value for key, value in own.items() if value is not None}


@functools.cache
def _warn_once(kind: str, argument: str) -> None:
    logger.warning("%s=, passed to %s, is not passed to the policy: chat completions don't support it", argument, kind)


def _tool(kind: str, tool: Any) -> dict[str, Any]:
    from langchain_core.utils.function_calling import convert_to_openai_tool

    sort = tool.get("type") if isinstance(tool, Mapping) else None
    if sort not in CALLED_TOOLS and "input_schema" not in tool:
        raise CaptureError(
            f"{kind} was called inside a rollout with the tool {sort!r}, which its provider runs; the policy has no such "
            "provider. Use a tool that the agent runs itself, or exempt this model with passthrough="
        )
    try:
        function = convert_to_openai_tool(tool)["function"]
    except (ValueError, KeyError) as error:
        raise CaptureError(f"{kind} was called inside a rollout with a tool of unknown format: {error}") from error
    # In OpenAI's order: chat templates print tools as they are, and the prompt must not depend on the provider.
    ordered = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": ordered | function}


def _tool_choice(kind: str, choice: Any) -> dict[str, Any]:
    """Return ``tool_choice``, and other settings that the provider's form includes."""
    if isinstance(choice, str):
        modes = {"any": "required", "required": "required", "auto": "auto", "none": "none"}
        return {"tool_choice": modes.get(choice) or _function(choice)}
    if isinstance(choice, bool):
        return {"tool_choice": "required" if choice else "none"}
    if choice.get("type") in ("function", "allowed_tools"):
        return {"tool_choice": choice}
    match dict(choice):
        case {"type": "tool", "name": name} | {"tool": {"name": name}}:  # Anthropic's form | Bedrock's
            settings: dict[str, Any] = {"tool_choice": _function(name)}
        case {"type": "any"} | {"any": _}:
            settings = {"tool_choice": "required"}
        case {"type": "auto"} | {"auto": _}:
            settings = {"tool_choice": "auto"}
        case {"type": "none"}:
            settings = {"tool_choice": "none"}
        case _:
            raise CaptureError(f"{kind} was called inside a rollout with tool_choice={choice!r}, an unknown format")
    if "disable_parallel_tool_use" in choice:
        settings["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return settings


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _response_format(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    from langchain_core.utils.function_calling import convert_to_json_schema

    wanted = next((arguments[name] for name in FORMATS if arguments.get(name)), None)
    wanted = wanted or (arguments.get("output_config") or {}).get("format")
    if wanted is None:
        return {"type": "json_object"} if arguments.get("response_mime_type") == "application/json" else None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, type):
        wanted = convert_to_json_schema(wanted)
    if not isinstance(wanted, Mapping):
        raise CaptureError(f"{kind} was called inside a rollout with the unknown answer format {wanted!r}")
    if wanted.get("type") in ("text", "json_object") or "json_schema" in wanted:
        return dict(wanted)
    schema = wanted["schema"] if wanted.get("type") == "json_schema" else wanted
    return {"type": "json_schema", "json_schema": {"name": schema.get("title") or "answer", "schema": schema}}


def messages_for_openai(model: BaseChatModel, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages with content in OpenAI's form. Raises CaptureError, naming a block that cannot be converted."""
    return [converted for message in messages for converted in _message(model, message)]


def _message(model: BaseChatModel, message: BaseMessage) -> list[BaseMessage]:
    from langchain_core.messages import convert_to_messages, convert_to_openai_messages

    if isinstance(message.content, str):
        return [message]
    content = [block for block in message.content if isinstance(block, str) or block.get("type") not in UNSEEN]
    try:
        plain = convert_to_openai_messages(
            [message.model_copy(update={"content": content})], pass_through_unknown_blocks=False
        )
    except ValueError as error:
        raise CaptureError(
            f"{type(model).__name__} was called inside a rollout with a {message.type} message whose content chat completions "
            f"don't support: {' '.join(str(error).split()):.300}"
        ) from error
    converted = convert_to_messages(plain)
    if message.type == "ai":  # tool calls with invalid JSON must be sent back exactly as sampled
        converted[0].invalid_tool_calls = message.invalid_tool_calls
    # Tool results must directly follow their calls, even if their message has text as well.
    return sorted(converted, key=lambda each: each.type != "tool")
