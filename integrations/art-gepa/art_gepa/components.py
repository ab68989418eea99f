"""Finds the texts of an agent that can be optimised: the constant parts of its system prompts, tools and examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from art_core.types import Call

INSTRUCTIONS = ("system", "developer")
"""Roles of messages that instruct the model."""
EXAMPLES = ("user", "assistant")
"""Roles of few-shot messages."""
FEWEST_WORDS = 3
"""Minimum length of a constant part of a template; shorter ones match by chance."""
MOST_TEXTS = 32
"""Maximum number of texts that a template is inferred from."""


@dataclass(frozen=True)
class Component:
    """A text that an agent sends with its calls."""

    name: str
    text: str
    tool: str | None = None
    """The tool that it describes."""
    role: str | None = None
    """The role of the example message that it is. Otherwise, and without a tool, it is a part of a system prompt."""


def components(calls: Iterable[Call]) -> list[Component]:
    """Return the components of the calls, in the order of their first appearance.

    A system prompt that differs between calls is a template, and each part that all of them share is a component. Messages with
    which all conversations of an agent begin are examples. What two agents share is one component, named for the first.
    """
    prompts: dict[tuple[str, int], dict[str, None]] = {}
    tools: dict[str, dict[str, None]] = {}
    conversations: dict[str, list[list[Any]]] = {}
    for call in calls:
        conversations.setdefault(call.agent or "agent", []).append(
            [it for it in call.request.get("messages") or () if it.get("role") not in INSTRUCTIONS]
        )
        for place, text in enumerate(instructions(call.request)):
            prompts.setdefault((call.agent or "agent", place), {})[text] = None
        for name, text in descriptions(call.request):
            tools.setdefault(name, {})[text] = None
    found: dict[tuple[str | None, str], Component] = {}
    for (agent, place), texts in prompts.items():
        name = f"{agent}: system prompt" + (f" {place + 1}" if place else "")
        parts = constant_parts(list(texts)[:MOST_TEXTS])
        for number, part in enumerate(parts, 1):
            found.setdefault((None, part), Component(f"{name}, part {number}" if parts[1:] else name, part))
    for agent, said in conversations.items():
        for number, message in enumerate(examples(said), 1):
            name = f"{agent}: example {number}, {message['role']}"
            found.setdefault(
                (message["role"], message["content"]), Component(name, message["content"], role=message["role"])
            )
    for tool, texts in tools.items():
        if len(texts) == 1:  # a description that changes is made by a program
            [text] = texts
            found.setdefault((tool, text), Component(f"tool {tool}", text, tool))
    return list(found.values())


def examples(conversations: list[list[Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with which all conversations begin, except the last of each and those with tool calls."""
    shared = []
    for messages in zip(*(it[:-1] for it in conversations), strict=False):
        if any(it != messages[0] for it in messages):
            break
        shared.append(messages[0])
    return [
        it
        for it in shared
        if it.get("role") in EXAMPLES and isinstance(it.get("content"), str) and not it.get("tool_calls")
    ]


def instructions(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a chat request's system and developer messages."""
    for message in request.get("messages") or ():
        if message.get("role") in INSTRUCTIONS:
            content = message.get("content")
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            yield from (
                part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            )


def descriptions(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions of a chat request's tools."""
    for tool in request.get("tools") or ():
        function = tool.get("function") or {}
        if function.get("name") and function.get("description"):
            yield function["name"], function["description"]


def constant_parts(texts: list[str]) -> list[str]:
    """Return the runs of words that all texts have in common, in order."""
    if len(texts) == 1:
        return [stripped for text in texts if (stripped := text.strip())]
    parts = [_words(texts[0])]
    for text in texts[1:]:
        words, shared, start = _words(text), [], 0
        for part in parts:
            blocks = SequenceMatcher(None, part, words[start:], autojunk=False).get_matching_blocks()
            shared += [part[block.a : block.a + block.size] for block in blocks if block.size]
            start += max((block.b + block.size for block in blocks if block.size), default=0)
        parts = shared
    joined = ("".join(part).strip() for part in parts)
    return [part for part in joined if len(part.split()) >= FEWEST_WORDS]


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)
