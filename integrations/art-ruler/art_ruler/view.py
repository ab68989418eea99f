"""A trajectory -> its view, which is what the judge sees of it.

A view has every conversation of the rollout, including sub-agents' and forks'; what a conversation shares with an earlier one
appears once. Rollouts with equal views are judged as one. Reasoning that is separate from the answers is not shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from art_core.types import Call, JsonDict, Trajectory

__all__ = ["NO_IMAGE", "Image", "Item", "Message", "View", "common_start", "lines", "text_of", "view", "view_of"]

NO_IMAGE = "[image]"
"""Placeholder for an image that cannot be shown."""
PLAIN = {"role", "content"}
UNDER = "\n  "
"""Starts each further line of recorded text, so that it can't imitate a message, a call or a heading."""


@dataclass(frozen=True)
class Image:
    """An image in a message."""

    url: str
    detail: str | None = None

    def part(self) -> JsonDict:
        """Return the image as a content part of a chat message."""
        return {"type": "image_url", "image_url": {"url": self.url} | ({"detail": self.detail} if self.detail else {})}


Item = str | Image
Message = tuple[Item, ...]
"""A chat message: text that starts with the role, and images in their places."""


@dataclass(frozen=True)
class View:
    """What the judge sees of one trajectory."""

    start: tuple[Message, ...]
    """The messages of the first call's prompt, which rollouts of one task begin with."""
    conversations: tuple[tuple[str | None, tuple[Message, ...]], ...]
    """(agent, messages) of every conversation that a later one does not continue, in the order of their last calls."""
    end: str
    """The output or the error, if the conversations do not show it."""
    tools: tuple[str, ...]
    """The tools that were offered, each once, as JSON."""

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the view, the same in every process."""
        return hashlib.sha256(repr((self.start, self.conversations, self.end, self.tools)).encode()).hexdigest()

    def own_part(self, shared: int) -> list[Message]:
        """Return the messages to show under this rollout's label, if the first ``shared`` of ``start`` are shown before all."""
        parts: list[Message] = []
        for number, (agent, messages) in enumerate(self.conversations):
            skipped, where = self._shown_before(number, shared)
            if len(self.conversations) > 1:
                whose = f" of {_indented(agent)}" if agent else ""
                parts.append((f"(conversation {number + 1}{whose}{where})",))
            parts += messages[skipped:]
        parts += [(self.end,)] if self.end else []
        return parts or [("(no model call was made)",)]

    def _shown_before(self, number: int, shared: int) -> tuple[int, str]:
        """Return how many messages of a conversation have been shown already, and where."""
        messages = self.conversations[number][1]
        count = shared if messages[:shared] == self.start[:shared] else 0
        where = ", which begins as every run does" if count else ""
        for earlier in range(number):
            common = len(common_start([messages, self.conversations[earlier][1]]))
            if common > count:
                count, where = common, f", which begins with the first {common} messages of conversation {earlier + 1}"
        return count, where


def view(trajectory: Trajectory) -> View:
    """Return what the judge sees of ``trajectory``."""
    conversations: list[tuple[str | None, tuple[Message, ...]]] = []
    start: tuple[Message, ...] | None = None
    for call in trajectory.calls:
        shown = tuple(map(_message, call.messages()))
        start = shown[:-1] if start is None else start
        others = [(agent, messages) for agent, messages in conversations if shown[: len(messages)] != messages]
        conversations = [*others, (call.agent, shown)]
    return View(start or (), tuple(conversations), _end(trajectory), _tools(trajectory.calls))


def view_of(messages: Sequence[JsonDict]) -> View:
    """Return what the judge sees of a conversation that is not from a trajectory."""
    shown = tuple(map(_message, messages))
    return View(shown[:-1], ((None, shown),), "", ())


