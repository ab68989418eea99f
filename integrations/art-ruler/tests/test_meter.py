"""What judging takes: the account and its budget, and how many requests there are at a time."""

import asyncio
import gc
import sqlite3
import weakref

import pytest
from judging import GROUP, RIGHT, KnownJudge, grade, group_of, judge_saying, plain

from art_core.errors import ConfigError
from art_core.types import MeteredReward
from art_ruler import Ruler


class Crowd:
    """Counts who is inside at a time; everybody stays for a moment."""

    inside = most = 0

    async def __aenter__(self):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.01)

    async def __aexit__(self, *_):
        self.inside -= 1


async def test_a_run_keeps_account_of_requests_tokens_and_cost_and_goes_on_with_it(tmp_path):
    ruler = Ruler(KnownJudge())
    assert isinstance(ruler, MeteredReward)
    ruler.begin(tmp_path)
    await ruler.score(group_of("worth 0.2", "worth 0.9"))
    await ruler.score(group_of("worth 0.3", "worth 0.9"))
    later = Ruler(KnownJudge())
    later.begin(tmp_path)
    for it in (ruler, later):
        assert it.account() == {
            "judge/requests": 2.0, "judge/failed": 0.0, "judge/faults": 0.0, "judge/input_tokens": 2000.0,
            "judge/output_tokens": 200.0, "judge/cost": 0.5, "judge/unpriced": 0.0,
        }  # fmt: skip
    with sqlite3.connect(tmp_path / "judge.sqlite") as db:
        assert (
            db.execute("SELECT substr(asked_by, 1, 16), cost, fault FROM answers").fetchall()
            == [("ruler KnownJudge", 0.25, None)] * 2
        )


async def test_an_answer_that_could_not_be_used_is_paid_for_and_counted(tmp_path):
    ruler = Ruler(judge_saying(lambda scores: "no", plain))
    ruler.begin(tmp_path)
    assert await ruler.score(GROUP) == RIGHT
    account = ruler.account()
    assert (account["judge/requests"], account["judge/faults"], account["judge/unpriced"]) == (2, 1, 2)
    assert account["judge/input_tokens"] > 500
    with sqlite3.connect(tmp_path / "judge.sqlite") as db:
        assert "no complete JSON" in db.execute("SELECT fault FROM answers").fetchone()[0]


async def test_a_budget_stops_the_judging_and_says_so(tmp_path):
    judge = KnownJudge()
    ruler = Ruler(judge, budget=0.4)
    ruler.begin(tmp_path)
    groups = [group_of(f"worth 0.{n}", "worth 0.9") for n in range(1, 5)]
    scores = [await ruler.score(group) for group in groups]
    assert scores == [[0.1, 0.9], [0.2, 0.9], [None, None], [None, None]]
    assert judge.asked == 2
    assert "budget of $0.4 is spent ($0.5000)" in groups[2].trajectories[0].notes["unscored"]
    assert "pass a larger budget=" in ruler.exhausted()
    again = Ruler(judge, budget=0.4)
    again.begin(tmp_path)
    assert again.exhausted()
    larger = Ruler(judge, budget=1.0)
    larger.begin(tmp_path)
    assert larger.exhausted() is None


async def test_a_budget_needs_a_price():
    with pytest.raises(ConfigError, match=r"the price of the judge .* is unknown; pass price="):
        await Ruler(judge_saying(plain), budget=1.0).score(GROUP)
    ruler = Ruler(KnownJudge(), budget=1.0, price=(2.0, 10.0))
    await ruler.score(GROUP)
    assert ruler.account()["judge/cost"] == pytest.approx(1000 * 2e-6 + 100 * 10e-6)


async def test_a_budget_is_not_passed_by_requests_that_are_made_at_the_same_time():
    judge = KnownJudge()
    ruler = Ruler(judge, budget=1.0, concurrency=16)
    groups = [group_of(f"worth 0.{n}", "worth 0.9") for n in range(10, 40)]
    scores = await asyncio.gather(*map(ruler.score, groups))
    assert judge.asked == 4, "at 0.25 dollars each"
    assert sum(None not in it for it in scores) == 4
    assert ruler.account()["judge/cost"] == 1.0


