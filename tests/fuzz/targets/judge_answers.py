"""What a judge answers -> a score for every run, or a fault that says what is wrong (``art_ruler``)."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

from art_ruler.answer import LONGEST, NUMBER, Fault, Scored, read_scores
from art_ruler.judge import JudgeError
from art_ruler.openai_server import OpenAIServer
from fuzz.choices import Choices, changed, spell, spelled, written

LABELS = ("bcdfg", "hjkmn", "pqrst")
GOOD = {"scores": [{"trajectory_id": it, "explanation": "e", "score": place / 2} for place, it in enumerate(LABELS)]}
COMPLETION = {
    "choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
ENTRIES = tuple(json.dumps(entry) for entry in GOOD["scores"])
PIECES = (
    "\n", "é", '{"scores": [', "]}", *ENTRIES, '{"trajectory_id": "bcdfg", ', '"trajectory_id": ', '"explanation": ',
    '"score": ',
    '"bcdfg"', '"hjkmn"', '"pqrst"', "0.5", "1e400", "NaN", "-0.0", "0" * 40, "9" * 5000, "</think>", "```json\n",
    "```", "[" * 1100,
    '{"a":' * 20, "{" * 9, "\\ud800", "null", "true", '"', '": ', "}, {", '"90%"', "{}", "\u0663", "\ud83d",
    "\x00", " " * 40,
)  # fmt: skip
_LITELLM = SimpleNamespace(
    model_cost={"judge": {}}, cost_per_token=lambda model, prompt_tokens, completion_tokens: (1e-6 * prompt_tokens, 0.0)
)
SERVER = OpenAIServer(_LITELLM, "judge", "http://judge/v1", "key", {}, 1.0)  # type: ignore[arg-type]

SEEDS = [
    b"\x00\x00",
    b"\x00\x02\x01\x00\x03",
    b"\x01\x00",
    b"\x01\x03\x02\x01\x04\x05\x06\x02",
    *(bytes([1, 1, 2, kind, 0]) for kind in range(7)),
    *(
        b"\x02" + spell(text, PIECES)
        for text in (
            json.dumps(GOOD),
            "<think>{}</think>Here:\n```json\n" + ",\n".join(ENTRIES) + "\n```",
            '{"scores": [' + ", ".join(reversed(ENTRIES)) + "], " + ENTRIES[0][1:] + "}",
        )
    ),
]


def one_input(data: bytes) -> None:
    choices = Choices(data)
    match choices.byte() % 3:
        case 0:
            _check_completion(written(changed(COMPLETION, choices)).decode())
        case 1:
            _check_scores(written(changed(GOOD, choices)).decode())
        case _:
            _check_scores(spelled(choices.rest(), PIECES))


def _check_completion(text: str) -> None:
    try:
        answer = SERVER._answer(text)
    except JudgeError as error:
        assert str(error).encode()
        return
    assert isinstance(answer.text, str) and isinstance(answer.stopped, str | None)
    assert answer.cost is None or (math.isfinite(answer.cost) and answer.cost >= 0)
    tokens = answer.input_tokens, answer.output_tokens
    assert tokens == (None, None) or all(type(it) is int and it >= 0 for it in tokens)


def _check_scores(text: str) -> None:
    found = _read(text)
    if isinstance(found, dict):
        assert found.keys() == set(LABELS)
        assert all(type(it.score) is float and 0 <= it.score <= 1 for it in found.values())
        assert all(isinstance(it.explanation, str) for it in found.values())
    if len(text) < LONGEST // 4:
        # Cut at the marks of the text itself, so that nothing is changed but what stands around.
        assert _same(_read(f"Sure:\n{text}\nDone."), found), "prose around an answer changes nothing"
    expected = _by_the_rules(text)
    if expected is not None:
        said = {label: it.score for label, it in found.items()} if isinstance(found, dict) else {}
        assert said == expected, "one JSON object alone is read as the rules say"


def _read(text: str) -> dict[str, Scored] | str:
    try:
        return read_scores(text, LABELS)
    except Fault as fault:
        assert str(fault).encode() and fault.kind.encode()
        assert not any(label in fault.kind for label in LABELS) or "not a number" in fault.kind, (
            "labels are others every time"
        )
        return str(fault)


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, str) == isinstance(other, str) and (isinstance(one, str) or one == other)


def _by_the_rules(text: str) -> dict[str, float] | None:
    """Return the scores that a text of one JSON object gives, {} where it gives none; None for another text."""
    twice = []

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend([True] * (len(dict(pairs)) < len(pairs)))
        return dict(pairs)

    try:
        whole = json.loads(text, object_pairs_hook=plain)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict) or not whole or "</think>" in text or len(text) > LONGEST:
        return None
    entries = whole.get("scores")
    if twice or "trajectory_id" in whole or not isinstance(entries, list):
        return {} if twice else None
    scores: dict[str, float] = {}
    for entry in entries:
        label = str(entry.get("trajectory_id")).strip() if isinstance(entry, dict) else ""
        score = entry.get("score") if isinstance(entry, dict) else None
        if isinstance(score, str) and NUMBER.fullmatch(score.strip()):
            score = float(score.strip())
        if label not in LABELS or label in scores or type(score) not in (int, float) or not 0 <= score <= 1:
            return {}
        scores[label] = score
    return scores if len(scores) == len(LABELS) else {}
