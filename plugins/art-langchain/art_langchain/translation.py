"""What a provider's chat model is given -> what ``ChatOpenAI`` is given. Pure; knows nothing about rollouts.

Tools, tool choice and output formats are bound in the provider's own form by the model's class, which stays in charge of
that; here they become OpenAI's. What cannot be said in a chat completion is refused by name, what does not change the
question is left out.
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
"""Arguments that mean the same everywhere."""
RENAMED = {"stop_sequences": "stop"}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "num_predict")
"""Names of the greatest number of tokens of an answer, the first beats the others."""
FORMATS = ("response_format", "output_format", "format", "response_json_schema", "response_schema")
"""Arguments that hold a schema of the answer."""
READ = {"tools", "tool_choice", "top_k", "output_config", "response_mime_type", *LIMITS, *FORMATS}
LEFT_OUT = {"model", "stream", "stream_usage", "thinking", "reasoning", "reasoning_effort", "effort", "betas", "strict"}
LEFT_OUT |= {"metadata", "user", "service_tier", "extra_headers", "inference_geo", "cache_control", "safety_settings"}
LEFT_OUT |= {"ls_structured_output_format", "structured_output_format"}
"""Arguments that do not change the question: the policy thinks as its chat template has it."""
OWN = ("top_p", "top_k", "n", "stop", "stop_sequences", "output_config", "format")
"""Attributes under which classes keep such arguments for every call."""
CALLED_TOOLS = {"function", "object", None}
"""The ``type`` of a tool that the agent runs itself: an OpenAI tool, a JSON schema, or none in other forms."""
UNSEEN = {"thinking", "redacted_thinking", "reasoning", "reasoning_content", "tool_call", "invalid_tool_call"}
"""Content blocks that repeat what the message says elsewhere, or that a provider does not show the model again."""


def for_openai(model: BaseChatModel, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for ``ChatOpenAI``. Raises CaptureError, naming what has no place in a chat completion."""
    kind = type(model).__name__
    own, asked = _own(model), {key: value for key, value in kwargs.items() if value is not None}
    given = own | asked
    settings = {RENAMED.get(key, key): value for key, value in given.items() if key in SAME or key in RENAMED}
    for key in given.keys() - SAME - RENAMED.keys() - READ - LEFT_OUT:
        _say_once(kind, key)
    limit = next((said[name] for said in (asked, own) for name in LIMITS if name in said), 0)
    if limit > 0:  # Below that Ollama says that there is none.
        settings["max_tokens"] = limit
    if stop is not None:
        settings["stop"] = stop
    if given.get("tools"):
        settings["tools"] = [_tool(kind, tool) for tool in given["tools"]]
    if given.get("tool_choice") is not None:
        settings |= _tool_choice(kind, given["tool_choice"])
    # Not as ChatOpenAI's own arguments: it would parse the answer, which the model's class does itself.
    body = {"top_k": given.get("top_k"), "response_format": _response_format(kind, given)}
    body = settings.pop("extra_body", {}) | {key: value for key, value in body.items() if value is not None}
    return settings | ({"extra_body": body} if body else {})


def _own(model: BaseChatModel) -> dict[str, Any]:
    """Return the settings that the model was made with."""
    described = model._get_ls_params()
    max_tokens = described.get("ls_max_tokens")
    # Where a provider asks for a limit its class gives the model's greatest; nobody chose that for the policy.
    fields = vars(model)
    if max_tokens == (fields.get("profile") or {}).get("max_output_tokens"):
        max_tokens = None
    own = {"temperature": described.get("ls_temperature"), "max_tokens": max_tokens}
    own |= {name: fields.get(name) for name in OWN} | (fields.get("model_kwargs") or {})
    return {key: value for key, value in own.items() if value is not None}


@functools.cache
def _say_once(kind: str, argument: str) -> None:
    logger.warning("%s is given %s=, which the policy is not: it has no place in a chat completion", kind, argument)


def _tool(kind: str, tool: Any) -> dict[str, Any]:
    from langchain_core.utils.function_calling import convert_to_openai_tool

    sort = tool.get("type") if isinstance(tool, Mapping) else None
    if sort not in CALLED_TOOLS and "input_schema" not in tool:
        raise CaptureError(
            f"{kind} was given the tool {sort!r} inside a rollout: its provider runs that tool, and the policy has no such "
            "provider. Give the agent a tool that it runs itself, or let this model answer for itself with passthrough="
        )
    try:
        function = convert_to_openai_tool(tool)["function"]
    except (ValueError, KeyError) as error:
        raise CaptureError(f"{kind} was given a tool inside a rollout whose format is not known: {error}") from error
    # In OpenAI's order: chat templates print a tool as it comes, and the prompt must not depend on the provider.
    ordered = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": ordered | function}


def _tool_choice(kind: str, choice: Any) -> dict[str, Any]:
    """Return ``tool_choice`` and what else the provider says with it."""
    if isinstance(choice, str):
        named = {"any": "required", "required": "required", "auto": "auto", "none": "none"}
        return {"tool_choice": named.get(choice) or _function(choice)}
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
            raise CaptureError(f"{kind} was given tool_choice={choice!r} inside a rollout, whose format is not known")
    if "disable_parallel_tool_use" in choice:
        settings["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return settings


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _response_format(kind: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    from langchain_core.utils.function_calling import convert_to_json_schema

    asked = next((given[name] for name in FORMATS if given.get(name)), None)
    asked = asked or (given.get("output_config") or {}).get("format")
    if asked is None:
        return {"type": "json_object"} if given.get("response_mime_type") == "application/json" else None
    if asked == "json":
        return {"type": "json_object"}
    if isinstance(asked, type):
        asked = convert_to_json_schema(asked)
    if not isinstance(asked, Mapping):
        raise CaptureError(f"{kind} was given the answer format {asked!r} inside a rollout, which is not known")
    if asked.get("type") in ("text", "json_object") or "json_schema" in asked:
        return dict(asked)
    schema = asked["schema"] if asked.get("type") == "json_schema" else asked
    return {"type": "json_schema", "json_schema": {"name": schema.get("title") or "answer", "schema": schema}}


def messages_for_openai(model: BaseChatModel, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages with their content in OpenAI's form. Raises CaptureError, naming the block that has none."""
    return [ours for message in messages for ours in _message(model, message)]


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
            f"{type(model).__name__} was given a {message.type} message inside a rollout whose content has no place in a chat "
            f"completion: {' '.join(str(error).split()):.300}"
        ) from error
    ours = convert_to_messages(plain)
    if message.type == "ai":  # A call that was no JSON must come back as it was sampled.
        ours[0].invalid_tool_calls = message.invalid_tool_calls
    # Results of tools belong right behind their calls, also where their message has a text besides.
    return sorted(ours, key=lambda one: one.type != "tool")
