"""Which texts are the same task, and which are of one kind.

Texts are compared without case, punctuation and spacing. Nearly the same are those whose sets of character triples are similar
(Jaccard) and whose words differ in spelling only, or in a few more or fewer. Texts with different numbers or symbols are never
the same: "refund order 17" and "refund order 18" are two. Kinds are texts that are similar if numbers are disregarded.

Among many texts with the same numbers, candidates come from MinHash with locality-sensitive hashing, which misses a pair at the
default limit in one of 20 million cases (32 bands of 4 rows). Candidates are then compared exactly.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

SAME = 0.8
"""Similarity from which two texts are the same task."""
LEAST = 0.5
"""The smallest limit for which the bands miss few: one pair of 8."""
SPELLING = 0.7
"""Similarity from which two words are one, misspelled."""
MORE_WORDS = 3
"""Words that one of two same texts may have more."""
BANDS, KIND_BANDS = (32, 4), (20, 5)
KIND, SAME_KIND = 0.55, 0.8
FEW = 64
"""Texts that are compared one by one."""
STYLE = re.compile(r"[\s.,;:!?'\"`()\[\]{}\-–—…“”„‘’«»/_~¡¿]+")
"""What is as good as a space, except within a number."""
NUMBER = re.compile(r"(?<![\w.])-(?=\d)|\d+(?:[.,:/-]\d+)*|[^\w\s.,;:!?'\"`()\[\]{}\-–—…“”„‘’«»/~¡¿]")
"""Numbers, the minus before them, and symbols."""
THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
DIGITS = re.compile(r"\d+")
ACCENTS = re.compile("[\u0300-\u036f]")
Signature = tuple[str, ...]


class Found:
    """Texts that were added, among which later ones are looked up."""

    def __init__(self, same: float = SAME) -> None:
        if not LEAST <= same <= 1:
            raise ConfigError(f"the similarity of the same tasks must be between {LEAST:g} and 1, got {same:g}")
        self._same = same
        self._exact: dict[tuple[str, Signature], int] = {}
        self._plain: list[str] = []
        self._triples: list[frozenset[str]] = []
        self._alike: dict[Signature, list[int]] = {}
        """Texts by their numbers and symbols."""
        self._index: dict[Signature, MinHashLSH] = {}
        """Of those with more than ``FEW`` texts."""

    def add(self, text: str) -> None:
        """Add a text; its number is that of the texts before it."""
        number, (plain, signature, triples) = len(self._plain), _reading(text)
        self._exact.setdefault((plain, signature), number)
        self._plain.append(plain)
        self._triples.append(triples)
        alike = self._alike.setdefault(signature, [])
        alike.append(number)
        if len(alike) > FEW:
            new = [number] if signature in self._index else alike
            index = self._index.setdefault(signature, _index(BANDS))
            for each in new:
                index.insert(each, _sketch(self._triples[each], BANDS))

    def exact(self, text: str) -> int | None:
        """Return the number of the first text that says the same but for case, punctuation and spacing."""
        return self._exact.get(_reading(text)[:2])

    def near(self, text: str) -> int | None:
        """Return the number of the most similar text that is nearly the same."""
        plain, signature, triples = _reading(text)
        candidates: Iterable[int] = self._alike.get(signature, ())
        if signature in self._index:
            candidates = self._index[signature].query(_sketch(triples, BANDS))
        similar = [(-_jaccard(triples, self._triples[it]), it) for it in candidates]
        close = (it for likeness, it in sorted(similar) if -likeness >= self._same)
        return next((it for it in close if _misspelled(plain.split(), self._plain[it].split())), None)


def kinds(texts: Sequence[str]) -> list[int]:
    """Return a number for each text, the same for texts of one kind; 1 is the largest kind."""
    masked = [DIGITS.sub("0", _plain(text)) for text in texts]
    distinct = list(dict.fromkeys(masked))
    parents = list(range(len(distinct)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    index = _index(KIND_BANDS)
    sketches = [_sketch(_triples(text), KIND_BANDS) for text in distinct]
    for number, sketch in enumerate(sketches):
        closest = 0.0
        for other in index.query(sketch):
            if root(other) != root(number) or not closest:
                closest = max(closest, likeness := sketch.jaccard(sketches[other]))
                if likeness >= KIND:
                    parents[root(number)] = root(other)
        if closest < SAME_KIND:  # else what is like this text is like that one, and the index stays small
            index.insert(number, sketch)
    roots = dict(zip(distinct, map(root, range(len(distinct))), strict=True))
    ranks = {found: rank for rank, (found, _) in enumerate(Counter(roots[it] for it in masked).most_common(), 1)}
    return [ranks[roots[it]] for it in masked]


@functools.lru_cache(4)  # of a text, all that is asked is asked in a row
def _reading(text: str) -> tuple[str, Signature, frozenset[str]]:
    plain = _plain(text)
    return plain, _signature(text), _triples(plain)


def _plain(text: str) -> str:
    unaccented = ACCENTS.sub("", unicodedata.normalize("NFKD", _visible(text)))
    return STYLE.sub(" ", unicodedata.normalize("NFC", unaccented).casefold()).strip()


def _signature(text: str) -> Signature:
    return tuple(THOUSANDS.sub("", it) for it in NUMBER.findall(unicodedata.normalize("NFKC", _visible(text))))


def _visible(text: str) -> str:
    return "".join(it for it in text if unicodedata.category(it) != "Cf")


def _misspelled(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two texts have the same words in the same order but for their spelling, and few more."""
    more = 0
    for change, begin, end, other_begin, other_end in SequenceMatcher(
        None, words, others, autojunk=False
    ).get_opcodes():
        if change == "replace":
            one, other = "".join(words[begin:end]), "".join(others[other_begin:other_end])
            if SequenceMatcher(None, one, other, autojunk=False).ratio() < SPELLING:
                return False
        elif change != "equal":
            more += end - begin + other_end - other_begin
    return more <= MORE_WORDS


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
    sketch.update_batch([triple.encode("utf-8", "surrogatepass") for triple in triples])
    return sketch
