"""Several votes, large groups, the cache, and questions that are too long."""

import asyncio
import json
import re
import sqlite3
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import GROUP, RIGHT, SYSTEM, TASK, KnownJudge, each, grade, group_of, judge_saying, plain, runs

from art_core.errors import ConfigError, StoreError
from art_ruler import Answer, Ruler
from art_ruler.judge import JudgeError, TooLong
from art_ruler.scale import one_scale


def worth(text: str) -> float:
    return float(re.search(r"worth ([\d.]+)", text)[1])


async def test_the_mean_of_the_votes_counts_and_their_spread_is_told():
    judge = judge_saying(plain, lambda scores: plain(each(scores, score=0.0)))
    group = group_of("worth 0.2", "worth 0.8")
    assert await Ruler(judge, votes=2).score(group) == [0.1, 0.4]
    assert [t.metrics["judge/spread"] for t in group.trajectories] == [0.1, 0.4]
    assert group.trajectories[1].notes["ruler"] in ("0.80: because\n0.00: because", "0.00: because\n0.80: because")


async def test_a_single_vote_has_no_spread_to_tell():
    group = group_of("worth 0.2", "worth 0.8")
    await Ruler(judge_saying(plain)).score(group)
    assert not any(t.metrics for t in group.trajectories)


async def test_a_vote_that_cannot_be_used_does_not_take_the_others_with_it(caplog):
    judge = judge_saying(lambda scores: "", plain, lambda scores: "")
    assert await Ruler(judge, votes=3, concurrency=1).score(GROUP) == RIGHT
    assert "of 3 votes count" in caplog.text


async def test_every_vote_has_labels_and_an_order_of_its_own():
    judge = judge_saying(plain)
    await Ruler(judge, votes=12).score(group_of(*(f"worth 0.{n}" for n in range(1, 9))))
    questions = [runs(messages) for messages in judge.asked]
    assert len({label for question in questions for label in question}) == 12 * 8
    assert len({tuple(map(worth, question.values())) for question in questions}) > 6


class RelativeJudge:
    """Grades a chunk from 0 (its worst) to 1 (its best), whatever the others are: no two chunks have one scale."""

    def __init__(self) -> None:
        self.chunks: list[list[float]] = []

    async def __call__(self, messages: list[dict]) -> str:
        values = {label: worth(text) for label, text in runs(messages).items()}
        low, high = min(values.values()), max(values.values())
        self.chunks.append(sorted(values.values()))
        return plain(
            [
                {"trajectory_id": label, "explanation": "", "score": (value - low) / ((high - low) or 1)}
                for label, value in values.items()
            ]
        )


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 60), chunk=st.integers(5, 16), seed=st.randoms())
async def test_a_large_group_is_judged_in_chunks_and_ends_on_one_scale(count, chunk, seed):
    judge = RelativeJudge()
    values = seed.sample(range(1, 1000), count)
    scores = await Ruler(judge, chunk=chunk).score(group_of(*(f"worth {value / 1000}" for value in values)))
    assert all(0 <= score <= 1 for score in scores)
    assert all(len(it) <= chunk for it in judge.chunks)
    assert {value for it in judge.chunks for value in it} == {value / 1000 for value in values}
    if len(judge.chunks) > 1:
        anchors = set.intersection(*map(set, judge.chunks))
        assert len(anchors) == 3
    assert statistics.correlation(values, scores) > 0.999 if count > 2 and not clipped(judge) else True


def clipped(judge: RelativeJudge) -> bool:
    """Whether some chunk's scale is wider than the first's by more than a line may stretch it."""
    widths = [it[-1] - it[0] for it in judge.chunks]
    return max(widths) > 4 * widths[0]


def test_anchors_that_tie_shift_a_chunk_and_do_not_stretch_it():
    # Two chunks whose anchors (0, 1, 2) all tie: the second is 0.2 higher throughout.
    found = one_scale({0: 0.5, 1: 0.5, 2: 0.5}, [{0: 0.7, 1: 0.7, 2: 0.7, 3: 0.9}])
    assert found == pytest.approx({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.7})
    # A chunk that turns them round is noise: only shifted.
    turned = one_scale({0: 0.4, 1: 0.5, 2: 0.6}, [{0: 0.6, 1: 0.5, 2: 0.4, 3: 0.5}])
    assert turned[3] == pytest.approx(0.5)


