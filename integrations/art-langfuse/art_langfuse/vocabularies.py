"""The attributes of an observation: in Langfuse's vocabulary, and in OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.types import Call, JsonDict, Trajectory
from art_langfuse.observations import Observation
from art_langfuse.spans import Attributes, as_json, text

PROVIDER = "art"
SETTINGS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "tool_choice")
"""Sampling settings of a request."""
CALL_REWARD = "call_reward"
"""The name of the score for a call's own reward."""


@dataclass(frozen=True)
class Traced:
    """A rollout, and its context in training."""

    trajectory: Trajectory
    session: str
    """Name of the training run."""
    model: str
    """The trained model."""
    split: str
    step: int
    advantage: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Metadata of the rollout."""
        versions = sorted({call.policy_version for call in self.trajectory.calls})
        return {
            "rollout_id": self.trajectory.rollout_id,
            "split": self.split,
            "step": self.step,
            "policy_versions": versions or None,
            "advantage": self.advantage,
            "reward": self.trajectory.reward,
        }

    @property
    def notes(self) -> dict[str, str]:
        """The rollout's notes, as metadata."""
        return {f"note.{name}": note for name, note in self.trajectory.notes.items()}


def langfuse(traced: Traced, node: Observation) -> Attributes:
    """Return Langfuse's attributes. The trace's own are on every observation, as with Langfuse's SDK."""
    trajectory = traced.trajectory
    attributes: dict[str, Any] = {
        "langfuse.trace.name": f"art {traced.split}",
        "session.id": traced.session,
        "langfuse.trace.tags": ["art", traced.split, f"step-{traced.step}"],
        "langfuse.environment": os.environ.get("LANGFUSE_TRACING_ENVIRONMENT"),
        "langfuse.observation.type": node.kind,
    }
    if node.number == 0:
        attributes |= _io(trajectory.task, trajectory.output) | _metadata(traced.facts | traced.notes)
        if error := trajectory.error:
            attributes |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": text(error)}
    elif tool := node.tool:
        attributes |= _io(_parsed(tool.arguments), tool.result) | _metadata({"tool_call_id": tool.call_id})
    elif node.call:
        attributes |= _langfuse_generation(traced, node.call)
    return attributes


def _langfuse_generation(traced: Traced, call: Call) -> Attributes:
    request = call.request
    prompt = {name: request[name] for name in ("messages", "prompt", "tools") if request.get(name)}
    settings = {name: request[name] for name in SETTINGS if request.get(name) is not None} | {
        "temperature": call.temperature
    }
    facts = {
        "policy_version": call.policy_version,
        "agent": call.agent,
        "requested_model": request.get("model"),
        "request_id": call.request_id or None,
        "choice": call.choice,
        "finish_reason": call.finish_reason,
    }
    return {
        **_io(prompt if set(prompt) != {"messages"} else prompt["messages"], dict(call.response)),
        **_metadata(facts),
        "langfuse.observation.model.name": answered_by(traced, call),
        "langfuse.observation.model.parameters": as_json(settings),
        "langfuse.observation.usage_details": json.dumps(
            dict(zip(("input", "output"), call.token_counts() or (), strict=False))
        ),
    }


def _io(input: Any, output: Any) -> dict[str, str]:
    pair = {"langfuse.observation.input": input, "langfuse.observation.output": output}
    return {name: text(value) for name, value in pair.items() if value is not None}


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    # Langfuse parses every value as JSON, which keeps "1" and 1 distinct.
    return {f"langfuse.observation.metadata.{name}": as_json(it) for name, it in facts.items() if it is not None}


def answered_by(traced: Traced, call: Call) -> str:
    """Return the model that answered: the trained model or, if another model did, the requested one."""
    return traced.model if call.policy_version >= 0 else str(call.request.get("model") or "other")


def captures_content() -> bool:
    """Whether OpenTelemetry's variable allows exporting message content, which errors and judges' notes quote as well."""
    return os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true").strip().lower() != "false"


def failure(run: Trajectory) -> str | None:
    """Return why the rollout failed; only the exception's type if content must not be exported."""
    if run.error is None or captures_content():
        return run.error
    kind = run.error.partition(":")[0]
    return kind if kind.isidentifier() and kind.endswith(("Error", "Exception")) else "failed"


def genai(traced: Traced, node: Observation) -> Attributes:
    """Return the attributes of OpenTelemetry's semantic conventions for generative AI."""
    content, trajectory = captures_content(), traced.trajectory
    attributes: dict[str, Any] = {"gen_ai.provider.name": PROVIDER, "gen_ai.conversation.id": trajectory.rollout_id}
    if node.call:
        return attributes | _genai_chat(traced, node.call, content)
    if tool := node.tool:
        attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": text(tool.name)}
        attributes |= {"gen_ai.tool.call.id": text(tool.call_id), "gen_ai.tool.type": "function"}
        if content:
            attributes["gen_ai.tool.call.arguments"] = text(tool.arguments)
            attributes["gen_ai.tool.call.result"] = text(tool.result)
        return attributes
    attributes |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": text(node.name)}
    if node.number == 0:
        facts = traced.facts | (traced.notes if content else {})
        attributes |= {f"art.{name}": value for name, value in facts.items() if value is not None}
        attributes["art.session"] = traced.session
        if content:
            attributes |= {"art.input": text(trajectory.task), "art.output": text(trajectory.output)}
    return attributes


def _genai_chat(traced: Traced, call: Call, content: bool) -> Attributes:
    request = call.request
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if request.get("prompt") is None else "text_completion",
        "gen_ai.request.model": text(request.get("model") or traced.model),
        "gen_ai.response.model": answered_by(traced, call),
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.request.top_p": request.get("top_p"),
        "gen_ai.request.max_tokens": request.get("max_completion_tokens") or request.get("max_tokens"),
        "gen_ai.response.finish_reasons": ["tool_call" if call.finish_reason == "tool_calls" else call.finish_reason],
        **dict(
            zip(("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"), call.token_counts() or (), strict=False)
        ),
        "gen_ai.agent.name": call.agent,
        "art.policy_version": call.policy_version,
    }
    if content:
        *prompt, answer = call.messages()
        attributes["gen_ai.input.messages"] = as_json([_in_parts(message) for message in prompt])
        output = {**_in_parts(answer), "finish_reason": attributes["gen_ai.response.finish_reasons"][0]}
        attributes["gen_ai.output.messages"] = as_json([output])
        if request.get("tools"):
            attributes["gen_ai.tool.definitions"] = as_json(request["tools"])
    return attributes


def _in_parts(message: Mapping[str, Any]) -> JsonDict:
    """Return a chat message in the form of the conventions: a role and parts."""
    role, content = str(message.get("role") or "assistant"), message.get("content")
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [answer]}
    return {"role": role, "parts": [*_content(message, content), *_calls(message.get("tool_calls") or ())]}


def _content(message: Mapping[str, Any], content: Any) -> Iterator[JsonDict]:
    if message.get("reasoning_content"):
        yield {"type": "reasoning", "content": message["reasoning_content"]}
    for part in [content] if isinstance(content, str) else content or ():
        if isinstance(part, Mapping):
            yield {"type": "text", "content": part["text"]} if part.get("type") == "text" else dict(part)
        elif part:
            yield {"type": "text", "content": part}


def _calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[JsonDict]:
    for call in calls:
        function = call.get("function") or {}
        arguments = _parsed(function.get("arguments"))
        yield {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _parsed(arguments: Any) -> Any:
    """Parse arguments if they are JSON; return them unchanged if not."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
