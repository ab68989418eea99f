"""Sections that together are too long -> sections that fit. Knows nothing about what they say.

The rule: a section keeps its whole text as long as it is no longer than a length that is the same for all sections; of a longer
one the middle is left out, and a mark says how much. That length is the largest with which everything fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_ruler.view import Image, Item

__all__ = ["MARK", "estimate", "fitted"]

BYTES_PER_TOKEN = 3
"""Fewer than tokenizers need for English (about 4) and for code: an estimate that errs on the safe side."""
IMAGE = 1500
"""Tokens; what large pictures are charged with by most providers."""
MARK = "\n[... {} left out here ...]\n"


def estimate(items: Sequence[Item]) -> int:
    """Return about how many tokens the items are."""
    return sum(map(_tokens, items))


def fitted(sections: Sequence[Sequence[Item]], tokens: int) -> list[list[Item]]:
    """Return the sections, the longest ones without their middles, with about ``tokens`` tokens in all."""
    lengths = [estimate(section) for section in sections]
    if sum(lengths) <= tokens:
        return [list(section) for section in sections]
    most = _level(lengths, tokens)
    return [_without_middle(it, most) if n > most else list(it) for it, n in zip(sections, lengths, strict=True)]


def _tokens(item: Item) -> int:
    if isinstance(item, Image):
        return IMAGE
    size = len(item) if item.isascii() else len(item.encode("utf-8", "replace"))
    return -(-size // BYTES_PER_TOKEN)


def _level(lengths: Sequence[int], total: int) -> int:
    """Return the largest length to which all may be cut for their sum to be at most ``total``."""
    left = max(0, total)
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _without_middle(section: Sequence[Item], tokens: int) -> list[Item]:
    head, tail = _first(section, tokens - tokens // 2), _first(section[::-1], tokens // 2, backwards=True)[::-1]
    images = sum(isinstance(it, Image) for it in section) - sum(isinstance(it, Image) for it in (*head, *tail))
    characters = _characters(section) - _characters(head) - _characters(tail)
    gone = f"{characters} characters" + (f" and {images} images" if images else "")
    return [*head, MARK.format(gone), *tail]


def _first(section: Sequence[Item], tokens: int, *, backwards: bool = False) -> list[Item]:
    """Return the first items with at most so many tokens; of the text that does not fit whole, the part that does."""
    taken: list[Item] = []
    for item in section:
        size = _tokens(item)
        if size > tokens:
            if isinstance(item, str):
                taken.append(_part(item, tokens, backwards))
            break
        taken.append(item)
        tokens -= size
    return taken


def _part(text: str, tokens: int, backwards: bool) -> str:
    data, size = text.encode("utf-8", "replace"), tokens * BYTES_PER_TOKEN
    kept = data[len(data) - size :] if backwards else data[:size]
    return kept.decode("utf-8", "ignore")


def _characters(items: Sequence[Item]) -> int:
    return sum(len(it) for it in items if isinstance(it, str))