async def test_a_chunk_that_gets_no_answer_leaves_the_group_unscored():
    judge = judge_saying(plain, lambda scores: "")
    group = group_of(*(f"worth 0.{n}" for n in range(10, 20)))
    assert await Ruler(judge, chunk=6).score(group) == [None] * 10
    assert "no complete JSON" in group.trajectories[0].notes["unscored"]


async def test_what_was_judged_is_kept_on_disk_for_the_same_group_rubric_judge_seed_and_votes(tmp_path):
    judge, cache = KnownJudge(), tmp_path / "kept" / "judge.sqlite"
    first = group_of("worth 0.2", "worth 0.9", "worth 0.5")
    await Ruler(judge, cache=cache).score(first)
    turned = group_of("worth 0.9", "worth 0.5", "worth 0.2")
    assert await Ruler(judge, cache=cache).score(turned) == [0.9, 0.5, 0.2]
    assert judge.asked == 1
    assert turned.trajectories[0].notes["ruler"] == "because"
    for number, other in enumerate(
        ({"seed": 1}, {"rubric": "Be fair."}, {"votes": 2}, {"context": 5000}, {"images": False})
    ):
        asked = judge.asked
        await Ruler(judge, cache=cache, **other).score(first)
        assert judge.asked > asked, f"{number}: {other}"
    judge.identity = "another"
    asked = judge.asked
    await Ruler(judge, cache=cache).score(first)
    await Ruler(judge, cache=cache).score(group_of("worth 0.2", "worth 0.9"))
    assert judge.asked == asked + 2


async def test_a_judge_that_nobody_knows_and_a_ruler_without_a_run_keep_nothing(tmp_path):
    unknown = judge_saying(plain)
    for _ in range(2):
        await Ruler(unknown, cache=tmp_path / "judge.sqlite").score(GROUP)
    known = KnownJudge()
    ruler = Ruler(known)
    await ruler.score(GROUP)
    await ruler.score(GROUP)
    assert (len(unknown.asked), known.asked) == (2, 2)


async def test_unscored_groups_are_asked_about_again(tmp_path):
    judge = judge_saying(lambda scores: "", lambda scores: "", plain)
    judge.identity = "known"
    ruler = Ruler(judge, cache=tmp_path / "judge.sqlite")
    assert await ruler.score(GROUP) == [None] * 3
    assert await ruler.score(GROUP) == RIGHT


async def test_a_mean_of_fewer_votes_than_were_asked_for_is_not_kept(tmp_path):
    judge = judge_saying(lambda scores: "", lambda scores: "", plain)
    judge.identity = "known"
    ruler = Ruler(judge, votes=2, concurrency=1, cache=tmp_path / "judge.sqlite")
    await ruler.score(GROUP)
    asked = len(judge.asked)
    await ruler.score(GROUP)
    assert len(judge.asked) == asked + 2


async def test_conversations_from_anywhere_are_compared():
    verdicts = await Ruler(judge_saying(plain)).compare(
        [[SYSTEM, TASK, {"role": "assistant", "content": f"worth 0.{n}"}] for n in (3, 8, 3)]
    )
    assert [it.score for it in verdicts] == [0.3, 0.8, 0.3]
    assert verdicts[1].explanation == "because"
    with pytest.raises(JudgeError, match="cannot be used: the answer holds no complete JSON"):
        await Ruler(judge_saying(lambda scores: "")).compare([[{"role": "assistant", "content": "worth 0.1"}]])


async def test_a_question_that_is_too_long_for_the_judge_is_shortened_and_asked_again(caplog):
    lengths = []

    async def judge(messages):
        lengths.append(len(json.dumps(messages)))
        if lengths[-1] > 9000:
            raise TooLong("8192 tokens at most")
        return plain(grade(messages))

    ruler = Ruler(judge)
    long = group_of(*(f"worth 0.{n} {'and more words ' * 900}" for n in (2, 9)))
    assert await ruler.score(long) == [0.2, 0.9]
    assert "8192 tokens at most; shortening the question to" in caplog.text
    first = len(lengths)
    assert await ruler.score(long) == [0.2, 0.9]
    assert len(lengths) == first + 1, "what was learnt about the judge is forgotten"


