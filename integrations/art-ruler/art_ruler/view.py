"""A trajectory -> what a judge is shown of it. Knows nothing about the question around it or about labels.

Every conversation of the run is there, sub-agents' and forks' too, and what one has in common with an earlier one stands
once. Equal views are one run to the judge. Reasoning that came apart from the answers is not shown.
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
"""Stands for a picture where it cannot be shown."""
PLAIN = {"role", "content"}
UNDER = "\n  "
"""Before each further line of what was recorded, so that no text passes for a message, a call or a heading of ours."""


@dataclass(frozen=True)
class Image:
    """A picture in a message, as the content part that a chat request has for it."""

    url: str
    detail: str | None = None

    def part(self) -> JsonDict:
        """Return the content part of a chat message."""
        return {"type": "image_url", "image_url": {"url": self.url} | ({"detail": self.detail} if self.detail else {})}


Item = str | Image
Message = tuple[Item, ...]
"""A chat message as text, with its role before it, and its images where they stand."""


@dataclass(frozen=True)
class View:
    """What the judge is shown of one trajectory."""

    start: tuple[Message, ...]
    """The messages of the first call's prompt: what runs of one task have in common is found at its beginning."""
    conversations: tuple[tuple[str | None, tuple[Message, ...]], ...]
    """(agent, messages) of every conversation that is not the beginning of a later one, in the order of their last calls."""
    end: str
    """The output or the error, where the conversations do not show it."""
    tools: tuple[str, ...]
    """The tools that were offered, each once, as JSON."""

    @cached_property
    def digest(self) -> str:
        """Stands for the view: hexadecimal, the same in every process."""
        return hashlib.sha256(repr((self.start, self.conversations, self.end, self.tools)).encode()).hexdigest()

    def own_part(self, shared: int) -> list[Message]:
        """Return what stands under the run's own label, where ``shared`` messages of ``start`` stand before all runs."""
        parts: list[Message] = []
        for number, (agent, messages) in enumerate(self.conversations):
            said, where = self._said_before(number, shared)
            if len(self.conversations) > 1:
                whose = f" of {_indented(agent)}" if agent else ""
                parts.append((f"(conversation {number + 1}{whose}{where})",))
            parts += messages[said:]
        parts += [(self.end,)] if self.end else []
        return parts or [("(no model call was made)",)]

    def _said_before(self, number: int, shared: int) -> tuple[int, str]:
        """Return how many messages of a conversation stand further up already, and where."""
        messages = self.conversations[number][1]
        found = shared if messages[:shared] == self.start[:shared] else 0
        where = ", which begins as every run does" if found else ""
        for earlier in range(number):
            common = len(common_start([messages, self.conversations[earlier][1]]))
            if common > found:
                found, where = common, f", which begins with the first {common} messages of conversation {earlier + 1}"
        return found, where


def view(trajectory: Trajectory) -> View:
    """Return what the judge is shown of ``trajectory``."""
    conversations: list[tuple[str | None, tuple[Message, ...]]] = []
    start: tuple[Message, ...] | None = None
    for call in trajectory.calls:
        shown = tuple(map(_message, call.messages()))
        start = shown[:-1] if start is None else start
        longer = [it for it in conversations if shown[: len(it[1])] != it[1]]
        conversations = [*longer, (call.agent, shown)]
    return View(start or (), tuple(conversations), _end(trajectory), _tools(trajectory.calls))


def view_of(messages: Sequence[JsonDict]) -> View:
    """Return what the judge is shown of a conversation that is not a trajectory."""
    shown = tuple(map(_message, messages))
    return View(shown[:-1], ((None, shown),), "", ())


def common_start(conversations: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """Return the messages with which all the conversations begin."""
    columns = zip(*conversations, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def lines(messages: Iterable[Message]) -> list[Item]:
    """Return the messages' items, each message on lines of its own."""
    items: list[Item] = []
    for message in messages:
        items += ["\n", *message] if items else message
    return items


def text_of(messages: Iterable[Message]) -> str:
    """Return the messages as text, with a word for every picture."""
    return "".join(NO_IMAGE if isinstance(item, Image) else item for item in lines(messages))


def _message(message: JsonDict) -> Message:
    if message.keys() == PLAIN and isinstance(message["content"], str):  # most are, and long runs have many
        return (f"[{_indented(message['role'])}] {_indented(message['content'])}",)
    role = message.get("role") or "assistant"
    # Frameworks add an assistant's name when they send its answer back; as it was answered it has none.
    name = message.get("name") if role != "assistant" else None
    head = _indented(f"[{role}{f' {name}' if isinstance(name, str) else ''}] ")
    calls = [line for it in message.get("tool_calls") or () if (line := _tool_call(it))]
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
    asked = call.get("function") or call.get("custom") if isinstance(call, dict) else None
    if not isinstance(asked, dict):
        return ""
    return _indented(f"calls {asked.get('name')}({_arguments(asked.get('arguments', asked.get('input', '')))})")


def _indented(text: str) -> str:
    return text.replace("\r", "\n").replace("\n", UNDER) if "\n" in text or "\r" in text else text


def _arguments(given: Any) -> str:
    """Return a tool call's arguments in one form: frameworks write them anew when they send an answer back."""
    try:
        return json.dumps(json.loads(given) if isinstance(given, str) else given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(given)


def _merged(items: Iterable[Item]) -> Message:
    """Return the items with neighbouring texts made one."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] += item
        elif item:
            found.append(item)
    return tuple(found)


def _tools(calls: Sequence[Call]) -> tuple[str, ...]:
    offered = (json.dumps(tool, ensure_ascii=False) for call in calls for tool in call.request.get("tools") or ())
    return tuple(dict.fromkeys(offered))


def _end(trajectory: Trajectory) -> str:
    if trajectory.error is not None:
        return _indented(f"(the run failed: {trajectory.error})")
    output = trajectory.output
    if isinstance(output, dict):
        output = _own(output, _input(trajectory.task)) or None
    if output is None or (isinstance(output, str) and output == _last_answer(trajectory)):
        return ""
    try:
        return f"(the run returned: {json.dumps(output, ensure_ascii=False, default=_fields)})"
    except (TypeError, ValueError, RecursionError):
        return ""  # objects of a framework: what they hold is in the conversations


def _last_answer(trajectory: Trajectory) -> Any:
    return trajectory.calls[-1].response.get("content") if trajectory.calls else None


def _input(task: Any) -> dict[str, Any]:
    given = task.get("input") if isinstance(task, dict) else None
    return given if isinstance(given, dict) else {}


def _own(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a graph's state has to say: not its messages, which are the conversations, nor what it was given."""
    return {name: it for name, it in state.items() if name != "messages" and not _same(it, given.get(name))}


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, str | int | float) and type(value) is type(other) and value == other


def _fields(value: object) -> Any:
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError
