"""Other texts in place of an agent's own: substituted in its requests as they arrive, so that what is recorded was shown."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from art_core.capture import CHAT, Dialect
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins
from art_core.types import JsonDict
from art_gepa.components import INSTRUCTIONS


@dataclass(frozen=True)
class Change:
    """One text in place of another."""

    component: str
    find: str
    replace: str
    tool: str | None = None
    """The tool whose description it is; None for system prompts."""


def edited(request: JsonDict, changes: Iterable[Change]) -> JsonDict:
    """Return a chat request with the changes in its system prompts and tool descriptions. Names and schemas stay."""
    changes = tuple(changes)
    prompts = [it for it in changes if it.tool is None]
    described = {(it.tool, it.find): it.replace for it in changes if it.tool is not None}
    request = dict(request)
    if prompts and request.get("messages"):
        request["messages"] = [_message(it, prompts) for it in request["messages"]]
    if described and request.get("tools"):
        request["tools"] = [_tool(it, described) for it in request["tools"]]
    return request


def _message(message: JsonDict, changes: Iterable[Change]) -> JsonDict:
    if message.get("role") not in INSTRUCTIONS:
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": replaced(content, changes)}
    parts = [
        {**it, "text": replaced(it["text"], changes)} if isinstance(it.get("text"), str) else it for it in content or ()
    ]
    return {**message, "content": parts}


def replaced(text: str, changes: Iterable[Change]) -> str:
    """Return the text with the changes. The longest is made first, and what one has put there is not searched again."""
    pieces: list[tuple[str, bool]] = [(text, False)]
    for change in sorted(changes, key=lambda it: -len(it.find)):
        split: list[tuple[str, bool]] = []
        for piece, done in pieces:
            if done:
                split.append((piece, done))
                continue
            for number, rest in enumerate(piece.split(change.find)):
                split += [(change.replace, True)] * (number > 0) + [(rest, False)]
        pieces = split
    return "".join(piece for piece, _ in pieces)


def _tool(tool: JsonDict, described: Mapping[tuple[str | None, str], str]) -> JsonDict:
    function = tool.get("function") or {}
    text = described.get((function.get("name"), function.get("description") or ""))
    return tool if text is None else {**tool, "function": {**function, "description": text}}


def write(file: Path, changes: Iterable[Change]) -> None:
    """Write a file of changes, at once: whoever reads it meanwhile reads the one before."""
    new = file.with_suffix(".new")
    new.write_text(
        json.dumps({"changes": [asdict(it) for it in changes]}, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )
    os.replace(new, file)


def read(file: Path) -> tuple[Change, ...]:
    """Return the changes of a file. Raises ConfigError if it is none."""
    try:
        return tuple(Change(**it) for it in json.loads(file.read_text("utf-8"))["changes"])
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}; art optimize writes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of prompts ({error}); art optimize writes one") from error


class Current:
    """The changes that a file has at the time. The search writes it between its rollouts, and other processes read it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: tuple[int, tuple[Change, ...]] = (0, ())

    def changes(self) -> tuple[Change, ...]:
        """Return them. Raises ConfigError if the file is gone or spoilt."""
        try:
            written = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            written = 0
        if written != self._known[0] or not written:
            self._known = written, read(self._file)
        return self._known[1]


class Prompted(Dialect):
    """A dialect whose requests get the changes that a file has at the time."""

    def __init__(self, dialect: Dialect, file: Path) -> None:
        self._dialect, self._current = dialect, Current(file)
        self.media_type, self.counts_tokens = dialect.media_type, dialect.counts_tokens

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request with the changes."""
        return edited(self._dialect.to_chat(body), self._current.changes())

    def agent(self, headers: Mapping[str, str]) -> str | None:
        """Return what the dialect returns."""
        return self._dialect.agent(headers)

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return what the dialect returns."""
        return self._dialect.from_chat(body, completion)

    def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield what the dialect yields."""
        return self._dialect.stream_from_chat(body, chunks)

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return what the dialect returns."""
        return self._dialect.error(message, status, code)

    def error_event(self, message: str, status: int, code: str | None) -> str | bytes:
        """Return what the dialect returns."""
        return self._dialect.error_event(message, status, code)


class WithPrompts(Plugins):
    """The installed plugins, with the changes of a file in every request: ``art.train(..., plugins=WithPrompts(file))``."""

    def __init__(self, file: str | Path, *extra: object) -> None:
        super().__init__(*extra)
        self.file = Path(file).absolute()
        read(self.file)

    def registered(self, hook: str) -> dict[str, Any]:
        """Return what is registered; dialects apply the changes."""
        found = super().registered(hook)
        if hook != "register_dialects":
            return found
        return {path: Prompted(it, self.file) for path, it in {CHAT: Dialect(), **found}.items()}

    def offer(self, hook: str, name: str) -> Any:
        """Return what is registered; the live engine applies the changes."""
        found = super().offer(hook, name)
        if (hook, name) != ("register_engines", "live"):
            return found
        from art_gepa.live import PromptedLive

        return replace(found, thing=PromptedLive(found.thing, self.file))
