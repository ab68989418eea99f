"""Turns an upstream's answer into Calls for the store, and into what the client sees."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from art_core.capture.shape import check_answer
from art_core.errors import UpstreamError
from art_core.types import Call, FinishReason, JsonDict

TOKEN_IDS = frozenset({"prompt_token_ids", "token_ids"})
HIDDEN = TOKEN_IDS | {"policy_version", "logprobs_temperature", "token_logprobs", "forced"}
ANSWER = "chatcmpl-"
"""An answer's id is this prefix and the request's id."""
SAMPLED_FIELDS = ("content", "tool_calls", "reasoning_content", "reasoning")
"""Fields of a message or delta that are made of tokens."""
_FINISH = {reason: reason for reason in get_args(FinishReason)} | {"abort": "aborted", "function_call": "tool_calls"}


def no_token_ids(what: str) -> UpstreamError:
    """Return the error for an answer without exact tokens, because training on guessed ones would be wrong."""
    return UpstreamError(
        f"the upstream returned no token ids ({what}), so this call cannot be recorded; serve the policy with an "
        "engine that returns them; vLLM (0.10.2 or newer) does if a request sets return_token_ids and logprobs",
        status=502,
        code="no_token_ids",
    )


def _numbers(name: str, kind: str, values: Sequence[object]) -> list:
    """Return int32 (``kind`` "i"), int64 ("q") or finite floats ("d"), as stored; UpstreamError for other values."""
    try:
        numbers = array(kind, values).tolist()
    except (TypeError, ValueError, OverflowError) as error:
        raise no_token_ids(f"{name} has invalid values: {error}") from error
    if kind == "d" and not all(map(math.isfinite, numbers)):
        raise no_token_ids(f"{name} has values that aren't finite")
    return numbers


def for_client(answer: JsonDict, recording: Recording | None = None) -> JsonDict:
    """Return a completion or chunk as OpenAI would send it, without the fields that are only for capture.

    Its id becomes ``ANSWER`` and the recorded request's id, so that clients can find its calls in the store. If the request
    has ``return_token_ids``, the ids stay, as with vLLM.
    """
    hidden = HIDDEN - TOKEN_IDS if recording and recording.request.get("return_token_ids") else HIDDEN
    # Some clients read the tier, which engines leave out.
    visible = {key: value for key, value in answer.items() if key not in hidden}
    visible.setdefault("service_tier", None)
    if recording:
        visible["id"] = f"{ANSWER}{recording.request_id}"
    visible["choices"] = [{key: it[key] for key in it if key not in hidden} for it in answer.get("choices") or ()]
    return visible


@dataclass
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    message: JsonDict = field(default_factory=lambda: {"role": "assistant", "content": None})

    def add(self, part: JsonDict) -> None:
        """Add a whole choice, or the next part of a streamed one."""
        index = part.get("index", 0)
        delta = part.get("delta") or {}
        if "message" in part:
            self.message = part["message"]
        else:
            merge_delta(self.message, delta)
        if part.get("token_ids") is None and ("message" in part or any(map(delta.get, SAMPLED_FIELDS))):
            raise no_token_ids(f"choice {index} has no token_ids")
        token_ids, logprobs = part.get("token_ids") or (), part.get("token_logprobs") or ()
        if len(token_ids) != len(logprobs):
            raise no_token_ids(f"choice {index} has {len(token_ids)} token ids and {len(logprobs)} logprobs")
        # Everything is checked before anything is added, so that earlier parts can still be recorded.
        token_ids, logprobs = _numbers("token_ids", "i", token_ids), _numbers("logprobs", "d", logprobs)
        forced = _numbers("forced", "i", part.get("forced") or ())
        if any(not 0 <= position < len(self.token_ids) + len(token_ids) for position in forced):
            raise no_token_ids(f"choice {index} has no tokens at the forced positions {forced}")
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.forced += forced
        self.finish_reason = part.get("finish_reason") or self.finish_reason


@dataclass
class Recording:
    """One request and what was sampled for it: add the completion, or a stream's chunks as they come."""

    request: Mapping[str, object]
    request_id: str
    agent: str | None = None
    thread: str | None = None
    prompt_ids: tuple[int, ...] = ()
    policy_version: int = 0
    temperature: float | None = None
    """The logprobs' temperature, if the upstream reports it; None: the request's."""
    choices: dict[int, _Choice] = field(default_factory=dict)

    def add(self, answer: JsonDict) -> None:
        """Add the completion or the next chunk. Raises UpstreamError (502) if it is malformed or lacks token ids."""
        check_answer(answer)
        if not self.prompt_ids:
            ids = answer.get("prompt_token_ids")
            if not ids:
                raise no_token_ids("prompt_token_ids is missing or empty")
            ids = _numbers("prompt_token_ids", "i", ids)
            [version] = _numbers("policy_version", "q", [answer.get("policy_version", 0)])
            self.prompt_ids, self.policy_version = tuple(ids), version
            self.temperature = answer.get("logprobs_temperature")
        for part in answer.get("choices") or ():
            self.choices.setdefault(part.get("index", 0), _Choice()).add(part)

    def calls(self, *, aborted: bool = False) -> tuple[Call, ...]:
        """Return one Call per choice, ordered by index; none if nothing was sampled yet.

        ``aborted`` marks all of them, because the client didn't get its whole answer. Choices without a finish reason
        are always aborted.
        """
        temperature = self.request.get("temperature") if self.temperature is None else self.temperature
        return tuple(
            Call(
                prompt_ids=self.prompt_ids,
                sampled_ids=tuple(choice.token_ids),
                logprobs=tuple(choice.logprobs),
                policy_version=self.policy_version,
                agent=self.agent,
                thread=self.thread,
                request_id=self.request_id,
                choice=index,
                temperature=1.0 if temperature is None else float(temperature),
                finish_reason=_FINISH.get(choice.finish_reason, "stop")
                if choice.finish_reason and not aborted
                else "aborted",
                forced=tuple(sorted(set(choice.forced))),
                request=self.request,
                response=choice.message,
            )
            for index, choice in sorted(self.choices.items())
        )


def merge_delta(message: JsonDict, delta: JsonDict) -> None:
    """Add a chunk's delta to the message: strings are appended, and tool calls are matched by index."""
    for key, value in delta.items():
        if key == "tool_calls":
            for part in value or ():
                _merge_tool_call(message.setdefault("tool_calls", []), part)
        elif isinstance(value, str) and key != "role":
            before = message.get(key)
            message[key] = before + value if isinstance(before, str) else value
        elif value is not None:
            message[key] = value


def _merge_tool_call(tool_calls: list[JsonDict], part: JsonDict) -> None:
    index = part.get("index", max(len(tool_calls) - 1, 0))
    while len(tool_calls) <= index:
        tool_calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = tool_calls[index]
    call["id"] = part.get("id") or call["id"]
    call["type"] = part.get("type") or call["type"]
    for key, text in (part.get("function") or {}).items():
        call["function"][key] = call["function"].get(key, "") + (text or "")
