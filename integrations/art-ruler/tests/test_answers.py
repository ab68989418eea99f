"""10,000 broken answers: each ends in scores at the right labels, or in a fault that says what is wrong."""

import json
import random
import re
from collections import Counter

import pytest
from judging import plain

from art_ruler.answer import Fault, read_scores

LABELS = ["bcdfg", "hjkmn", "pqrst", "vwxzb", "cdfgh", "jkmnp", "qrstv", "wxzbc"]
NUMBERS = [
    0,
    1,
    0.5,
    -0.1,
    1.1,
    7.5,
    -3,
    1e-9,
    1e400,
    float("nan"),
    "0.5",
    " 1 ",
    "90%",
    "NaN",
    "",
    None,
    True,
    [0.5],
    {"a": 1},
]
PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\n",
    " ",
    "```",
    "json",
    "score",
    "scores",
    "trajectory_id",
    "null",
    "NaN",
    "0.5",
    "-",
    "é",
]


def whole(rng: random.Random) -> list[dict]:
    return [{"trajectory_id": label, "explanation": f"e {label}", "score": round(rng.random(), 3)} for label in LABELS]


def changed_entries(rng: random.Random) -> list:
    """Return entries with one to three mistakes in them."""
    scores: list = whole(rng)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(scores)) if scores else 0
        match rng.randrange(8) if scores else 1:
            case 0:
                del scores[at]
            case 1:
                scores.insert(
                    at, {"trajectory_id": rng.choice([*LABELS, "nobody", 3, None]), "score": rng.choice(NUMBERS)}
                )
            case 2:
                scores[at] = {**_dict(scores[at]), "score": rng.choice(NUMBERS)}
            case 3:
                rest = {key: it for key, it in _dict(scores[at]).items() if key != "trajectory_id"}
                scores[at] = {"trajectory_id": rng.choice([*LABELS, str(at + 1), at + 1, "t1", ["x"]]), **rest}
            case 4:
                rng.shuffle(scores)
            case 5:
                scores[at] = rng.choice(NUMBERS)
            case 6:
                scores[at] = {key: it for key, it in _dict(scores[at]).items() if rng.random() < 0.6}
            case 7:
                scores[at] = {**_dict(scores[at]), "scores": whole(rng)}
    return scores


def _dict(entry: object) -> dict:
    return entry if isinstance(entry, dict) else {}


def changed_text(rng: random.Random, text: str) -> str:
    """Return the text with up to five edits."""
    for _ in range(rng.randint(0, 5)):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        match rng.randrange(7):
            case 0:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + 1 :]
            case 2:
                text = text[:to]
            case 3:
                text = text[:at] + text[to:]
            case 4:
                text = text[:to] + text[at:to] + text[to:]
            case 5:
                text = f"Here you are:\n```json\n{text}\n```\nIs {{this}} what you wanted?"
            case 6:
                text = text + rng.choice(["\n", " and "]) + text
    return text


def broken(rng: random.Random) -> str:
    scores = changed_entries(rng) if rng.random() < 0.5 else whole(rng)
    text = rng.choice([plain, json.dumps, lambda it: json.dumps({"scores": it}, indent=2)])(scores)
    return changed_text(rng, text)


def said(text: str, label: str) -> set[float]:
    """Return the numbers that a text gives to a label, found in another way than the parser's: between its id and the next."""
    parts = text.split('"trajectory_id"')
    own = [it for it in parts if re.match(rf'\s*:\s*"\s*{label}\s*"', it)]
    numbers = (number for it in own for number in re.findall(r'"score"\s*:\s*"?\s*(-?[\d.]+(?:[eE][-+]?\d+)?)', it))
    return {float(number) for number in numbers if number.count(".") < 2}


@pytest.mark.parametrize("score", ["0.5", " 0.5\n", "\x1e0.5", "\u20030.5\x1f"])
def test_a_score_in_quotes_is_a_number_whatever_white_space_stands_around_it(score):
    text = json.dumps({"scores": [{"trajectory_id": "bcdfg", "score": score}]})
    assert read_scores(text, ["bcdfg"])["bcdfg"].score == 0.5


@pytest.mark.system
def test_each_of_10000_broken_answers_ends_in_scores_at_the_right_labels_or_in_a_named_fault():
    rng, ends = random.Random(20), Counter()
    for _ in range(10_000):
        text = broken(rng)
        try:
            found = read_scores(text, LABELS)
        except Fault as fault:
            assert str(fault), text
            ends[re.sub(r"'.*'|[b-z]{5}(, [b-z]{5})*$|of [b-z]{5}", "...", str(fault))[:40]] += 1
            continue
        ends["scores"] += 1
        assert list(found) != [] and found.keys() == set(LABELS), text
        for label, it in found.items():
            assert 0 <= it.score <= 1, text
            assert it.score in said(text, label), (label, it.score, text)
    assert ends["scores"] > 1000, ends
    assert len(ends) > 6, ends


@pytest.mark.parametrize(
    "text",
    [
        '{"a":[' * 400 + "1," * 80_000,
        "{" * 200_000,
        '{"' * 100_000,
        '{"a": "' * 20_000,
        '{"scores": [' + "[" * 100_000,
        "\x00\ud83d" * 50_000,
        '{"scores": [{"trajectory_id": "bcdfg", "score": ' + "9" * 100_000 + "}]}",
    ],
    ids=lambda text: text[:12],
)
def test_an_answer_that_would_keep_a_parser_busy_is_a_fault_too(text):
    with pytest.raises(Fault):
        read_scores(text, LABELS)
