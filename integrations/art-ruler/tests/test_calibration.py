"""Files of preferences are read whole or refused by line; the numbers are those of the formulas."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError
from art_core.loop.metrics import wilson_interval
from art_ruler.calibration import (
    Agreement,
    Preference,
    agreement,
    append_preference,
    read_preferences,
)

# Files


def write(folder, *lines):
    path = folder / "preferences.jsonl"
    path.write_text("\n".join(it if isinstance(it, str) else json.dumps(it) for it in lines), encoding="utf-8")
    return path


def test_the_three_kinds_of_lines_are_read(tmp_path):
    ranking = {"ranking": ["d", ["e", "f"], "g"]}
    line_separator = '{"better": "\u2028", "worse": "x"}'
    path = write(tmp_path, line_separator, {"better": "a", "worse": "b"}, "", {"tie": ["b", "c"]}, ranking, "")
    assert read_preferences(path) == [
        Preference("\u2028", "x"),
        Preference("a", "b"),
        Preference("b", "c", tie=True),
        Preference("d", "e"),
        Preference("d", "f"),
        Preference("d", "g"),
        Preference("e", "f", tie=True),
        Preference("e", "g"),
        Preference("f", "g"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "better: a",
        "[1, 2",
        "[" * 100_000,
        "1" * 5000,
        "null",
        "[]",
        "{}",
        {"better": "a"},
        {"better": "a", "worse": "b", "by": "me"},
        {"better": "a", "worse": "b", "tie": ["a", "b"]},
        {"better": "a", "worse": 2},
        {"better": "", "worse": "b"},
        {"better": "a", "worse": "a"},
        {"better": ["a"], "worse": "b"},
        {"tie": ["a"]},
        {"tie": ["a", "b", "c"]},
        {"tie": "ab"},
        {"tie": ["a", "a"]},
        {"ranking": []},
        {"ranking": ["a"]},
        {"ranking": "ab"},
        {"ranking": ["a", "b", []]},
        {"ranking": ["a", None]},
        {"ranking": ["a", ["b", ["c"]]]},
        {"ranking": ["a", "b", "a"]},
        {"ranking": [["a", "a"]]},
        {"ranking": ["a", "b"], "tie": ["a", "b"]},
    ],
    ids=lambda line: str(line)[:50],
)
def test_anything_else_is_refused_with_its_file_and_line(tmp_path, line):
    path = write(tmp_path, {"better": "x", "worse": "y"}, line)
    with pytest.raises(ConfigError, match=r"preferences\.jsonl, line 2: "):
        read_preferences(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"better": "a", "worse": "b"}, "'a' better than 'b' repeats an earlier preference in line 1"),
        ({"better": "b", "worse": "a"}, "'b' better than 'a' contradicts 'a' better than 'b' in line 1"),
        ({"tie": ["b", "a"]}, "'b' and 'a' equal contradicts 'a' better than 'b' in line 1"),
        ({"ranking": ["c", "d", "b", "a"]}, "'b' better than 'a' contradicts 'a' better than 'b' in line 1"),
        ({"tie": ["y", "x"]}, "'y' and 'x' equal repeats an earlier preference in line 2"),
        ({"better": "x", "worse": "y"}, "'x' better than 'y' contradicts 'x' and 'y' equal in line 2"),
    ],
)
def test_a_pair_that_was_there_is_refused_by_name(tmp_path, line, reason):
    path = write(tmp_path, {"better": "a", "worse": "b"}, {"tie": ["x", "y"]}, line)
    with pytest.raises(ConfigError, match=f"line 3: {reason}"):
        read_preferences(path)


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no such preferences file: .*nowhere"):
        read_preferences(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="no such preferences file"):
        read_preferences(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary is not UTF-8"):
        read_preferences(tmp_path / "binary")


def test_what_is_appended_is_read_again(tmp_path):
    path = tmp_path / "preferences.jsonl"
    said = [Preference("a", "b"), Preference("b", "c", tie=True), Preference("\u2028", "é")]
    for preference in said:
        append_preference(path, preference)
    assert read_preferences(path) == said


def test_appending_keeps_a_last_line_without_its_end_and_refuses_what_could_not_be_read(tmp_path):
    path = write(tmp_path, {"better": "a", "worse": "b"})
    append_preference(path, Preference("b", "c"))
    before = path.read_text()
    for preference, reason in ((Preference("b", "a"), "contradicts"), (Preference("b", "c"), "repeats")):
        with pytest.raises(ConfigError, match=reason):
            append_preference(path, preference)
    assert path.read_text() == before
    assert read_preferences(path) == [Preference("a", "b"), Preference("b", "c")]


# Numbers

VALUES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8)
"""Of each run: how good people find it, and its score."""


def preferences_of(worth: list[float]) -> list[Preference]:
    """Every pair, in an order that says nothing."""
    pairs = itertools.combinations(sorted(range(len(worth)), key=lambda i: worth[i], reverse=True), 2)
    found = [Preference(str(a), str(b), tie=worth[a] == worth[b]) for a, b in pairs]
    random.Random(0).shuffle(found)
    return found


def judged(worth: list[float], given: list[float | None]) -> Agreement:
    return agreement(preferences_of(worth), {str(i): score for i, score in enumerate(given)})


def tau_by_definition(x: list[float], y: list[float]) -> float | None:
    """The sum over all ordered pairs of the product of signs, over the root of the product of the sums of their squares."""

    def signs(values):
        return [(a > b) - (a < b) for a, b in itertools.permutations(values, 2)]

    a, b = signs(x), signs(y)
    norm = sum(i * i for i in a) * sum(j * j for j in b)
    return sum(i * j for i, j in zip(a, b, strict=True)) / math.sqrt(norm) if norm else None


@given(VALUES)
def test_tau_is_kendalls_and_accuracy_the_share_of_pairs_in_order(values):
    people, scores = map(list, zip(*values, strict=True))
    found = judged(people, scores)
    strict = [(i, j) for i, j in itertools.permutations(range(len(values)), 2) if people[i] > people[j]]
    alike = [1 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0 for i, j in strict]
    assert found.tau == pytest.approx(tau_by_definition(people, scores))
    assert found.accuracy == (pytest.approx(sum(alike) / len(alike)) if alike else None)
    assert (found.pairs, found.unscored, found.strict) == (len(values) * (len(values) - 1) / 2, 0, len(strict))


@given(VALUES)
def test_the_numbers_are_in_range_and_turn_with_the_scores(values):
    people, scores = map(list, zip(*values, strict=True))
    found, turned = judged(people, scores), judged(people, [-score for score in scores])
    if found.accuracy is not None:
        low, high = found.interval
        assert 0 <= low <= found.accuracy <= high <= 1
        assert turned.accuracy == pytest.approx(1 - found.accuracy)
        assert turned.interval == pytest.approx((1 - high, 1 - low))
    if found.tau is not None:
        assert -1 <= found.tau <= 1
        assert turned.tau == -found.tau


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_the_perfect_order_gives_1_and_the_reverse_0_and_minus_1(worth):
    found, reverse = judged(worth, [it * 0.1 for it in worth]), judged(worth, [-it for it in worth])
    if len(set(worth)) == 1:
        assert (found.accuracy, found.interval, found.tau) == (None, None, None)
    else:
        assert (found.accuracy, found.tau, found.interval[1]) == (1, 1, 1)
        assert (reverse.accuracy, reverse.tau, reverse.interval[0]) == (0, -1, 0)


def test_scores_that_know_nothing_are_in_the_middle():
    rng = random.Random(1)
    pairs = [Preference(f"{i}a", f"{i}b") for i in range(10_000)]
    scores = {rollout_id: rng.random() for it in pairs for rollout_id in (it.better, it.worse)}
    found = agreement(pairs, scores)
    assert found.accuracy == pytest.approx(0.5, abs=0.02)
    assert found.tau == pytest.approx(0, abs=0.04)
    assert found.interval[1] - found.interval[0] == pytest.approx(2 * 1.96 * 0.005, rel=0.01)


def test_known_values():
    # The example of SciPy's kendalltau.
    assert judged([12, 2, 1, 12, 2], [1, 4, 7, 1, 0]).tau == pytest.approx(-0.47140452079103173)
    # 81 of 263: R. G. Newcombe, Statistics in Medicine 17, 1998, table I, method 3.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_ends_of_the_interval_are_as_far_from_the_share_as_its_own_spread(n, share):
    for end in wilson_interval(share, n):
        assert (share - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / n, abs=1e-9)


def test_equal_scores_count_half():
    found = judged([3, 2, 1], [0.1 + 0.2, 0.3, 0.0])
    assert found.accuracy == pytest.approx(2.5 / 3)
    assert found.tau == pytest.approx(2 / math.sqrt(6))
    assert judged([3, 2, 1], [1, 1, 1]) == Agreement(3, 0, 3, 0.5, wilson_interval(0.5, 3), None)


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_pairs_without_a_score_are_counted_and_left_out(missing):
    found = agreement(
        [Preference("a", "b"), Preference("a", "c"), Preference("b", "gone"), Preference("b", "d", tie=True)],
        {"a": 1.0, "b": 0.5, "c": missing, "d": 0.0},
    )
    assert (found.pairs, found.unscored, found.strict, found.accuracy) == (4, 2, 1, 1)
    assert found.tau == pytest.approx(1 / math.sqrt(2))


def test_nothing_gives_no_numbers():
    assert agreement([], {}) == Agreement(0, 0, 0, None, None, None)
    assert json.loads(json.dumps(agreement([], {}).as_json()))["tau"] is None


def test_the_numbers_are_json():
    numbers = agreement([Preference("a", "b")], {"a": 1.0, "b": 0.5}).as_json()
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers == {"pairs": 1, "unscored": 0, "strict": 1, "accuracy": 1, "tau": 1} | {
        "interval": pytest.approx([0.2065, 1], abs=1e-4)
    }
