"""Bytes -> what they choose: JSON values, changes to a good one, texts made of telling pieces.

A fuzzer changes bytes at random and keeps what reaches new code. Here a byte is a choice, so that nearly every change is one
of something that a parser gets to see, and not one more text that is no JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

DEEP, LONG = "<deep>", "<long>"
"""Stand for lists in lists, deeper than Python's own readers go, and for a number of more digits than they take."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**30, "", "a", " ",
    "\x00", "é",
    "\ud800", "0", "1", "-1", "auto", "none", "required", "text", "user", "assistant", "tool", "x" * 2000, [], {},
    [[]], [{}],
    [None], [0], ["a"], {"a": 1}, {"type": "text"}, {"type": "text", "text": "a"}, {"type": 1}, {"": None},
    float("nan"),
    float("inf"), [[[]]], DEEP, LONG,
)  # fmt: skip
"""What a reader may not expect where it stands."""


class Choices:
    """Takes decisions off the front of ``data``; where nothing is left, every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, end: int) -> int:
        """Return a number from 0 to ``end - 1``."""
        return (self.byte() if end <= 256 else 256 * self.byte() + self.byte()) % end

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def some(self) -> bytes:
        """Return up to 255 bytes: the first says how many."""
        size = self.byte()
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """Return all that is left."""
        left, self._at = self._data[self._at :], len(self._data)
        return left

    def cuts(self, length: int) -> list[int]:
        """Return places at which something of this length is cut, the ends among them."""
        return sorted({0, length, *(self.below(length + 1) for _ in range(self.byte() % 8))})


def spelled(data: bytes, pieces: Sequence[str]) -> str:
    """Return a text: a byte below 128 is its ASCII letter, one above it one of ``pieces``."""
    return "".join(chr(byte) if byte < 128 else pieces[(byte - 128) % len(pieces)] for byte in data)


def spell(text: str, pieces: Sequence[str]) -> bytes:
    """Return bytes that ``spelled`` reads as ``text``, for a seed; a letter that is in no piece becomes "?"."""
    found = bytearray()
    while text:
        fits = [piece for piece in pieces[:128] if piece and text.startswith(piece)]
        longest = max(fits, key=len, default="")
        found.append(128 + pieces.index(longest) if longest else ord(text[0]) if ord(text[0]) < 128 else ord("?"))
        text = text[len(longest) or 1 :]
    return bytes(found)


def changed(value: Any, choices: Choices) -> Any:
    """Return a copy of a JSON value with up to seven changes in it."""
    holder = [copy.deepcopy(value)]
    for _ in range(choices.byte() % 8):
        inside, key = choices.pick(list(_places(holder)))
        _change(holder, inside, key, choices)
    return holder[0]


def _change(whole: list[Any], inside: Any, key: Any, choices: Choices) -> None:
    match choices.below(7):
        case 0 | 1:
            inside[key] = copy.deepcopy(choices.pick(ODD))
        case 2:
            inside[key] = spelled(choices.some(), ("\n", "é", '"', "{", "}", "\ud83d"))
        case 3 if inside is not whole:
            del inside[key]
        case 4:  # something else of the same value
            other, place = choices.pick(list(_places(whole)))
            inside[key] = copy.deepcopy(other[place])
        case 5 if isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        case 5:
            inside[spelled(choices.some(), ODD_NAMES)] = inside[key]
        case _:
            inside[key] = [inside[key]]


ODD_NAMES = ("type", "id", "name", "index", "content", "role", "\n", "é")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of everything in a list or a dict, outside in."""
    left = [value]
    while left:
        it = left.pop()
        for key in list(it) if isinstance(it, dict) else range(len(it)) if isinstance(it, list) else ():
            yield it, key
            left.append(it[key])


def written(value: Any) -> bytes:
    """Return JSON as Python writes it: what JSON has no word for (NaN, half a character) is there all the same."""
    text = json.dumps(value).encode()
    return text.replace(b'"<deep>"', b"[" * 1500 + b"]" * 1500).replace(b'"<long>"', b"9" * 5000)
