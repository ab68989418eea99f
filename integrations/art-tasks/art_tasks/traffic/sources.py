"""Reads what users asked an agent for: from run folders, and from the files that other systems export."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import plural, task_id, task_input
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.types import JsonDict, Trajectory
from art_tasks.traffic.messages import Unreadable, answer_of, is_chat, shown_of, value_of
from art_tasks.traffic.spans import Span, Trace, exported_spans, first, is_span, moment, span_of, traces

CONVERSATION = ("conversation", "conversation_id", "session_id", "sessionId", "thread_id", "trace_id", "traceId")
TIME = ("time", "timestamp", "start_time", "startTime", "created_at", "createdAt", "created")
INPUT, OUTPUT = ("input", "inputs", "request", "prompt"), ("output", "outputs", "response", "completion")
"""Names of columns in exports, the first that is there counts."""
KNOWN = {"id", *CONVERSATION, *TIME, *INPUT, *OUTPUT, "messages", "conversations"}
NOT_REQUESTS = {"resourceMetrics", "resourceLogs"}
WRONG_FORM = (Unreadable, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Request:
    """What a user asked for once."""

    input: Any
    """For the agent: text, chat messages if there are several, or another JSON value that it was called with."""
    conversation: str
    answer: Any = None
    time: datetime | None = None
    reward: float | None = None
    system: str = ""
    """The system prompt of the model call that it was read from, if it was."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else a task had, for its reward."""


@dataclass
class Traffic:
    """The requests of a source."""

    source: str
    requests: list[Request] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    """Number of those that could not be read, by reason."""
    first_unread: dict[str, str] = field(default_factory=dict)
    """Reason -> where it was met first."""


def read(source: str | Path) -> Traffic:
    """Read a run folder, or a ``.json`` or ``.jsonl`` file.

    Files: OpenTelemetry spans (OTLP as JSON, or the console exporter's), LangSmith runs, rows with an input and an output as
    Langfuse exports them, chat messages, or anything else, which is then the agent's input itself. Raises ConfigError if the
    source can't be opened.
    """
    path, traffic = Path(source).expanduser(), Traffic(str(source))
    if path.is_dir() or path.suffix == ".sqlite":
        _read_store(path, traffic)
    elif path.is_file():
        _read_file(path, traffic)
    else:
        raise ConfigError(
            f"{path} is neither a run folder nor a file; to use Langfuse's traces, import them first: art import langfuse"
        )
    return traffic


def _read_store(path: Path, traffic: Traffic) -> None:
    with Store(path if path.is_file() else store_file(path)) as store:
        rollouts = store.rollouts()
        started = store.started([rollout.rollout_id for rollout in rollouts])
        for rollout in rollouts:
            id = rollout.rollout_id
            with _noting(traffic, f"rollout {id}"):
                request = _of_trajectory(store.trajectory(id))
                time = datetime.fromtimestamp(started[id], UTC) if id in started else None
                traffic.requests.append(replace(request, time=time))


def _of_trajectory(trajectory: Trajectory) -> Request:
    id, calls = trajectory.rollout_id, trajectory.calls
    messages = list(calls[0].request.get("messages") or ()) if calls else []
    fields: dict[str, Any] = {"reward": trajectory.reward, "system": _system(messages)}
    if trajectory.task != id:  # of a gateway's rollout whose client named no task, it is the rollout's name
        task = trajectory.task
        facts = {name: it for name, it in task.items() if name != "input"} if isinstance(task, dict) else {}
        return Request(task_input(task), id, trajectory.output, facts=facts, **fields)
    if not messages:
        raise Unreadable("a rollout without a readable request" if calls else "a rollout without a call")
    answer = trajectory.output
    if answer is None:  # what was said before the user went on
        turns = [sum(message.get("role") == "user" for message in call.request.get("messages") or ()) for call in calls]
        last = [call for call, said in zip(calls, turns, strict=True) if said <= turns[0]][-1]
        answer = None if last.finish_reason == "aborted" else last.response.get("content")
    return Request(asked(messages), id, answer, **fields)


def asked(messages: Sequence[JsonDict]) -> Any:
    """Return what a user asked for: the messages before the first answer, without the agent's own; text if it is only one.

    Raises Unreadable if there is none.
    """
    said = [message for message in messages[: _end_of_question(messages)] if message.get("role") == "user"]
    if not said:
        raise Unreadable("no message of a user")
    content = said[0].get("content")
    return content if len(said) == 1 and isinstance(content, str) else said


def answered(messages: Sequence[JsonDict]) -> Any:
    """Return the last answer before the user went on; None if there is none."""
    rest = messages[_end_of_question(messages) :]
    end = next((i for i, message in enumerate(rest) if message.get("role") == "user"), len(rest))
    return next((it.get("content") for it in reversed(rest[:end]) if it.get("role") == "assistant"), None)


def _end_of_question(messages: Sequence[JsonDict]) -> int:
    own = ("system", "developer", "user")
    return next((i for i, message in enumerate(messages) if message.get("role") not in own), len(messages))


def _system(messages: Sequence[JsonDict]) -> str:
    return "\n".join(
        str(message.get("content")) for message in messages if message.get("role") in ("system", "developer")
    )


def _read_file(path: Path, traffic: Traffic) -> None:
    spans: list[Span] = []
    for where, text in _texts(path):
        with _noting(traffic, where):
            for value in _unwrapped(json.loads(text)):
                with _noting(traffic, where):
                    if not is_span(value):
                        traffic.requests.append(_of_row(value, where))
                        continue
                    for exported in exported_spans(value):
                        with _noting(traffic, where):
                            spans.append(span_of(exported))
    for trace in traces(spans):
        with _noting(traffic, f"trace {trace.id}"):
            traffic.requests.append(_of_trace(trace))


