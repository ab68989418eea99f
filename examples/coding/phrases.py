"""What the small functions can do: in words, as Python text, and as callables.

A function has three parts, each from a table. For lists and strings: which items, what happens to each, how they are reduced.
For two numbers: a term of the first, a term of the second, how they are joined.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part of what a function does."""

    name: str
    wordings: tuple[str, ...]
    """``{}`` is what the wording is about, ``{k}`` the part's number or letter."""
    code: str
    """``{}`` is the code it is about (in parts that have one), ``{k}`` as in the wordings."""
    does: Callable[..., Any]
    """``does(value, k)``, or ``does(left, right)`` if the part joins two terms."""


@dataclass(frozen=True)
class Family:
    """Functions of one kind of argument."""

    name: str
    signature: str
    parts: tuple[tuple[Part, ...], ...]
    """Three tables: a function has one part from each."""
    parameters: tuple[Any, ...]
    """Possible values of ``k``."""
    item: str = ""
    """The loop of a comprehension; empty for two numbers."""

    def wording(self, rng: random.Random, parts: tuple[Part, ...], ks: tuple[Any, ...]) -> str:
        """Return what the function returns, in words."""
        first, second, third = (
            rng.choice(part.wordings).replace("{k}", str(k)) for part, k in zip(parts, ks, strict=True)
        )
        return third.format(second.format(first)) if self.item else third.format(first, second)

    def code(self, codes: tuple[str, ...]) -> str:
        """Return the whole function, from its three parts as text with ``k`` filled in."""
        first, second, third = codes
        items = f"[{second} {self.item}{first}]"
        return f"def {self.signature}:\n    return " + (
            third.format(items) if self.item else third.format(first, second)
        )

    def call(self, parts: tuple[Part, ...], ks: tuple[Any, ...], arguments: list[Any]) -> Any:
        """Return the function's correct result."""
        first, second, third = parts
        if not self.item:
            x, y = arguments
            return third.does(first.does(x, ks[0]), second.does(y, ks[1]))
        items = arguments[0].split() if self.name == "words" else arguments[0]
        return third.does([second.does(item, ks[1]) for item in items if first.does(item, ks[0])], ks[2])


