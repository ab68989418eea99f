"""The judge's text -> scores by label, or a named fault. Knows nothing about what was asked, and guesses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.types import JsonDict

SCHEMA: JsonDict = {
    "type": "object",
    "properties": {
        "scores": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "trajectory_id": {"type": "string"},
                    "explanation": {"type": "string"},
                    "score": {"type": "number"},
                },
                "required": ["trajectory_id", "explanation", "score"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["scores"],
    "additionalProperties": False,
}
"""The form of an answer, for judges that can be held to one."""
LONGEST = 200_000
"""Characters; no answer to the question is longer, and the search for JSON in prose stays quick."""
PATIENCE = 10 * LONGEST
"""Characters read in vain, after which the search for JSON ends: broken JSON in broken JSON would take minutes."""
NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+")


class Fault(ValueError):
    """Why an answer cannot be used, in words for the judge and for the log."""


@dataclass(frozen=True)
class Scored:
    """One run's score in [0, 1] and what the judge says about it."""

    score: float
    explanation: str


def read_scores(text: str, labels: Sequence[str]) -> dict[str, Scored]:
    """Return the score of every label. Raises Fault where the answer leaves any of them open."""
    found: dict[str, Scored] = {}
    for entry in _entries(text):
        if not isinstance(entry, dict):
            raise Fault("an entry of scores is not a JSON object")
        label = str(entry.get("trajectory_id", "")).strip()
        if label not in labels:
            raise Fault(f"there is no trajectory_id {label[:40]!r}")
        if label in found:
            raise Fault(f"the trajectory_id {label!r} is given more than once")
        found[label] = Scored(_score(entry.get("score"), label), str(entry.get("explanation", "")))
    missing = [label for label in labels if label not in found]
    if missing:
        raise Fault(f"no score is given for {', '.join(missing)}")
    return found


def _score(value: Any, label: str) -> float:
    number = float(value) if isinstance(value, str) and NUMBER.fullmatch(value.strip()) else value
    # NaN fails the comparison too.
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
        raise Fault(f"the score of {label} is {str(value)[:40]!r}, not a number from 0 to 1")
    return float(number)


def _entries(text: str) -> list[Any]:
    if len(text) > LONGEST:
        raise Fault(f"the answer is longer than {LONGEST} characters")
    objects = list(_objects(text.rpartition("</think>")[2]))
    lists = [it["scores"] for it in objects if isinstance(it.get("scores"), list)]
    if any(other != lists[0] for other in lists[1:]):
        raise Fault("the answer holds several JSON objects with different scores")
    # Without the object around them, the entries count all the same: every id is there once, or it is a fault.
    entries = lists[0] if lists else [it for it in objects if "trajectory_id" in it]
    if not entries:
        raise Fault('the answer holds no complete JSON object with a list "scores"')
    return entries


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in ``text``, whatever stands around them."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    start, in_vain = text.find("{"), 0
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except Fault:
            raise
        except RecursionError as error:
            raise Fault("the answer's JSON is nested too deeply") from error
        except ValueError as error:
            end = start + 1  # a brace in prose
            in_vain += getattr(error, "pos", end) - start
            if in_vain > PATIENCE:
                raise Fault("the answer is broken JSON all over") from error
        else:
            yield value
        start = text.find("{", end)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise Fault("a JSON object holds the same key twice")
    return value
