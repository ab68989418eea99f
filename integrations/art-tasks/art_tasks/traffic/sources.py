"""Reads what users asked an agent for: from run folders, and from the files that other systems export."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import plural, task_input
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.types import JsonDict, Trajectory
from art_tasks.traffic.messages import Unreadable, answer_of, shown_of, value_of
from art_tasks.traffic.spans import Trace, first, moment, traces

CONVERSATION = ("conversation", "conversation_id", "session_id", "sessionId", "thread_id", "trace_id", "traceId", "id")
TIME = ("time", "timestamp", "start_time", "startTime", "created_at", "createdAt", "created")
INPUT, OUTPUT = ("input", "inputs", "request", "prompt"), ("output", "outputs", "response", "completion")
"""Names of columns in exports, the first that is there counts."""
KNOWN = {*CONVERSATION, *TIME, *INPUT, *OUTPUT, "messages"}


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
            f"{path} is neither a run folder nor a file; Langfuse's traces first become one: art import langfuse"
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
    id, reward = trajectory.rollout_id, trajectory.reward
    messages = list(trajectory.calls[0].request.get("messages") or ()) if trajectory.calls else []
    system = _system(messages)
    answer = trajectory.output
    if answer is None and trajectory.calls:
        answer = trajectory.calls[-1].response.get("content")
    if trajectory.task != id:  # of a gateway's rollout whose client named no task, it is the rollout's name
        return Request(task_input(trajectory.task), id, answer, reward=reward, system=system)
    if not messages:
        raise Unreadable("a rollout without a call")
    return Request(asked(messages), id, answer, reward=reward, system=system)


def asked(messages: list[JsonDict]) -> Any:
    """Return what a user asked for: the messages before the first answer, without the agent's own; text if it is only one.

    Raises Unreadable if there is none.
    """
    end = next(
        (i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer", "user")), None
    )
    said = [message for message in messages[:end] if message.get("role") == "user"]
    if not said:
        raise Unreadable("no message of a user")
    content = said[0].get("content")
    return content if len(said) == 1 and isinstance(content, str) else said


def _system(messages: list[JsonDict]) -> str:
    return "\n".join(
        str(message.get("content")) for message in messages if message.get("role") in ("system", "developer")
    )


def _read_file(path: Path, traffic: Traffic) -> None:
    rows: list[tuple[str, Any]] = []
    for where, text in _texts(path):
        with _noting(traffic, where):
            try:
                value = json.loads(text)
            except ValueError as error:
                raise Unreadable("not JSON") from error
            rows += [(where, it) for it in (value if isinstance(value, list) else [value])]
    spans = [value for _, value in rows if isinstance(value, Mapping) and _is_span(value)]
    for trace in traces(spans):
        with _noting(traffic, f"trace {trace.id}"):
            traffic.requests.append(_of_trace(trace))
    for where, value in rows:
        if not (isinstance(value, Mapping) and _is_span(value)):
            with _noting(traffic, where):
                traffic.requests.append(_of_row(value, where))


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield a place and its text: the whole of a .json file, and each line of others."""
    if path.suffix == ".json":
        yield str(path), path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def _is_span(value: Mapping[str, Any]) -> bool:
    return "resourceSpans" in value or "run_type" in value or ("attributes" in value and "context" in value)


def _of_trace(trace: Trace) -> Request:
    """Return what a trace's agent was asked: the input of its root or, if that has none, its first model call's messages."""
    answer = trace.output
    messages: list[JsonDict] = []
    if trace.prompt is not None:
        messages, _ = shown_of(trace.prompt)
    if trace.input is None and not messages:
        raise Unreadable("a trace without an input")
    return Request(
        input=_given(trace.input) if trace.input is not None else asked(messages),
        conversation=trace.conversation,
        answer=_said(answer),
        time=trace.time,
        system=_system(messages),
    )


def _of_row(value: Any, where: str) -> Request:
    if not isinstance(value, Mapping):
        return Request(value, where)
    given, answer, time = first(value, INPUT), first(value, OUTPUT), first(value, TIME)
    if messages := value.get("messages"):
        given = {"messages": messages}
        answer = messages[-1] if answer is None and messages[-1].get("role") == "assistant" else answer
    if given is None:  # the input itself
        if not value or KNOWN & set(value):
            raise Unreadable("a row without an input")
        return Request(dict(value), where)
    # A row with a time was exported; one without may be a task, whose other fields are its reward's.
    facts = {} if time is not None else {name: it for name, it in value.items() if name not in KNOWN}
    system = _system(_messages(value_of(given)))
    conversation = first(value, CONVERSATION) or where
    return Request(_given(given), str(conversation), _said(answer), moment(time), system=system, facts=facts)


def _messages(value: Any) -> list[JsonDict]:
    """Return the chat messages of a request or of an agent's input; none if it is something else."""
    found = value.get("messages") if isinstance(value, Mapping) else value
    if not isinstance(found, list) or not found or not all(isinstance(it, Mapping | list | tuple) for it in found):
        return []
    try:
        return shown_of(found)[0]
    except Unreadable:
        return []


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
    if messages := _messages(value):
        return messages[-1].get("content")
    if isinstance(value, str) or not isinstance(value, Mapping) or not {"choices", "role", "content"} & set(value):
        return value
    try:
        return answer_of(value)["content"]
    except Unreadable:
        return value


class _noting:
    """Counts what can't be read."""

    def __init__(self, traffic: Traffic, where: str) -> None:
        self._traffic, self._where = traffic, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Unreadable):
            return False
        self._traffic.unread[str(error)] += 1
        self._traffic.first_unread.setdefault(str(error), self._where)
        return True


def describe(traffic: Traffic) -> str:
    """Return how much was read, of what time."""
    conversations = len({request.conversation for request in traffic.requests})
    times = sorted(request.time for request in traffic.requests if request.time)
    span = f", {times[0]:%Y-%m-%d} to {times[-1]:%Y-%m-%d}" if times else ""
    return f"{plural(len(traffic.requests), 'request')} in {plural(conversations, 'conversation')} of {traffic.source}{span}"
