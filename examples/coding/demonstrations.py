"""Conversations of a mediocre programmer, from which the start model is made.

Mediocre on purpose: for about half of the parts the slip (off by one, the wrong end, a forgotten default) is more frequent
than the right code. So the model may write the right program, but mostly writes another one, sampled or greedy. Which program
fits the wording is what reinforcement has to find out.
"""

from __future__ import annotations

import random
from typing import Any

from .phrases import Part
from .prompts import complaint, opening
from .tasks import EXAMPLES, Combination, combinations, draw_request, draw_tests

CAREFUL, CARELESS = 0.75, 0.35
"""How often a part is right: an easy one, and one that invites a slip."""
SECOND_TRY_RIGHT = 0.15
"""How often a second try is skilled; otherwise it is as careless as the first."""
SLIPS: dict[str, dict[str, tuple[float, tuple[str, ...]]]] = {
    "numbers": {
        "any": (CAREFUL, (" if x > 0",)),
        "even": (CAREFUL, (" if x % 2 == 1",)),
        "odd": (CARELESS, (" if x % 2 == 0",)),
        "positive": (CARELESS, (" if x >= 0",)),
        "negative": (CAREFUL, (" if x <= 0",)),
        "above": (CARELESS, (" if x >= {k}",)),
        "at least": (CARELESS, (" if x > {k}",)),
        "below": (CARELESS, (" if x <= {k}",)),
        "at most": (CARELESS, (" if x < {k}",)),
        "multiples": (CAREFUL, (" if x % {k}", " if x == {k}")),
        "other than": (CAREFUL, (" if x == {k}",)),
        "same": (CAREFUL, ("x * x", "-x")),
        "squares": (CARELESS, ("x * 2",)),
        "doubles": (CAREFUL, ("x * x",)),
        "negated": (CAREFUL, ("abs(x)",)),
        "halves": (CARELESS, ("x / 2",)),
        "absolute": (CARELESS, ("-x",)),
        "plus": (CAREFUL, ("x - {k}",)),
        "minus": (CARELESS, ("x + {k}",)),
        "times": (CAREFUL, ("x + {k}",)),
        "sum": (CAREFUL, ("len({})",)),
        "largest": (CARELESS, ("max({})",)),
        "smallest": (CARELESS, ("min({})",)),
        "count": (CAREFUL, ("sum({})",)),
        "list": (CAREFUL, ("sorted({})",)),
        "ascending": (CAREFUL, ("{}",)),
        "descending": (CARELESS, ("sorted({})",)),
        "reversed": (CARELESS, ("sorted({}, reverse=True)",)),
    },
    "words": {
        "any": (CAREFUL, (" if len(w) > 1",)),
        "longer": (CARELESS, (" if len(w) >= {k}",)),
        "shorter": (CARELESS, (" if len(w) <= {k}",)),
        "at least": (CARELESS, (" if len(w) > {k}",)),
        "exactly": (CAREFUL, (" if len(w) > {k}",)),
        "not": (CAREFUL, (" if len(w) == {k}",)),
        "same": (CAREFUL, ("w.upper()",)),
        "upper": (CAREFUL, ("w",)),
        "backwards": (CARELESS, ("w[-1]",)),
        "first": (CARELESS, ("w[1]",)),
        "last": (CARELESS, ("w[0]",)),
        "cut": (CAREFUL, ("w[{k}:]",)),
        "without": (CARELESS, ("w[:1]",)),
        "count": (CAREFUL, ("{}",)),
        "list": (CAREFUL, ("sorted({})",)),
        "joined": (CARELESS, ('"".join({})',)),
        "run together": (CAREFUL, ('" ".join({})',)),
        "ascending": (CAREFUL, ("{}",)),
        "reversed": (CARELESS, ("sorted({})",)),
    },
    "pairs": {
        "x": (CAREFUL, ("x * 2",)),
        "y": (CAREFUL, ("y * 2",)),
        "square": (CARELESS, ("{v} * 2",)),
        "twice": (CAREFUL, ("{v} * {v}",)),
        "half": (CARELESS, ("{v} / 2",)),
        "times": (CAREFUL, ("{v} + {k}",)),
        "rest": (CARELESS, ("x // {k}",)),
        "size": (CARELESS, ("-y",)),
        "plus": (CAREFUL, ("{} * ({})",)),
        "minus": (CAREFUL, ("{} + {}",)),
        "product": (CAREFUL, ("{} + {}",)),
        "larger": (CARELESS, ("min({}, {})",)),
        "smaller": (CARELESS, ("max({}, {})",)),
        "distance": (CARELESS, ("{} - ({})",)),
        "above": (CARELESS, ("{} < {}", "{} >= {}")),
    },
}


def draw_program(rng: random.Random, combination: Combination, ks: tuple[Any, ...], *, skilled: bool) -> str:
    """Return a program for the combination: right if ``skilled``, else with the slips of a mediocre programmer."""
    family, parts = combination
    codes = []
    for part, k, variable in zip(parts, ks, ("x", "y", ""), strict=True):
        code = part.code if skilled else _slip(rng, family.name, part)
        codes.append(code.replace("{k}", str(k)).replace("{v}", variable))
    return family.code(tuple(codes))


def converse(rng: random.Random, *, skilled: bool) -> list[dict[str, Any]]:
    """Return one conversation about a training combination, as the agent would have had it."""
    combination = rng.choice(combinations(held_out=False))
    request, ks = draw_request(rng, combination)
    first = draw_program(rng, combination, ks, skilled=skilled)
    messages = [*opening(request), {"role": "assistant", "content": first}]
    failed = None if skilled else failed_example(first, draw_tests(rng, combination, ks)[:EXAMPLES])
    if failed:
        second = draw_program(rng, combination, ks, skilled=rng.random() < SECOND_TRY_RIGHT)
        messages += [{"role": "user", "content": failed}, {"role": "assistant", "content": second}]
    return messages


def failed_example(program: str, examples: list[list[Any]]) -> str | None:
    """Return the agent's feedback on the first example that one of these programs fails, if any."""
    names: dict[str, Any] = {}
    exec(program, names)  # written by this file, not by a model
    for arguments, expected in examples:
        try:
            value = names["f"](*arguments)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            return complaint(arguments, f"raised {type(error).__name__}", expected)
        if repr(value) != repr(expected):
            return complaint(arguments, f"returned {value!r}", expected)
    return None


def _slip(rng: random.Random, family: str, part: Part) -> str:
    right, slips = SLIPS[family][part.name]
    return part.code if rng.random() < right else rng.choice(slips)
