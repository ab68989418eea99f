"""Other texts in place of an agent's own: substituted in its requests as they arrive, so that what is recorded was shown."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from art_core.capture import Dialect
from art_core.errors import ConfigError
from art_core.types import JsonDict
from art_gepa.components import INSTRUCTIONS

logger = logging.getLogger("art_gepa")
UNUSED = 20
"""Requests with instructions but none of the texts, after which it is said that they don't fit the agent."""


@dataclass(frozen=True)
class Change:
    """One text in place of another, or the same, which then no other change replaces a part of."""

    component: str
    find: str
    replace: str
    tool: str | None = None
    """The tool whose description it is."""
    role: str | None = None
    """The role of the example message that it is. Otherwise, and without a tool, it is a part of a system prompt."""


@dataclass(frozen=True)
class Edits:
    """Changes, ready to be made."""

    changes: tuple[Change, ...] = ()

    def in_text(self, text: str) -> str:
        """Return an instruction with the changes: the longest first, each once, at whole words, none within another's text."""
        pieces: list[tuple[str, bool]] = [(text, False)]
        instructing = (it for it in self.changes if it.tool is None and it.role is None)
        for change in sorted(instructing, key=lambda it: -len(it.find)):
            pattern = re.compile(rf"(?<!\S){re.escape(change.find)}(?!\S)")
            for place, (piece, done) in enumerate(pieces):
                if not done and (found := pattern.search(piece)):
                    before, after = piece[: found.start()], piece[found.end() :]
                    pieces[place : place + 1] = [(before, False), (change.replace, True), (after, False)]
                    break
        return "".join(piece for piece, _ in pieces)

    def in_content(self, content: Any) -> Any:
        """Return the content of a message with the changes; what has another shape stays."""
        if isinstance(content, str):
            return self.in_text(content)
        if not isinstance(content, list):
            return content
        return [
            {**it, "text": self.in_text(it["text"])} if isinstance(it, dict) and isinstance(it.get("text"), str) else it
            for it in content
        ]

    def in_function(self, function: Any) -> Any:
        """Return a tool's function with its description changed. Names and schemas stay."""
        if not isinstance(function, dict):
            return function
        name, text = function.get("name"), function.get("description")
        new = next(
            (it.replace for it in self.changes if it.tool is not None and (it.tool, it.find) == (name, text)), text
        )
        return function if new == text else {**function, "description": new}

    def in_messages(self, messages: Any) -> Any:
        """Return messages with the changes in those of a system or developer, and in examples."""
        return [self._in_message(it) for it in messages] if isinstance(messages, list) else messages

    def _in_message(self, message: Any) -> Any:
        if not isinstance(message, dict) or "content" not in message:
            return message
        content, role = message["content"], message.get("role")
        if role in INSTRUCTIONS:
            return {**message, "content": self.in_content(content)}
        new = next(
            (it.replace for it in self.changes if it.role is not None and (it.role, it.find) == (role, content)),
            content,
        )
        return message if new == content else {**message, "content": new}

    def in_chat(self, request: JsonDict) -> JsonDict:
        """Return a chat request with the changes in its system prompts and tool descriptions."""
        request = dict(request)
        if self.changes and "messages" in request:
            request["messages"] = self.in_messages(request["messages"])
        if self.changes and isinstance(request.get("tools"), list):
            request["tools"] = [
                {**it, "function": self.in_function(it["function"])}
                if isinstance(it, dict) and "function" in it
                else it
                for it in request["tools"]
            ]
        return request


def write(file: Path, changes: Iterable[Change]) -> None:
    """Write a file of changes, at once: whoever reads it meanwhile reads the one before."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"texts": [asdict(it) for it in changes]}, indent=2, ensure_ascii=False) + "\n", "utf-8")
    os.replace(new, file)


def read(file: Path) -> Edits:
    """Return the changes of a file. Raises ConfigError if it is none."""
    try:
        return Edits(tuple(Change(**it) for it in json.loads(file.read_text("utf-8"))["texts"]))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}; art optimize writes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of prompts ({error}); art optimize writes one") from error


class Fixed:
    """The changes that a file had when the run began."""

    def __init__(self, file: Path) -> None:
        self._file, self._edits = file, read(file)
        self._changed, self._asked = False, 0

    def edits(self) -> Edits:
        """Return them."""
        return self._edits

    def made(self, before: JsonDict, after: JsonDict) -> None:
        """Warn once if the texts don't fit the agent's requests."""
        self._changed = self._changed or before != after
        self._asked += not self._changed
        if self._asked == UNUSED:
            logger.warning(
                "none of the texts of %s was found in the first %d requests, so the agent runs with its own; they were found "
                "for another agent, or with a date in them", self._file, UNUSED,
            )  # fmt: skip


class Current:
    """The changes that a file has at the time. A search writes it between its rollouts, and the serving process reads it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: tuple[int, Edits] = (0, Edits())

    def edits(self) -> Edits:
        """Return them. Raises ConfigError if the file is gone or spoilt."""
        written = self._file.stat().st_mtime_ns if self._file.exists() else 0
        if written != self._known[0] or not written:
            self._known = written, read(self._file)
        return self._known[1]

    def made(self, before: JsonDict, after: JsonDict) -> None:
        """Do nothing: the agent's own texts are changes too."""


class Prompted(Dialect):
    """A dialect whose requests get the changes of a source."""

    def __init__(self, dialect: Dialect, source: Fixed | Current) -> None:
        self.inner, self.source = dialect, source
        self.media_type, self.counts_tokens = dialect.media_type, dialect.counts_tokens

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request with the changes."""
        before = self.inner.to_chat(body)
        after = self.source.edits().in_chat(before)
        self.source.made(before, after)
        return after

    def agent(self, headers: Mapping[str, str]) -> str | None:
        """Return what the dialect returns."""
        return self.inner.agent(headers)

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return what the dialect returns."""
        return self.inner.from_chat(body, completion)

    def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield what the dialect yields."""
        return self.inner.stream_from_chat(body, chunks)

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return what the dialect returns."""
        return self.inner.error(message, status, code)

    def error_event(self, message: str, status: int, code: str | None) -> str | bytes:
        """Return what the dialect returns."""
        return self.inner.error_event(message, status, code)