async def test_what_failed_is_counted_and_where_nothing_is_priced_there_is_no_cost():
    async def judge(messages):
        raise OSError("no route")

    ruler = Ruler(judge)
    await ruler.score(GROUP)
    account = ruler.account()
    assert (account["judge/requests"], account["judge/failed"], account["judge/faults"]) == (1, 1, 0)
    ruler = Ruler(judge_saying(plain))
    await ruler.score(GROUP)
    assert "judge/cost" not in ruler.account()


async def test_two_judges_of_one_run_keep_accounts_of_their_own(tmp_path):
    for requests in (1, 2):  # begun, and gone on with
        one, other = Ruler(KnownJudge(), votes=1), Ruler(KnownJudge(), votes=2)
        for number, ruler in enumerate((one, other)):
            ruler.begin(tmp_path)
            await ruler.score(group_of(f"worth 0.{requests}", f"worth 0.5{number}"))
        assert one.account()["judge/requests"] == requests
        assert other.account()["judge/requests"] == 2 * requests


async def test_no_more_requests_are_under_way_than_the_limit_in_any_event_loop():
    crowd = Crowd()

    async def judge(messages):
        async with crowd:
            return plain(grade(messages))

    ruler = Ruler(judge, concurrency=3)

    async def all_of_them():
        return await asyncio.gather(*(ruler.score(group_of(f"worth 0.{n}", "worth 0.5")) for n in range(10, 22)))

    await all_of_them()
    await asyncio.to_thread(asyncio.run, all_of_them())
    assert crowd.most == 3


@pytest.mark.system
def test_an_event_loop_that_has_ended_is_not_held():
    async def judge(messages):
        await asyncio.sleep(0)
        return plain(grade(messages))

    async def loop_of(ruler):
        await asyncio.gather(*(ruler.score(group_of(f"worth 0.{n}", "worth 0.5")) for n in range(1, 4)))
        return weakref.ref(asyncio.get_running_loop())

    ruler = Ruler(judge, concurrency=1)
    first, _ = (asyncio.run(loop_of(ruler)) for _ in range(2))
    gc.collect()
    assert first() is None


async def test_a_request_that_is_given_up_makes_room_for_one_that_waits():
    asked, under_way = 0, asyncio.Event()

    async def judge(messages):
        nonlocal asked
        asked += 1
        if asked == 2:
            under_way.set()
            await asyncio.Event().wait()
        return plain(grade(messages))

    ruler = Ruler(judge, concurrency=1)
    await ruler.score(GROUP)  # from here on it is ready, and all wait at the gate at once
    first, last = (asyncio.ensure_future(ruler.score(group_of("worth 0.3", f"worth 0.{n}"))) for n in (4, 6))
    await asyncio.wait_for(under_way.wait(), 10)
    first.cancel()
    assert await asyncio.wait_for(last, 10) == [0.3, 0.6]


async def test_two_judges_of_one_name_are_told_apart_by_what_decides_their_answers(tmp_path):
    class Other(KnownJudge):
        identity = "at another address"

    Other.__qualname__ = KnownJudge.__qualname__
    for requests in (1, 2):
        rulers = Ruler(KnownJudge()), Ruler(Other())
        for number, ruler in enumerate(rulers):
            ruler.begin(tmp_path)
            await ruler.score(group_of(f"worth 0.{requests}", f"worth 0.5{number}"))
        assert rulers[0].name == rulers[1].name
        assert [it.account()["judge/requests"] for it in rulers] == [requests, requests]


async def test_a_judge_that_never_answers_does_not_make_the_groups_wait_for_each_other():
    crowd = Crowd()

    async def judge(messages):
        async with crowd:
            raise OSError("no route")

    ruler = Ruler(judge, budget=1.0, price=(1.0, 1.0))
    await asyncio.gather(*(ruler.score(group_of(f"worth 0.{n}", "worth 0.9")) for n in range(10, 20)))
    assert crowd.most > 5


async def test_what_is_paid_is_in_the_account_however_it_ends():
    ruler = Ruler(judge_saying(plain), budget=1.0)
    with pytest.raises(ConfigError, match="pass price="):
        await ruler.score(GROUP)
    assert ruler.account()["judge/requests"] == 1

    async def slow(messages):
        await asyncio.sleep(60)

    ruler = Ruler(slow)
    task = asyncio.ensure_future(ruler.score(GROUP))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ruler.account()["judge/failed"] == 1