def _texts(path: Path) -> list[tuple[str, str]]:
    """Return places and their texts: the lines, or the whole file if its first line is not a value of its own."""
    try:
        whole = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8; unpack it, or export it as JSON or JSON lines") from error
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(whole.split("\n"), 1) if line.strip()]
    return lines if not lines or _is_json(lines[0][1]) or not _is_json(whole) else [(str(path), whole)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _unwrapped(value: Any) -> list[Any]:
    if isinstance(value, Mapping) and isinstance(value.get("data"), list) and set(value) <= {"data", "meta"}:
        value = value["data"]
    return value if isinstance(value, list) else [value]


def _of_trace(trace: Trace) -> Request:
    """Return what a trace's agent was asked: the input of its root or, if that has none, its first model call's messages."""
    is_cut_off = isinstance(trace.prompt, Unreadable)
    if is_cut_off and trace.input is None:
        raise trace.prompt
    messages = [] if is_cut_off or trace.prompt is None else shown_of(trace.prompt)[0]
    if trace.input is None and not messages:
        raise Unreadable("a trace without an input")
    given = _given(trace.input) if trace.input is not None else asked(messages)
    return Request(given, trace.conversation, _said(trace.output), trace.time, system=_system(messages))


def _of_row(value: Any, where: str) -> Request:
    if not isinstance(value, Mapping):
        if value is None:
            raise Unreadable("null")
        return Request(value, task_id(value))
    if not NOT_REQUESTS.isdisjoint(value):
        raise Unreadable("metrics or logs, not spans")
    if value.get("parentObservationId"):
        raise Unreadable("an inner step of a trace")
    given, answer, time = first(value, INPUT), first(value, OUTPUT), moment(first(value, TIME))
    turns = value.get("messages")
    if said := value.get("conversations"):
        turns = [{"role": it["from"], "content": it["value"]} for it in said]
    if turns:
        given = {"messages": turns}
    rest = {name: it for name, it in value.items() if name not in KNOWN}
    if given is None and not rest:
        raise Unreadable("a row without an input")
    conversation = str(first(value, CONVERSATION) or task_id(rest if given is None else given))
    if given is None:  # the input itself
        return Request(rest, conversation, time=time, facts=rest)
    messages = _messages(value_of(given))
    answer = _said(answer) if answer is not None else answered(messages)
    # A row with a time was exported; one without may be a task, whose other fields are its reward's.
    facts = rest if first(value, TIME) is None else {}
    return Request(_given(given), conversation, answer, time, system=_system(messages), facts=facts)


def _messages(value: Any) -> list[JsonDict]:
    """Return the chat messages of a request or of an agent's input; none if it is something else. Raises Unreadable."""
    named = isinstance(value, Mapping) and "messages" in value
    found = value["messages"] if named else value
    if named and not isinstance(found, list):
        raise Unreadable("messages that aren't a list")
    if not isinstance(found, list) or not found or not (named or is_chat(found)):
        return []
    return shown_of(found)[0]


def _given(recorded: Any) -> Any:
    """Return an agent's input as it is or, if it is a conversation, what the user asked."""
    value = value_of(recorded)
    if isinstance(value, Mapping) and len(value) == 1 and (text := value.get("input")) is not None:
        value = value_of(text)  # LangChain's and OpenInference's name for the only argument
    messages = _messages(value)
    return asked(messages) if messages else value


def _said(recorded: Any) -> Any:
    """Return the text of an answer, or the value itself if it is no message."""
    if recorded is None:
        return None
    value = value_of(recorded)
    if isinstance(value, Mapping) and len(value) == 1 and "output" in value:
        value = value["output"]
    if isinstance(value, Mapping) and (generations := value.get("generations")):
        value = generations[0][0] if isinstance(generations[0], list) else generations[0]
        value = value.get("message") or value.get("text")
        return (_messages([value]) or [{}])[-1].get("content") if isinstance(value, Mapping) else value
    try:
        if messages := _messages(value):
            return messages[-1].get("content")
        if isinstance(value, Mapping) and {"choices", "role", "content"} & set(value):
            return answer_of(value)["content"]
    except Unreadable:
        return value
    return value


class _noting:
    """Counts what can't be read. Exports have any form, so an exception that a malformed one raises isn't a bug of ours."""

    def __init__(self, traffic: Traffic, where: str) -> None:
        self._traffic, self._where = traffic, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, WRONG_FORM):
            return False
        reason = str(error) if isinstance(error, Unreadable) else "not in a form that is known"
        reason = "not JSON" if isinstance(error, json.JSONDecodeError) else reason
        self._traffic.unread[reason] += 1
        self._traffic.first_unread.setdefault(reason, self._where)
        return True


def describe(traffic: Traffic) -> str:
    """Return how much was read, of what time."""
    conversations = len({request.conversation for request in traffic.requests})
    times = sorted(request.time for request in traffic.requests if request.time)
    span = f", {times[0]:%Y-%m-%d} to {times[-1]:%Y-%m-%d}" if times else ""
    untimed = len(traffic.requests) - len(times)
    order = f"; {untimed} without a time, taken as the oldest, in their order" if untimed else ""
    found = f"{plural(len(traffic.requests), 'request')} in {plural(conversations, 'conversation')}"
    return f"{found} of {traffic.source}{span}{order}"
