"""The protocol of tool-call formats, and functions that formats share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from art_core.types import JsonDict
from art_embedded.requests import Schema

Before = Literal["nothing", "text", "call"]
"""The last part of the answer so far, ignoring whitespace: some formats only allow calls at the start or after other calls."""
Schemas = Mapping[str, JsonDict]
"""Function name -> parameters."""


class ToolCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object; if the format uses JSON, exactly the sampled text, so that the next prompt renders the call as sampled."""
    identifier: str | None = None
    """The call's id, if the format has ids."""


class Read(NamedTuple):
    """The result of parsing the beginning of a text."""

    length: int
    """Number of consumed characters."""
    calls: list[ToolCall] | None
    """None: the characters aren't a call, but content."""


class Terminals(Protocol):
    """Writes parts of a grammar in llguidance's variant of Lark, for one tokenizer."""

    def marker(self, text: str) -> str:
        """Return ``text`` as its special token if it has one, else as text."""
        ...

    def has(self, text: str) -> bool:
        """Return whether ``text`` is a single token."""
        ...

    def text(self, text: str) -> str: ...

    def json(self, schema: Schema) -> str:
        """Return the part that matches JSON accepted by ``schema``."""
        ...


class Format(Protocol):
    """How a family of models writes tool calls."""

    markers: tuple[str, ...]
    """Texts that delimit calls; kept when decoding, even if the tokenizer marks them as special."""
    openings: tuple[str, ...]
    """Texts that begin a call anywhere; forced calls begin with the first. Empty if calls are only allowed at the start of an
    answer."""
    begins: str
    """Without ``openings``: a pattern for an answer that begins with a call."""
    one_batch: bool
    """Whether an answer's calls can't be separated by text."""

    def find(self, text: str, before: Before) -> int | None:
        """Return where the first call begins, or may begin given more text; None if nowhere in ``text``."""
        ...

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        """Parse the call or calls that ``text`` begins with; return None if more text is needed, which ``final`` rules out."""
        ...

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        """Return grammar rules that include ``body``: everything after the first opening, exactly as templates write it.

        Raises UpstreamError 400 for a function that the format can't express.
        """
        ...


def find_any(text: str, openings: Sequence[str]) -> int | None:
    """Return where the first of ``openings`` begins in ``text``, or an incomplete one at its end; None if there is none."""
    starts = [start for opening in openings if (start := text.find(opening)) >= 0]
    held = held_back(text, openings)
    return min(starts) if starts else len(text) - held if held else None


def after_line(openings: Sequence[str]) -> tuple[str, ...]:
    """Return ``openings`` with and without a line break before them.

    For formats whose templates add that line break: kept as content, it would be doubled in the next prompt.
    """
    return (*(f"\n{opening}" for opening in openings), *openings)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``markers``."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)


def through(text: str, end: str, final: bool) -> Read | None:
    """Consume text that isn't a call, up to and including ``end``."""
    start = text.find(end)
    return Read(start + len(end), None) if start >= 0 else unread(text, final)


def unread(text: str, final: bool) -> Read | None:
    """Return the result for an incomplete call: None to wait for more text, or with ``final`` all of it as content."""
    return Read(len(text), None) if final else None


def pattern(text: str) -> str:
    """Return ``text`` escaped for a regular expression in a grammar."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
