"""A chat-completions request -> checked settings, or OpenAI's 400. Knows nothing about models or templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import JsonDict

UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias")


@dataclass(frozen=True)
class ChatRequest:
    """What the engine acts on."""

    messages: list[JsonDict]
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


def refuse(message: str, code: str | None = None) -> UpstreamError:
    """Return the error for a request that cannot be answered as asked."""
    return UpstreamError(message, status=400, code=code)


def parse(request: JsonDict, default_max_tokens: int) -> ChatRequest:
    """Read an OpenAI chat-completions body. Raises UpstreamError with status 400 for what cannot be done."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages is missing or empty; send at least one message")
    _check_support(request)
    asked = request.get("max_completion_tokens")
    if asked is None:
        asked = request.get("max_tokens")
    stop = request.get("stop") or ()
    top_k = _number(request, "top_k", 0, -1, None)
    return ChatRequest(
        messages=messages,
        tools=(request.get("tools") or None) if request.get("tool_choice") != "none" else None,
        template_arguments=dict(request.get("chat_template_kwargs") or {}),
        n=int(_number(request, "n", 1, 1, 128)),
        max_tokens=default_max_tokens if asked is None else int(_checked(asked, "max_tokens", 1, None)),
        temperature=_number(request, "temperature", 1.0, 0, None),
        top_p=_number(request, "top_p", 1.0, 0, 1),
        top_k=max(int(top_k), 0),
        seed=None if request.get("seed") is None else int(_checked(request["seed"], "seed", None, None)),
        stop=(stop,) if isinstance(stop, str) else tuple(text for text in stop if text),
        logprobs=bool(request.get("logprobs")),
        top_logprobs=int(_number(request, "top_logprobs", 0, 0, 20)),
        include_usage=bool((request.get("stream_options") or {}).get("include_usage")),
        model=str(request.get("model") or "policy"),
    )


def _check_support(request: JsonDict) -> None:
    choice = request.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refuse(
            f"tool_choice={choice!r} needs constrained decoding, which the embedded engine does not do yet; "
            "use tool_choice='auto' or leave it out, or serve the policy with another engine such as vLLM"
        )
    kind = (request.get("response_format") or {}).get("type", "text")
    if kind != "text":
        raise refuse(
            f"response_format of type {kind!r} needs constrained decoding, which the embedded engine does not do yet; "
            "leave it out and ask for JSON in the prompt, or serve the policy with another engine such as vLLM"
        )
    for name in UNSUPPORTED:
        if request.get(name):
            raise refuse(
                f"{name} is not applied by the embedded engine, and ignoring it would answer from another distribution; "
                "leave it out, or serve the policy with another engine such as vLLM"
            )


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
