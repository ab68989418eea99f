"""Spans of OpenTelemetry and runs of LangSmith as traces: what an agent was given, what it answered, when, in which conversation.

Of OpenTelemetry these vocabularies are read: the GenAI conventions (attributes, and the older events), OpenInference,
OpenLLMetry, and art's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from art_core.types import JsonDict
from art_tasks.traffic.messages import Unreadable, value_of

CONVERSATION = (
    "gen_ai.conversation.id",
    "session.id",
    "langfuse.session.id",
    "traceloop.association.properties.session_id",
)
INPUT = ("art.input", "langfuse.trace.input", "langfuse.observation.input", "input.value", "traceloop.entity.input")
OUTPUT = (
    "art.output",
    "langfuse.trace.output",
    "langfuse.observation.output",
    "output.value",
    "traceloop.entity.output",
)
PROMPT, ANSWER = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM = "gen_ai.system_instructions"
INDEXED = re.compile(r"(?:gen_ai\.(prompt)|llm\.(input_messages))\.(\d+)\.(?:message\.)?(role|content)")
EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")


@dataclass(frozen=True)
class Trace:
    """One run of an agent."""

    id: str
    conversation: str
    time: datetime | None
    input: Any
    """What the root was given; None if it doesn't say."""
    prompt: Any
    """The messages of the first model call, or why they can't be read; None if there are none."""
    output: Any


@dataclass(frozen=True)
class Span:
    """One step of a trace."""

    trace: str
    id: str
    parent: str | None
    time: datetime | None
    conversation: str | None
    input: Any
    prompt: Any
    output: Any


def traces(spans: Iterable[Span]) -> Iterator[Trace]:
    """Yield the traces of spans, in the order of their first ones."""
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace, []).append(span)
    for id, spans in by_trace.items():
        ids = {span.id for span in spans}
        spans.sort(key=lambda span: span.time or datetime.max.replace(tzinfo=UTC))
        root = next((span for span in spans if span.parent not in ids), spans[0])
        called = next((span for span in spans if span.prompt is not None), None)
        last = next((span for span in reversed(spans) if span.prompt is not None and span.output is not None), None)
        # Of a root that is a model call itself, the prompt says it better.
        given = root.input if root.prompt is None else None
        answer = root.output if root.output is not None else last and last.output
        conversation = next((span.conversation for span in spans if span.conversation), id)
        yield Trace(id, conversation, root.time, given, called and called.prompt, answer)


def is_span(value: Any) -> bool:
    """Whether a value is a LangSmith run, a span of the console exporter's, or OTLP."""
    if not isinstance(value, Mapping):
        return False
    return not {"resourceSpans", "batches", "run_type"}.isdisjoint(value) or {"attributes", "context"} <= set(value)


def exported_spans(value: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the spans of an exported value, as ``span_of`` reads them. Raises what a value of another form raises."""
    if "run_type" in value or "context" in value:
        yield value
        return
    for resource in value.get("resourceSpans") or value.get("batches") or ():
        for scope in resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ():
            yield from scope.get("spans") or ()


def span_of(exported: Mapping[str, Any]) -> Span:
    """Return one span. Raises what a value of another form raises."""
    if "run_type" in exported:
        return _of_langsmith(exported)
    listed = exported.get("events") or ()
    if "context" in exported:
        context = exported["context"]
        return _span(
            context.get("trace_id"), context.get("span_id"), exported.get("parent_id"), exported.get("start_time"),
            exported.get("attributes") or {}, [(event.get("name"), event.get("attributes") or {}) for event in listed],
        )  # fmt: skip
    return _span(
        exported.get("traceId"), exported.get("spanId"), exported.get("parentSpanId"), exported.get("startTimeUnixNano"),
        _attributes(exported.get("attributes")), [(it.get("name"), _attributes(it.get("attributes"))) for it in listed],
    )  # fmt: skip


def _span(
    trace: Any,
    id: Any,
    parent: Any,
    time: Any,
    attributes: Mapping[str, Any],
    events: Iterable[tuple[Any, Mapping[str, Any]]],
) -> Span:
    prompt: Any
    try:
        prompt = _prompt(attributes, events)
    except Unreadable as reason:  # its trace may not need it
        prompt = reason
    output = first(attributes, (ANSWER, *OUTPUT))
    if output is None:
        output = attributes.get("gen_ai.completion.0.content", attributes.get("llm.output_messages.0.message.content"))
    return Span(
        str(trace), str(id), str(parent) if parent else None, moment(time), first(attributes, CONVERSATION),
        first(attributes, INPUT), prompt, output,
    )  # fmt: skip


def _prompt(attributes: Mapping[str, Any], events: Iterable[tuple[Any, Mapping[str, Any]]]) -> Any:
    """Return a model call's messages; None if the span is none, or doesn't have them."""
    if attributes.get("gen_ai.operation.name") in ("invoke_agent", "invoke_workflow", "create_agent", "execute_tool"):
        return None
    if (messages := attributes.get(PROMPT)) is not None:
        listed, system = value_of(messages), value_of(attributes.get(SYSTEM))
        if not isinstance(listed, list):
            raise Unreadable("messages that are cut off, or no JSON")
        content = {"parts": system} if isinstance(system, list) else {"content": system}
        return [{"role": "system", **content}, *listed] if system else listed
    found: dict[int, JsonDict] = {}
    for name, value in attributes.items():
        if match := INDEXED.fullmatch(name):
            found.setdefault(int(match[3]), {})[match[4]] = value
    if found:
        return [found[number] for number in sorted(found)]
    said = [{"role": match[1], **fields} for name, fields in events if name and (match := EVENT.fullmatch(name))]
    return [{"role": it["role"], "content": it.get("content")} for it in said] or None


def _of_langsmith(run: Mapping[str, Any]) -> Span:
    metadata = (run.get("extra") or {}).get("metadata") or {}
    conversation = first(metadata, ("session_id", "thread_id", "conversation_id"))
    inputs, is_model = run.get("inputs"), run.get("run_type") in ("llm", "chat_model")
    if is_model and isinstance(inputs, Mapping) and inputs.get("prompts"):
        inputs = [{"role": "user", "content": text} for text in inputs["prompts"][:1]]
    trace = run.get("trace_id") or run.get("id")
    return Span(
        str(trace), str(run.get("id")), str(run["parent_run_id"]) if run.get("parent_run_id") else None,
        moment(run.get("start_time")), str(conversation) if conversation else None,
        inputs, inputs if is_model else None, run.get("outputs"),
    )  # fmt: skip


def _attributes(listed: Any) -> dict[str, Any]:
    """Return OTLP's attributes as a dict."""
    return {it["key"]: _value(it.get("value") or {}) for it in listed or ()}


def _value(value: Mapping[str, Any]) -> Any:
    if "arrayValue" in value:
        return [_value(it) for it in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return _attributes(value["kvlistValue"].get("values"))
    return next(iter(value.values()), None)


def moment(recorded: Any) -> datetime | None:
    """Return a time: ISO 8601, or seconds or nanoseconds since 1970."""
    try:
        if isinstance(recorded, str) and not recorded.isdigit():
            moment = datetime.fromisoformat(recorded)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = float(recorded)
        return datetime.fromtimestamp(
            seconds / 1e9 if seconds > 1e14 else seconds / 1e3 if seconds > 1e11 else seconds, UTC
        )
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of several columns that is there and not null."""
    return next((row[name] for name in names if row.get(name) is not None), None)
