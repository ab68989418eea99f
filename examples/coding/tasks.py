"""Small programming tasks from a seed, with tests; training and held-out tasks are disjoint."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from .phrases import FAMILIES, WORDS, Family, Part

REQUESTS = (
    "Write {signature} that returns {what}.",
    "Write a Python function {signature}. It returns {what}.",
    "Define {signature}: return {what}.",
    "I need {signature} to return {what}.",
)
EXAMPLES, HIDDEN_TESTS = 3, 10
"""Tests of a task that the agent may run, and tests that only the reward runs."""
HELD_OUT_SHARE = 4
"""One combination in this many is held out."""
VOCABULARY = """
a an at be by do go he in is it no of on so to we all and day dog far fun map red run sea sky sun old cold fish four game
gold hand high king lake moon road ship snow star tree apple bread chair cloud green house music night river stone table
water autumn bridge candle forest garden island letter market orange window
""".split()  # noqa: SIM905 - words to read, not a column of them
"""The words of sentences in tests."""

Combination = tuple[Family, tuple[Part, ...]]
Test = list[Any]
"""``[arguments, expected]``"""


@functools.cache
def combinations(held_out: bool) -> tuple[Combination, ...]:
    """Return every function on one side of the split, apart from numbers and wording.

    A combination is three parts of a family, such as (at least, squares, sum). Its SHA-256 decides its side, so no combination
    is on both; every single part is on both. The start model was made from the training side only.
    """
    return tuple(it for it in _all_combinations() if (_number(it) % HELD_OUT_SHARE == 0) == held_out)


def training_tasks(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` tasks: ``{"input": {"request": str, "examples": [...]}, "tests": [...]}``."""
    return _tasks(n, random.Random(f"training {seed}"), combinations(held_out=False))


def held_out_tasks(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` tasks of combinations that neither training nor the start model has seen, all different if there are
    enough."""
    return _tasks(n, random.Random(f"held out {seed}"), combinations(held_out=True))


def draw_request(rng: random.Random, combination: Combination) -> tuple[str, tuple[Any, ...]]:
    """Return a wording of the combination, and the number of each part."""
    family, parts = combination
    ks = tuple(rng.choice(family.parameters) for _ in parts)
    what = family.wording(rng, parts, ks)
    return rng.choice(REQUESTS).format(signature=family.signature, what=what), ks


def solution(combination: Combination, ks: tuple[Any, ...]) -> str:
    """Return a correct program."""
    family, parts = combination
    return family.code(tuple(part.code.replace("{k}", str(k)) for part, k in zip(parts, ks, strict=True)))


def _tasks(n: int, rng: random.Random, among: tuple[Combination, ...]) -> list[dict[str, Any]]:
    drawn: list[Combination] = []
    while len(drawn) < n:
        # Families in equal shares, although some have more combinations than others.
        by_family = [[it for it in among if it[0] is family] for family in FAMILIES]
        for family_combinations in by_family:
            rng.shuffle(family_combinations)
        drawn += [it for row in zip(*by_family, strict=False) for it in row]
    return [_task(rng, combination) for combination in drawn[:n]]


def _task(rng: random.Random, combination: Combination) -> dict[str, Any]:
    request, ks = draw_request(rng, combination)
    tests = draw_tests(rng, combination, ks)
    return {"input": {"request": request, "examples": tests[:EXAMPLES]}, "tests": tests[EXAMPLES:]}


def draw_tests(rng: random.Random, combination: Combination, ks: tuple[Any, ...]) -> list[Test]:
    """Return examples and hidden tests, all with different arguments."""
    family, parts = combination
    tests: list[Test] = []
    sizes = iter([3, 4, 5, 0])  # examples are short, because failed ones go into the prompt; one hidden test is empty
    while len(tests) < EXAMPLES + HIDDEN_TESTS:
        arguments = _arguments(rng, family, ks, next(sizes, None))
        if all(arguments != other for other, _ in tests):
            tests.append([arguments, family.call(parts, ks, arguments)])
    return tests


def _arguments(rng: random.Random, family: Family, ks: tuple[Any, ...], size: int | None) -> list[Any]:
    size = rng.randint(4, 8) if size is None else size
    if family is WORDS:
        return [" ".join(rng.choice(VOCABULARY) for _ in range(size))]
    if not family.item:
        return [rng.randint(-12, 12), rng.randint(-12, 12)]
    # Half of the numbers are near the task's own, so that "at least" and "above" differ.
    near = [value for k in ks for value in (k - 1, k, k, k + 1, 2 * k, -k)]
    return [[rng.choice(near) if rng.random() < 0.5 else rng.randint(-12, 12) for _ in range(size)]]


def _all_combinations() -> Iterator[Combination]:
    for family in FAMILIES:
        for parts in product(*family.parts):
            # Counting doesn't depend on what happens to the items.
            if parts[2].name != "count" or parts[1].name == "same":
                yield family, parts


def _number(combination: Combination) -> int:
    family, parts = combination
    text = "/".join([family.name, *(part.name for part in parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
