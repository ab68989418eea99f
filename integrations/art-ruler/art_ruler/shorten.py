"""Shortens sections that together are too long.

All sections share one length limit, the largest with which everything fits. A section up to the limit stays whole; a longer one
loses its middle, and a mark says how much was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from art_core.types import JsonDict
from art_ruler.view import Image, Item

__all__ = ["MARK", "estimate", "estimate_of", "fitted"]

BYTES_PER_TOKEN = 3
"""A safe estimate: below the average of tokenizers for English (about 4) and for code."""
IMAGE = 1500
"""Tokens that most providers charge for a large image."""
MARK = "\n[... {} left out here ...]\n"


def estimate(items: Sequence[Item]) -> int:
    """Return the approximate number of tokens in the items."""
    return sum(map(_tokens, items))


def estimate_of(messages: Iterable[JsonDict]) -> int:
    """Return the approximate number of tokens in chat messages."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content))
    return sum(_tokens(part["text"]) if "text" in part else IMAGE for part in parts)


def fitted(sections: Sequence[Sequence[Item]], tokens: int) -> list[list[Item]]:
    """Return the sections, the longest without their middles, in about ``tokens`` tokens altogether."""
    lengths = [estimate(section) for section in sections]
    if sum(lengths) <= tokens:
        return [list(section) for section in sections]
    limit = _limit(lengths, tokens)
    return [
        _without_middle(section, limit) if length > limit else list(section)
        for section, length in zip(sections, lengths, strict=True)
    ]


def _tokens(item: Item) -> int:
    if isinstance(item, Image):
        return IMAGE
    size = len(item) if item.isascii() else len(item.encode("utf-8", "replace"))
    return -(-size // BYTES_PER_TOKEN)


def _limit(lengths: Sequence[int], total: int) -> int:
    """Return the largest length to which all may be cut for their sum to be at most ``total``."""
    remaining = max(0, total)
    for index, length in enumerate(sorted(lengths)):
        share = remaining // (len(lengths) - index)
        if length > share:
            return share
        remaining -= length
    return max(lengths, default=0)


def _without_middle(section: Sequence[Item], tokens: int) -> list[Item]:
    head, tail = _first(section, tokens - tokens // 2), _first(section[::-1], tokens // 2, backwards=True)[::-1]
    images = sum(isinstance(item, Image) for item in section) - sum(isinstance(item, Image) for item in (*head, *tail))
    characters = _characters(section) - _characters(head) - _characters(tail)
    cut = f"{characters} characters" + (f" and {images} images" if images else "")
    return [*head, MARK.format(cut), *tail]


def _first(section: Sequence[Item], tokens: int, *, backwards: bool = False) -> list[Item]:
    """Return the first items, in at most ``tokens`` tokens; a text that does not fit is cut."""
    items: list[Item] = []
    for item in section:
        size = _tokens(item)
        if size > tokens:
            if isinstance(item, str):
                items.append(_part(item, tokens, backwards))
            break
        items.append(item)
        tokens -= size
    return items


def _part(text: str, tokens: int, backwards: bool) -> str:
    data, size = text.encode("utf-8", "replace"), tokens * BYTES_PER_TOKEN
    part = data[len(data) - size :] if backwards else data[:size]
    return part.decode("utf-8", "ignore")


def _characters(items: Sequence[Item]) -> int:
    return sum(len(item) for item in items if isinstance(item, str))
