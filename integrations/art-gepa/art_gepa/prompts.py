"""Replaces an agent's texts in its requests as they arrive, before they are recorded, so the store holds what the model saw."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from art_core.capture import Dialect
from art_core.errors import ConfigError
from art_core.store.run_folder import write_whole
from art_core.types import JsonDict
from art_gepa.components import INSTRUCTIONS

logger = logging.getLogger("art_gepa")
UNUSED = 3
"""Number of requests without any of the texts after which a run warns that the file doesn't fit the agent."""


@dataclass(frozen=True)
class Change:
    """Replaces ``find`` by ``replace``. If they are equal, the text is protected from the other changes."""

    component: str
    find: str
    replace: str
    tool: str | None = None
    """The tool whose description it is."""
    role: str | None = None
    """The role of the example message that it is. Otherwise, and without a tool, it is a part of a system prompt."""


@dataclass(frozen=True)
class Edits:
    """Applies changes to requests."""

    changes: tuple[Change, ...] = ()

    @functools.cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """The parts of system prompts and their new texts, longest first. Parts match whole words only."""
        parts = [change for change in self.changes if change.tool is None and change.role is None]
        parts.sort(key=lambda change: -len(change.find))
        return [(re.compile(rf"(?<!\S){re.escape(change.find)}(?!\S)"), change.replace) for change in parts]

    @functools.cached_property
    def _whole(self) -> dict[tuple[str | None, str | None, str], str]:
        """(tool, role, text) of tool descriptions and examples -> the new text."""
        return {(change.tool, change.role, change.find): change.replace for change in self.changes}

    def in_text(self, text: str) -> str:
        """Return a system prompt with each part replaced once. A replaced part isn't searched again."""
        pieces: list[tuple[str, bool]] = [(text, False)]
        for pattern, new in self._patterns:
            for place, (piece, done) in enumerate(pieces):
                if not done and (match := pattern.search(piece)):
                    before, after = piece[: match.start()], piece[match.end() :]
                    pieces[place : place + 1] = [(before, False), (new, True), (after, False)]
                    break
        return "".join(piece for piece, _ in pieces)

    def in_content(self, content: Any) -> Any:
        """Return a system message's content with its parts replaced; content of an unknown shape is returned unchanged."""
        if isinstance(content, str):
            return self.in_text(content)
        if not isinstance(content, list):
            return content
        return [
            {**part, "text": self.in_text(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]

    def in_function(self, function: Any) -> Any:
        """Return a tool's function with its description replaced. Name and schema don't change."""
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return function
        return self._replaced(function, "description", tool=function["name"])

    def in_messages(self, messages: Any) -> Any:
        """Return messages with the texts of system and developer messages and of examples replaced."""
        return [self._in_message(message) for message in messages] if isinstance(messages, list) else messages

    def _in_message(self, message: Any) -> Any:
        if not isinstance(message, dict) or "content" not in message:
            return message
        if message.get("role") in INSTRUCTIONS:
            return {**message, "content": self.in_content(message["content"])}
        return self._replaced(message, "content", role=message.get("role"))

    def _replaced(self, holder: JsonDict, field: str, *, tool: str | None = None, role: str | None = None) -> JsonDict:
        """Return ``holder`` with the text in ``field`` replaced, if it is a whole tool description or example."""
        text = holder.get(field)
        new = self._whole.get((tool, role, text)) if isinstance(text, str) and (tool or role) else None
        return holder if new is None else {**holder, field: new}

    def in_chat(self, request: JsonDict) -> JsonDict:
        """Return a chat request with all changes applied."""
        request = dict(request)
        if self.changes and "messages" in request:
            request["messages"] = self.in_messages(request["messages"])
        if self.changes and isinstance(request.get("tools"), list):
            request["tools"] = [
                {**tool, "function": self.in_function(tool["function"])}
                if isinstance(tool, dict) and "function" in tool
                else tool
                for tool in request["tools"]
            ]
        return request


def write(file: Path, changes: Iterable[Change]) -> None:
    """Write the changes to a file at once, because the serving process may be reading it."""
    write_whole(
        file, json.dumps({"texts": [asdict(change) for change in changes]}, indent=2, ensure_ascii=False) + "\n"
    )


def read(file: Path) -> Edits:
    """Return the changes that a file holds. Raises ConfigError if it isn't a file of prompts."""
    try:
        return Edits(tuple(Change(**change) for change in json.loads(file.read_text("utf-8"))["texts"]))
    except FileNotFoundError:
        raise ConfigError(f"no such file: {file}; pass the prompts.json of an `art optimize` run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} isn't a file of prompts ({error}); pass the prompts.json of an `art optimize` run"
        ) from error


class Fixed:
    """The changes that a file held when the run began."""

    def __init__(self, file: Path) -> None:
        self._file, self._edits = file, read(file)
        self._matched, self._unmatched = False, 0
        texts = json.dumps([asdict(change) for change in self._edits.changes])
        self.identity = f"those of a file ({hashlib.sha256(texts.encode()).hexdigest()[:8]})"

    def edits(self) -> Edits:
        """Return the changes."""
        return self._edits

    def note(self, before: JsonDict, after: JsonDict) -> None:
        """Warn once if no request contains any of the texts."""
        self._matched = self._matched or before != after
        self._unmatched += not self._matched
        if self._unmatched == UNUSED:
            logger.warning(
                "the first %d requests contain none of the texts of %s, so they keep the agent's own prompts: the file is for "
                "another agent or another part of it, or its texts contain a date", UNUSED, self._file,
            )  # fmt: skip


class Current:
    """The changes that a file holds now. A search rewrites it between rollouts, and the serving process reads it."""

    identity = "a candidate's"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known = (-1, Edits())

    def edits(self) -> Edits:
        """Return the changes. Raises ConfigError if the file is missing or damaged."""
        written = self._file.stat().st_mtime_ns if self._file.exists() else 0
        if written != self._known[0]:
            self._known = written, read(self._file)
        return self._known[1]

    def note(self, before: JsonDict, after: JsonDict) -> None:
        """Do nothing: a candidate may leave every text unchanged."""


class Prompted(Dialect):
    """A dialect that applies the changes of ``source`` to its requests; everything else is delegated to ``inner``."""

    def __init__(self, dialect: Dialect, source: Fixed | Current) -> None:
        self.inner, self.source = dialect, source
        self.media_type, self.counts_tokens = dialect.media_type, dialect.counts_tokens

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request with the changes applied."""
        before = self.inner.to_chat(body)
        after = self.source.edits().in_chat(before)
        self.source.note(before, after)
        return after

    def agent(self, headers: Mapping[str, str]) -> str | None:
        """Delegate to ``inner``."""
        return self.inner.agent(headers)

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Delegate to ``inner``."""
        return self.inner.from_chat(body, completion)

    def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Delegate to ``inner``."""
        return self.inner.stream_from_chat(body, chunks)

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Delegate to ``inner``."""
        return self.inner.error(message, status, code)

    def error_event(self, message: str, status: int, code: str | None) -> str | bytes:
        """Delegate to ``inner``."""
        return self.inner.error_event(message, status, code)
