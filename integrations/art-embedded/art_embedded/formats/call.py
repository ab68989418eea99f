"""What a format of tool calls is, and what formats share. Knows nothing about one format, tokens, models or requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from art_core.types import JsonDict
from art_embedded.requests import Schema

Before = Literal["nothing", "text", "call"]
"""What an answer has said so far, white space left out: for formats whose calls begin the answer, or follow one another."""
Schemas = Mapping[str, JsonDict]
"""The parameters of the functions that may be called, by name."""


class ToolCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object; letter for letter what was sampled where the format has JSON, because only then does the next prompt
    show the call as it was sampled."""
    identifier: str | None = None
    """Where the format gives calls one."""


class Read(NamedTuple):
    """What the beginning of a text turned out to be."""

    length: int
    """Characters that were read."""
    calls: list[ToolCall] | None
    """None where they are no call, and so are content."""


class Terminals(Protocol):
    """Writes parts of a grammar for one tokenizer, in llguidance's variant of Lark."""

    def marker(self, text: str) -> str:
        """Return ``text``, as the token that stands for it where there is one."""
        ...

    def has(self, text: str) -> bool:
        """Whether one token stands for ``text``."""
        ...

    def text(self, text: str) -> str: ...

    def json(self, schema: Schema) -> str:
        """Return JSON that ``schema`` accepts."""
        ...


class Format(Protocol):
    """How a family of models writes tool calls."""

    markers: tuple[str, ...]
    """Texts that set calls apart: part of the text, also where a tokenizer calls them special."""
    openings: tuple[str, ...]
    """Texts that begin a call wherever they stand; the first is what forced calls begin with. Empty where calls begin the
    answer."""
    begins: str
    """Where there are no ``openings``: a pattern of how a call begins the answer."""
    one_batch: bool
    """Whether all calls of an answer stand together."""

    def find(self, text: str, before: Before) -> int | None:
        """Return where the first call begins, or may turn out to begin; None where that is nowhere in ``text``."""
        ...

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        """Read the call or calls with which ``text`` begins; None where more text is needed, with ``final`` never."""
        ...

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        """Return grammar rules, among them ``body``: all of a batch of calls after the first opening.

        Letter for letter as templates write it. Raises UpstreamError 400 for a function that cannot be called so.
        """
        ...


def find_any(text: str, openings: Sequence[str]) -> int | None:
    """Return where the first of ``openings``, or what may become one at the end, begins in ``text``."""
    places = [place for opening in openings if (place := text.find(opening)) >= 0]
    held = held_back(text, openings)
    return min(places) if places else len(text) - held if held else None


def after_line(openings: Sequence[str]) -> tuple[str, ...]:
    """Return ``openings`` with a line break before them and without.

    For formats whose templates put one there: as part of the content it would come back doubled.
    """
    return (*(f"\n{opening}" for opening in openings), *openings)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may yet become one of ``markers``."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)


def through(text: str, end: str, final: bool) -> Read | None:
    """Read what is no call, through its ``end``."""
    place = text.find(end)
    return Read(place + len(end), None) if place >= 0 else unread(text, final)


def unread(text: str, final: bool) -> Read | None:
    """More text is needed; where there is none, all of it is content."""
    return Read(len(text), None) if final else None


def pattern(text: str) -> str:
    """Return ``text`` as a part of a regular expression in a grammar."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