def common_start(conversations: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """Return the messages that all conversations start with."""
    columns = zip(*conversations, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def lines(messages: Iterable[Message]) -> list[Item]:
    """Return the items of the messages, with a newline between messages."""
    items: list[Item] = []
    for message in messages:
        items += ["\n", *message] if items else message
    return items


def text_of(messages: Iterable[Message]) -> str:
    """Return the messages as text, with placeholders for images."""
    return "".join(NO_IMAGE if isinstance(item, Image) else item for item in lines(messages))


def _message(message: JsonDict) -> Message:
    if message.keys() == PLAIN and isinstance(message["content"], str):  # fast path
        return (f"[{_indented(message['role'])}] {_indented(message['content'])}",)
    role = message.get("role") or "assistant"
    # Frameworks add the assistant's name when they send its answer back; the answer itself has none.
    name = message.get("name") if role != "assistant" else None
    head = _indented(f"[{role}{f' {name}' if isinstance(name, str) else ''}] ")
    calls = [line for call in message.get("tool_calls") or () if (line := _tool_call(call))]
    return _merged([head, *_content(message), *(f"\n{line}" for line in calls)])


def _content(message: JsonDict) -> Iterable[Item]:
    content = message.get("content")
    if isinstance(content, str):
        yield _indented(content)
    elif isinstance(content, list):
        for number, part in enumerate(content):
            yield from (UNDER, _part(part)) if number else (_part(part),)
    if isinstance(message.get("refusal"), str):
        yield _indented(f"(refused: {message['refusal']})")


def _part(part: Any) -> Item:
    if not isinstance(part, dict):
        return _indented(str(part))
    if isinstance(part.get("text"), str):
        return _indented(part["text"])
    kind, image = str(part.get("type", "part")), part.get("image_url")
    if kind == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        return Image(image["url"], image.get("detail") if isinstance(image.get("detail"), str) else None)
    return _indented(f"[{kind.removesuffix('_url')}]")


def _tool_call(call: Any) -> str:
    function = call.get("function") or call.get("custom") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    arguments = _arguments(function.get("arguments", function.get("input", "")))
    return _indented(f"calls {function.get('name')}({arguments})")


def _indented(text: str) -> str:
    return text.replace("\r", "\n").replace("\n", UNDER) if "\n" in text or "\r" in text else text


def _arguments(arguments: Any) -> str:
    """Normalize a tool call's arguments: frameworks reformat them when they send an answer back."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(arguments)


def _merged(items: Iterable[Item]) -> Message:
    """Join adjacent texts."""
    merged: list[Item] = []
    for item in items:
        if isinstance(item, str) and merged and isinstance(merged[-1], str):
            merged[-1] += item
        elif item:
            merged.append(item)
    return tuple(merged)


def _tools(calls: Sequence[Call]) -> tuple[str, ...]:
    offered = (json.dumps(tool, ensure_ascii=False) for call in calls for tool in call.request.get("tools") or ())
    return tuple(dict.fromkeys(offered))


def _end(trajectory: Trajectory) -> str:
    if trajectory.error is not None:
        return _indented(f"(the run failed: {trajectory.error})")
    output = trajectory.output
    if isinstance(output, dict):
        output = _own_state(output, _input(trajectory.task)) or None
    if output is None or (isinstance(output, str) and output == _last_answer(trajectory)):
        return ""
    try:
        return f"(the run returned: {json.dumps(output, ensure_ascii=False, default=_fields)})"
    except (TypeError, ValueError, RecursionError):
        return ""  # a framework's objects, whose contents are in the conversations


def _last_answer(trajectory: Trajectory) -> Any:
    return trajectory.calls[-1].response.get("content") if trajectory.calls else None


def _input(task: Any) -> dict[str, Any]:
    task_input = task.get("input") if isinstance(task, dict) else None
    return task_input if isinstance(task_input, dict) else {}


def _own_state(state: dict[str, Any], task_input: dict[str, Any]) -> dict[str, Any]:
    """Return a graph's state without its messages, which are in the conversations, and without its input."""
    return {
        name: value for name, value in state.items() if name != "messages" and not _same(value, task_input.get(name))
    }


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, str | int | float) and type(value) is type(other) and value == other


def _fields(value: object) -> Any:
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError
