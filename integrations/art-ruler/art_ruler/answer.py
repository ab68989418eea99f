"""The judge's text -> scores by label, or a named fault. Nothing is guessed."""

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
"""JSON schema of an answer, for judges with structured output."""
LONGEST = 200_000
"""Most characters in an answer: more than any real one, and few enough for a quick search for JSON in prose."""
MOST_ATTEMPTS, MOST_READ = 1000, 10 * LONGEST
"""Failed attempts to parse JSON, and characters read in them, after which the search ends: it could take minutes."""
BEGIN = re.compile(r'\{\s*["}]')
NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+")


class Fault(ValueError):
    """Why an answer cannot be used, worded for the judge."""

    def __init__(self, words: str, kind: str = "") -> None:
        super().__init__(words)
        self.kind = kind or words
        """The same without labels, which differ in every question; for people, and for counting."""


@dataclass(frozen=True)
class Scored:
    """One rollout's score in [0, 1], and the judge's explanation."""

    score: float
    explanation: str


def read_scores(text: str, labels: Sequence[str]) -> dict[str, Scored]:
    """Return the score of every label. Raises Fault unless the answer scores each label exactly once."""
    scores: dict[str, Scored] = {}
    for entry in _entries(text):
        if not isinstance(entry, dict):
            raise Fault("an entry of scores is not a JSON object")
        label = str(entry.get("trajectory_id", "")).strip()
        if label not in labels:
            raise Fault(
                f"there is no trajectory_id {label[:40]!r}", "a trajectory_id is none of those that were asked for"
            )
        if label in scores:
            raise Fault(
                f"the trajectory_id {label!r} is given more than once", "a trajectory_id is given more than once"
            )
        scores[label] = Scored(_score(entry.get("score"), label), str(entry.get("explanation", "")))
    missing = [label for label in labels if label not in scores]
    if missing:
        raise Fault(
            f"no score is given for {', '.join(missing)}", f"{len(missing)} of {len(labels)} scores are missing"
        )
    return scores


def _score(value: Any, label: str) -> float:
    # float() strips fewer kinds of white space than str.strip().
    digits = value.strip() if isinstance(value, str) else ""
    number = float(digits) if NUMBER.fullmatch(digits) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:  # NaN fails too
        what = f"{str(value)[:40]!r}, not a number from 0 to 1"
        raise Fault(f"the score of {label} is {what}", f"a score is {what}")
    return float(number)


def _entries(text: str) -> list[Any]:
    if len(text) > LONGEST:
        raise Fault(f"the answer is longer than {LONGEST} characters")
    objects = list(_objects(text.rpartition("</think>")[2]))
    loose = [each for each in objects if "trajectory_id" in each]
    lists = [each["scores"] for each in objects if isinstance(each.get("scores"), list) and "trajectory_id" not in each]
    # Entries count without the object around them too: read_scores checks that every id occurs exactly once.
    entries = lists[0] if lists else loose
    if any(other != entries for other in lists) or any(entry not in entries for entry in loose):
        raise Fault("the answer holds several JSON objects with different scores")
    if not entries:
        raise Fault('the answer holds no complete JSON object with a list "scores"')
    return entries


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in ``text``, and skip what is around them."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    position, attempts, read = 0, 0, 0
    while begin := BEGIN.search(text, position):
        try:
            value, position = decoder.raw_decode(text, begin.start())
        except Fault:
            raise
        except RecursionError as error:
            raise Fault("the answer's JSON is nested too deeply") from error
        except ValueError as error:
            position = begin.start() + 1  # a brace in prose
            attempts, read = attempts + 1, read + getattr(error, "pos", position) - begin.start()
            if attempts > MOST_ATTEMPTS or read > MOST_READ:
                raise Fault("the answer is broken JSON all over") from error
        else:
            yield value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise Fault("a JSON object holds the same key twice")
    return value
