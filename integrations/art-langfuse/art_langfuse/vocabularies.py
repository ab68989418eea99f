"""How observations and what they hold are named: Langfuse's attributes, and OpenTelemetry's GenAI conventions.

Two pure functions of an observation, both for ``spans.make_span``. Knows nothing about sending.
"""

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
"""Of a request, besides what it shows to the model."""
CALL_REWARD = "call_reward"
"""The score of a generation whose call has a reward of its own."""


@dataclass(frozen=True)
class Traced:
    """One run of the agent, and where in training it was made."""

    trajectory: Trajectory
    session: str
    """The run's name."""
    model: str
    """The one that is trained."""
    split: str
    step: int
    advantage: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the run besides what it took and gave."""
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
        """What was said of the run."""
        return {f"note.{name}": said for name, said in self.trajectory.notes.items()}


def langfuse(traced: Traced, it: Observation) -> Attributes:
    """Return Langfuse's attributes. What is the trace's stands on every observation, as its SDK has it."""
    run = traced.trajectory
    found: dict[str, Any] = {
        "langfuse.trace.name": f"art {traced.split}",
        "session.id": traced.session,
        "langfuse.trace.tags": ["art", traced.split, f"step-{traced.step}"],
        "langfuse.environment": os.environ.get("LANGFUSE_TRACING_ENVIRONMENT"),
        "langfuse.observation.type": it.kind,
    }
    if it.number == 0:
        found |= _io(run.task, run.output) | _metadata(traced.facts | traced.notes)
        if run.error:
            found |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": text(run.error)}
    elif it.tool:
        found |= _io(_parsed(it.tool.arguments), it.tool.result) | _metadata({"tool_call_id": it.tool.call_id})
    elif it.call:
        found |= _langfuse_generation(traced, it.call)
    return found


def _langfuse_generation(traced: Traced, call: Call) -> Attributes:
    request = call.request
    shown = {name: request[name] for name in ("messages", "prompt", "tools") if request.get(name)}
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
        **_io(shown if set(shown) != {"messages"} else shown["messages"], dict(call.response)),
        **_metadata(facts),
        "langfuse.observation.model.name": answered_by(traced, call),
        "langfuse.observation.model.parameters": as_json(settings),
        "langfuse.observation.usage_details": json.dumps(
            {"input": len(call.prompt_ids), "output": len(call.sampled_ids)}
        ),
    }


def _io(given: Any, gave: Any) -> dict[str, str]:
    pair = {"langfuse.observation.input": given, "langfuse.observation.output": gave}
    return {name: text(value) for name, value in pair.items() if value is not None}


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    # Langfuse reads every value as JSON, so that "1" and 1 stay apart.
    return {f"langfuse.observation.metadata.{name}": as_json(it) for name, it in facts.items() if it is not None}


def answered_by(traced: Traced, call: Call) -> str:
    """Return the model that answered: the trained one, or where another did, the one that was asked for."""
    return traced.model if call.policy_version >= 0 else str(call.request.get("model") or "other")


def captures_content() -> bool:
    """Whether OpenTelemetry's variable lets out what was said, by anybody; errors and judges quote it."""
    return os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true").strip().lower() != "false"


def failure(run: Trajectory) -> str | None:
    """Return why the run failed; where content stays here, the exception's type only."""
    if run.error is None or captures_content():
        return run.error
    kind = run.error.partition(":")[0]
    return kind if kind.isidentifier() and kind.endswith(("Error", "Exception")) else "failed"


def genai(traced: Traced, it: Observation) -> Attributes:
    """Return the attributes of OpenTelemetry's semantic conventions for generative AI."""
    content = captures_content()
    found: dict[str, Any] = {"gen_ai.provider.name": PROVIDER, "gen_ai.conversation.id": traced.trajectory.rollout_id}
    if it.call:
        return found | _genai_chat(traced, it.call, content)
    if it.tool:
        found |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": text(it.tool.name)}
        found |= {"gen_ai.tool.call.id": text(it.tool.call_id), "gen_ai.tool.type": "function"}
        said = {
            "gen_ai.tool.call.arguments": text(it.tool.arguments),
            "gen_ai.tool.call.result": text(it.tool.result),
        }
        return found | (said if content else {})
    found |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": text(it.name)}
    if it.number == 0:
        facts = traced.facts | (traced.notes if content else {})
        found |= {f"art.{name}": value for name, value in facts.items() if value is not None}
        found["art.session"] = traced.session
        found |= (
            {"art.input": text(traced.trajectory.task), "art.output": text(traced.trajectory.output)} if content else {}
        )
    return found


def _genai_chat(traced: Traced, call: Call, content: bool) -> Attributes:
    request = call.request
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if request.get("prompt") is None else "text_completion",
        "gen_ai.request.model": text(request.get("model") or traced.model),
        "gen_ai.response.model": answered_by(traced, call),
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.request.top_p": request.get("top_p"),
        "gen_ai.request.max_tokens": request.get("max_completion_tokens") or request.get("max_tokens"),
        "gen_ai.response.finish_reasons": ["tool_call" if call.finish_reason == "tool_calls" else call.finish_reason],
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": len(call.sampled_ids),
        "gen_ai.agent.name": call.agent,
        "art.policy_version": call.policy_version,
    }
    if content:
        *shown, answer = call.messages()
        found["gen_ai.input.messages"] = as_json([_in_parts(message) for message in shown])
        ended = {**_in_parts(answer), "finish_reason": found["gen_ai.response.finish_reasons"][0]}
        found["gen_ai.output.messages"] = as_json([ended])
        if request.get("tools"):
            found["gen_ai.tool.definitions"] = as_json(request["tools"])
    return found


def _in_parts(message: Mapping[str, Any]) -> JsonDict:
    """Return a chat message as the conventions write it: a role and parts."""
    role, content = str(message.get("role") or "assistant"), message.get("content")
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [answer]}
    return {"role": role, "parts": [*_said(message, content), *_calls(message.get("tool_calls") or ())]}


def _said(message: Mapping[str, Any], content: Any) -> Iterator[JsonDict]:
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
    """Return arguments as JSON values where they are JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