async def test_a_group_that_never_fits_shortens_no_question_about_another():
    lengths = []

    async def judge(messages):
        if "endless" in messages[1]["content"]:
            raise TooLong("no room at all")
        lengths.append(len(messages[1]["content"]))
        return plain(grade(messages))

    ruler = Ruler(judge)
    for n in range(4):
        assert await ruler.score(group_of(f"endless {n} {'x' * 20000} worth 0.2", "worth 0.9")) == [None, None]
    assert await ruler.score(group_of(f"worth 0.2 {'and more words ' * 900}", "worth 0.9")) == [0.2, 0.9]
    assert lengths[0] > 900 * len("and more words ")


async def test_what_was_judged_after_shortening_is_found_again_by_a_run_that_goes_on(tmp_path):
    class Narrow(KnownJudge):
        async def __call__(self, messages: list[dict]) -> Answer:
            if len(messages[1]["content"]) > 9000:
                raise TooLong("8192 tokens at most")
            return await super().__call__(messages)

    judge = Narrow()
    for _ in range(2):
        ruler = Ruler(judge)
        ruler.begin(tmp_path)
        for n in range(2, 5):
            assert await ruler.score(group_of(f"worth 0.{n} {'and more words ' * 900}", "worth 0.9")) == [n / 10, 0.9]
    assert judge.asked == 3


async def test_once_a_chunk_has_failed_no_more_is_asked_about_its_group():
    asked = 0

    async def judge(messages):
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked == 2:
            raise JudgeError("no quota")
        return plain(grade(messages))

    group = group_of(*(f"worth 0.{n}" for n in range(100, 200)))
    before = asyncio.all_tasks()
    assert await Ruler(judge, chunk=6, concurrency=1).score(group) == [None] * 100
    assert asyncio.all_tasks() == before
    assert asked < 5


async def test_a_judge_for_which_everything_is_too_long_leaves_the_group_unscored():
    async def judge(messages):
        raise TooLong("no room at all")

    group = group_of("worth 0.2", "worth 0.9")
    assert await Ruler(judge).score(group) == [None, None]
    assert "no room" in group.trajectories[0].notes["unscored"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"votes": 0}, "votes must be at least 1, got 0"),
        ({"chunk": 4}, "chunk must be at least 5, got 4"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"timeout": 0}, "timeout must be at least 0.001, got 0"),
        ({"budget": -1}, "budget must be a number of US dollars above 0, got -1"),
        ({"price": 3}, "price must be two numbers, US dollars per million (input, output) tokens, got 3"),
        ({"price": (1, -1)}, "price must be two numbers, US dollars per million (input, output) tokens, got (1, -1)"),
        ({"rubric": " "}, "rubric is empty"),
        ({"api_base": "http://x/v1"}, "apply only to a judge that is a LiteLLM model string"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Ruler(judge_saying(plain), **wrong)


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database, by any means" * 100)
    with pytest.raises(StoreError, match="pass another file"):
        Ruler(judge_saying(plain), cache=tmp_path / "notes.txt")


async def test_a_record_that_cannot_be_written_any_more_is_named(tmp_path):
    ruler = Ruler(KnownJudge())
    ruler.begin(tmp_path)
    with sqlite3.connect(tmp_path / "judge.sqlite") as db:
        db.execute("DROP TABLE verdicts")
    db.close()
    with pytest.raises(StoreError, match=r"cannot use the judge's record .*judge\.sqlite"):
        await ruler.score(GROUP)


def test_a_store_of_another_kind_is_refused_in_one_sentence(tmp_path):
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        db.execute("PRAGMA user_version = 4")
    db.close()
    with pytest.raises(StoreError) as caught:
        Ruler(judge_saying(plain), cache=tmp_path / "run.sqlite")
    assert str(caught.value).count("pass another file") == 1
