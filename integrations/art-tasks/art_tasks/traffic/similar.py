"""Which texts are the same task, and which are of one kind.

Texts are compared as the sets of their character triples, without case, punctuation and spacing (Jaccard similarity). Texts whose
numbers differ are never the same task: "refund order 17" and "refund order 18" are two. Kinds are texts that are similar if
numbers are disregarded.

Candidates come from MinHash with locality-sensitive hashing. A pair at the default limit is missed in one of 20 million cases
(32 bands of 4 rows), and candidates are then compared exactly.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

SAME = 0.8
"""Similarity from which two texts are the same task."""
LEAST = 0.5
"""The smallest limit for which the bands miss few: one pair of 8."""
BANDS = (32, 4)
KIND_BANDS = (20, 5)
KIND = 0.55
NUMBERS = re.compile(r"\d+|[-+*/^%=<>×÷−.]+(?=\s*\d)")
"""Numbers, and the signs before them, without which "3 + 5" would be "3 * 5"."""
DIGITS = re.compile(r"\d+")
NOT_WORDS = re.compile(r"[\W_]+")
INVISIBLE = {"Cf", "Mn"}
"""Unicode categories that change nothing that is read: joiners, and accents once they are separate."""


class Found:
    """Texts that were added, among which later ones are looked up."""

    def __init__(self, same: float = SAME) -> None:
        if not LEAST <= same <= 1:
            raise ConfigError(f"the similarity of the same tasks must be between {LEAST:g} and 1, got {same:g}")
        self._same = same
        self._exact: dict[object, int] = {}
        self._numbers: list[tuple[str, ...]] = []
        self._triples: list[frozenset[str]] = []
        self._index = _index(BANDS)

    def add(self, text: str) -> None:
        """Add a text; its number is that of the texts before it."""
        number, triples = len(self._triples), _triples(_plain(text))
        self._exact.setdefault(_key(text), number)
        self._numbers.append(_numbers(text))
        self._triples.append(triples)
        self._index.insert(number, _sketch(triples, BANDS))

    def exact(self, text: str) -> int | None:
        """Return the number of the first text that says the same but for case, punctuation and spacing."""
        return self._exact.get(_key(text))

    def near(self, text: str) -> int | None:
        """Return the number of the most similar text with the same numbers, if it is similar enough."""
        triples, numbers = _triples(_plain(text)), _numbers(text)
        candidates = [it for it in self._index.query(_sketch(triples, BANDS)) if self._numbers[it] == numbers]
        best = max(candidates, key=lambda it: (_jaccard(triples, self._triples[it]), -it), default=None)
        return best if best is not None and _jaccard(triples, self._triples[best]) >= self._same else None


def kinds(texts: Sequence[str]) -> list[int]:
    """Return a number for each text, the same for texts of one kind; 1 is the largest kind."""
    parents = list(range(len(texts)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    index = _index(KIND_BANDS)
    sketches = [_sketch(_triples(DIGITS.sub("0", _plain(text))), KIND_BANDS) for text in texts]
    for number, sketch in enumerate(sketches):
        for other in index.query(sketch):
            if root(other) != root(number) and sketch.jaccard(sketches[other]) >= KIND:
                parents[root(number)] = root(other)
        index.insert(number, sketch)
    roots = [root(number) for number in range(len(texts))]
    ranks = {found: rank for rank, (found, _) in enumerate(Counter(roots).most_common(), 1)}
    return [ranks[found] for found in roots]


def _key(text: str) -> object:
    return _plain(text), _numbers(text)


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(NUMBERS.findall(unicodedata.normalize("NFKC", text)))


def _plain(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text)
    visible = "".join(it for it in decomposed if unicodedata.category(it) not in INVISIBLE)
    return NOT_WORDS.sub(" ", visible.casefold()).strip()


def _triples(plain: str) -> frozenset[str]:
    padded = f" {plain} "
    return frozenset(padded[begin : begin + 3] for begin in range(len(padded) - 2)) or frozenset((padded,))


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def _index(bands: tuple[int, int]) -> MinHashLSH:
    try:
        from datasketch import MinHashLSH
    except ImportError as error:
        raise ConfigError(
            "tasks from traffic need datasketch: pip install -e 'integrations/art-tasks[traffic]' in the checkout of art"
        ) from error
    return MinHashLSH(num_perm=bands[0] * bands[1], params=bands)


def _sketch(triples: frozenset[str], bands: tuple[int, int]) -> MinHash:
    from datasketch import MinHash

    sketch = MinHash(num_perm=bands[0] * bands[1], seed=1)
    sketch.update_batch([triple.encode() for triple in triples])
    return sketch