NUMBERS = Family(
    "numbers",
    "f(xs)",
    (
        (
            Part("any", ("the numbers in xs", "all numbers in xs"), "", lambda x, k: True),
            Part("even", ("the even numbers in xs",), " if x % 2 == 0", lambda x, k: x % 2 == 0),
            Part("odd", ("the odd numbers in xs",), " if x % 2 == 1", lambda x, k: x % 2 == 1),
            Part("positive", ("the positive numbers in xs",), " if x > 0", lambda x, k: x > 0),
            Part("negative", ("the negative numbers in xs",), " if x < 0", lambda x, k: x < 0),
            Part("above", ("the numbers above {k} in xs", "the numbers in xs greater than {k}"),
                 " if x > {k}", lambda x, k: x > k),
            Part("at least", ("the numbers in xs that are at least {k}", "the numbers from {k} up in xs"),
                 " if x >= {k}", lambda x, k: x >= k),
            Part("below", ("the numbers below {k} in xs", "the numbers in xs less than {k}"),
                 " if x < {k}", lambda x, k: x < k),
            Part("at most", ("the numbers in xs that are at most {k}", "the numbers up to {k} in xs"),
                 " if x <= {k}", lambda x, k: x <= k),
            Part("multiples", ("the multiples of {k} in xs", "the numbers in xs divisible by {k}"),
                 " if x % {k} == 0", lambda x, k: x % k == 0),
            Part("other than", ("the numbers in xs other than {k}", "the numbers in xs that are not {k}"),
                 " if x != {k}", lambda x, k: x != k),
        ),
        (
            Part("same", ("{}",), "x", lambda x, k: x),
            Part("squares", ("the squares of {}",), "x * x", lambda x, k: x * x),
            Part("doubles", ("the doubles of {}", "twice {}"), "x * 2", lambda x, k: x * 2),
            Part("negated", ("the negatives of {}", "minus {}"), "-x", lambda x, k: -x),
            Part("halves", ("the halves (rounded down) of {}",), "x // 2", lambda x, k: x // 2),
            Part("absolute", ("the absolute values of {}", "the sizes of {}"), "abs(x)", lambda x, k: abs(x)),
            Part("plus", ("{k} plus {}", "{}, each raised by {k}"), "x + {k}", lambda x, k: x + k),
            Part("minus", ("{}, each lowered by {k}",), "x - {k}", lambda x, k: x - k),
            Part("times", ("{k} times {}", "{}, each times {k}"), "x * {k}", lambda x, k: x * k),
        ),
        (
            Part("sum", ("the sum of {}", "the total of {}"), "sum({})", lambda xs, k: sum(xs)),
            Part("largest", ("the largest of {} or 0", "the maximum of {} or 0"),
                 "max({}, default=0)", lambda xs, k: max(xs, default=0)),
            Part("smallest", ("the smallest of {} or 0", "the minimum of {} or 0"),
                 "min({}, default=0)", lambda xs, k: min(xs, default=0)),
            Part("count", ("how many there are of {}", "the count of {}"), "len({})", lambda xs, k: len(xs)),
            Part("list", ("a list of {}", "{}"), "{}", lambda xs, k: xs),
            Part("ascending", ("{} in ascending order", "a sorted list of {}"), "sorted({})", lambda xs, k: sorted(xs)),
            Part("descending", ("{} in descending order", "{}, the largest first"),
                 "sorted({}, reverse=True)", lambda xs, k: sorted(xs, reverse=True)),
            Part("reversed", ("{} in reverse", "{}, the last one first"), "{}[::-1]", lambda xs, k: xs[::-1]),
        ),
    ),
    tuple(range(2, 10)),
    "for x in xs",
)  # fmt: skip

WORDS = Family(
    "words",
    "f(s)",
    (
        (
            Part("any", ("the words in s", "all words in s"), "", lambda w, k: True),
            Part("longer", ("the words longer than {k} letters in s", "the words in s with more than {k} letters"),
                 " if len(w) > {k}", lambda w, k: len(w) > k),
            Part("shorter", ("the words shorter than {k} letters in s", "the words in s with less than {k} letters"),
                 " if len(w) < {k}", lambda w, k: len(w) < k),
            Part("at least", ("the words in s with at least {k} letters", "the words in s with {k} letters or more"),
                 " if len(w) >= {k}", lambda w, k: len(w) >= k),
            Part("exactly", ("the words in s with exactly {k} letters", "the words of {k} letters in s"),
                 " if len(w) == {k}", lambda w, k: len(w) == k),
            Part("not", ("the words in s that have not {k} letters",), " if len(w) != {k}", lambda w, k: len(w) != k),
        ),
        (
            Part("same", ("{}",), "w", lambda w, k: w),
            Part("upper", ("{} in capitals", "{} in upper case"), "w.upper()", lambda w, k: w.upper()),
            Part("backwards", ("{}, each spelt backwards",), "w[::-1]", lambda w, k: w[::-1]),
            Part("first", ("the first letters of {}", "the initials of {}"), "w[0]", lambda w, k: w[0]),
            Part("last", ("the last letters of {}", "the endings of {}"), "w[-1]", lambda w, k: w[-1]),
            Part("cut", ("{}, each cut to {k} letters", "the first {k} letters of {}"), "w[:{k}]", lambda w, k: w[:k]),
            Part("without", ("{}, each without the first letter",), "w[1:]", lambda w, k: w[1:]),
        ),
        (
            Part("count", ("how many there are of {}", "the count of {}"), "len({})", lambda ws, k: len(ws)),
            Part("list", ("a list of {}", "{}"), "{}", lambda ws, k: ws),
            Part("joined", ("{}, joined by spaces", "a sentence of {}"), '" ".join({})', lambda ws, k: " ".join(ws)),
            Part("run together", ("{}, run together", "one word of {}"), '"".join({})', lambda ws, k: "".join(ws)),
            Part("ascending", ("{} in alphabetical order", "a sorted list of {}"),
                 "sorted({})", lambda ws, k: sorted(ws)),
            Part("reversed", ("{} in reverse", "{}, the last one first"), "{}[::-1]", lambda ws, k: ws[::-1]),
        ),
    ),
    tuple(range(2, 7)),
    "for w in s.split()",
)  # fmt: skip

PAIRS = Family(
    "pairs",
    "f(x, y)",
    (
        (
            Part("x", ("x",), "x", lambda x, k: x),
            Part("twice", ("twice x", "the double of x"), "x * 2", lambda x, k: x * 2),
            Part("square", ("the square of x", "x squared"), "x * x", lambda x, k: x * x),
            Part("half", ("half of x (rounded down)",), "x // 2", lambda x, k: x // 2),
            Part("times", ("{k} times x", "x times {k}"), "x * {k}", lambda x, k: x * k),
            Part("rest", ("the rest of x divided by {k}", "x modulo {k}"), "x % {k}", lambda x, k: x % k),
        ),
        (
            Part("y", ("y",), "y", lambda y, k: y),
            Part("twice", ("twice y", "the double of y"), "y * 2", lambda y, k: y * 2),
            Part("square", ("the square of y", "y squared"), "y * y", lambda y, k: y * y),
            Part("half", ("half of y (rounded down)",), "y // 2", lambda y, k: y // 2),
            Part("times", ("{k} times y", "y times {k}"), "y * {k}", lambda y, k: y * k),
            Part("size", ("the absolute value of y", "the size of y"), "abs(y)", lambda y, k: abs(y)),
        ),
        (
            Part("plus", ("{} plus {}", "the sum of {} and {}"), "{} + {}", lambda a, b: a + b),
            Part("minus", ("{} minus {}", "{} less {}"), "{} - {}", lambda a, b: a - b),
            Part("product", ("the product of {} and {}",), "{} * ({})", lambda a, b: a * b),
            Part("larger", ("the larger of {} and {}", "the maximum of {} and {}"), "max({}, {})", max),
            Part("smaller", ("the smaller of {} and {}", "the minimum of {} and {}"), "min({}, {})", min),
            Part("distance", ("the distance between {} and {}",), "abs({} - ({}))", lambda a, b: abs(a - b)),
            Part("above", ("whether {} is greater than {}",), "{} > {}", lambda a, b: a > b),
        ),
    ),
    tuple(range(2, 10)),
)  # fmt: skip

FAMILIES = (NUMBERS, WORDS, PAIRS)
