"""score, advantages, has_contrast: what a reward may return and how it is said when it may not."""

import asyncio
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError, RewardError
from art_core.loop.rewards import weighted
from art_core.scoring import Unscorable, advantages, calls_of, has_contrast, of_nodes, score, unscored, why_unscored
from art_core.types import Call, Group, Trajectory


def make_group(*rewards, outputs=None) -> Group:
    outputs = outputs or range(len(rewards))
    return Group(
        task="capital of France",
        trajectories=tuple(
            Trajectory(task="capital of France", calls=(), output=output, reward=reward, rollout_id=f"r{i}")
            for i, (reward, output) in enumerate(zip(rewards, outputs, strict=True))
        ),
    )


class Judge:
    """Answers for a whole group what it was made with."""

    def __init__(self, answer):
        self.answer = answer

    async def score(self, group):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def rewards_of(group: Group) -> list[float | None]:
    return [trajectory.reward for trajectory in group.trajectories]


async def test_a_plain_function_scores_every_run():
    scored = await score(make_group(None, None), lambda trajectory: trajectory.output)
    assert rewards_of(scored) == [0.0, 1.0]


async def test_async_rewards_of_a_group_run_at_the_same_time():
    waiting = asyncio.Barrier(3)

    async def reward(trajectory):
        await waiting.wait()
        return trajectory.output

    scored = await asyncio.wait_for(score(make_group(None, None, None), reward), 60)
    assert rewards_of(scored) == [0.0, 1.0, 2.0]


async def test_a_judge_scores_the_group_together_and_may_leave_runs_unscored():
    scored = await score(make_group(None, None), Judge([0.5, None]))
    assert rewards_of(scored) == [0.5, None]


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(3), np.bool_(True)])
async def test_a_reward_is_any_finite_number(value):
    scored = await score(make_group(None), lambda _: value)
    assert rewards_of(scored) == [float(value)]
    assert type(scored.trajectories[0].reward) is float


@pytest.mark.parametrize("value", [None, "0.5", math.nan, math.inf, [1.0], {"score": 1}])
async def test_what_is_not_a_finite_number_is_refused_naming_the_function_and_the_run(value):
    def exact_match(trajectory):
        return value

    with pytest.raises(RewardError) as caught:
        await score(make_group(None), exact_match)
    message = str(caught.value)
    assert "exact_match" in message and repr(value) in message
    assert "rollout r0" in message and "capital of France" in message and "return a finite" in message


async def test_a_forgotten_return_is_guessed():
    with pytest.raises(RewardError, match="is a 'return' missing"):
        await score(make_group(None), lambda _: None)


@pytest.mark.parametrize("value", ["0.5", math.nan])
async def test_no_return_is_missing_where_something_was_returned(value):
    with pytest.raises(RewardError, match="for rollout r0 of task 'capital of France'; return a finite"):
        await score(make_group(None), lambda _: value)


async def test_no_reward_is_under_way_any_more_when_another_ones_error_is_raised_or_noted():
    ended, may = [], asyncio.Event()

    async def reward(trajectory):
        if trajectory.output == 0:
            may.set()
            raise error
        await may.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append(trajectory.output)
        return 1.0

    error = ConfigError("wrong")
    with pytest.raises(ConfigError, match="wrong"):
        await score(make_group(None, None), reward)
    assert ended == [1]
    error = ValueError("wrong")
    assert rewards_of(await score(make_group(None, None), reward)) == [None, 1.0] and ended == [1, 1]


async def test_a_judge_that_returns_what_is_no_number_leaves_that_run_unscored_and_is_refused_for_a_whole_group():
    scored = await score(make_group(None, None), Judge([0.5, math.nan]))
    assert rewards_of(scored) == [0.5, None]
    assert why_unscored([scored]) == ["reward Judge returned nan (float)"]
    with pytest.raises(RewardError, match=r"reward Judge returned nan \(float\) for rollout r0 of task"):
        await score(make_group(None, None), Judge([math.nan, math.nan]))


async def test_a_function_that_raises_for_one_run_leaves_it_unscored_without_what_it_gave_its_calls():
    def picky(trajectory):
        trajectory.metrics["seen"] = 1.0
        trajectory.call_rewards[0] = 1.0
        return 1 / trajectory.output

    group = Group(task="t", trajectories=tuple(replace(run_of(call_of()), output=it) for it in (0, 2)))
    scored = await score(group, picky)
    assert rewards_of(scored) == [None, 0.5]
    assert [[call.reward for call in t.calls] for t in scored.trajectories] == [[None], [1.0]]
    [reason] = why_unscored([scored])
    assert "picky raised ZeroDivisionError: division by zero (" in reason and "test_scoring.py:" in reason
    again = await score(scored, lambda trajectory: 1.0)
    assert "unscored" not in again.trajectories[0].notes


async def test_a_part_of_a_sum_that_raises_for_one_run_leaves_it_unscored_and_is_named():
    def picky(trajectory):
        return 1 / trajectory.output

    scored = await score(make_group(None, None), weighted(picky=(1, picky), one=(1, lambda trajectory: 1)))
    assert rewards_of(scored) == [None, 2.0] and why_unscored([scored])[0].startswith("picky: reward")


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_in_a_reward_is_no_reason_to_leave_a_run_unscored(together):
    def stop(trajectory):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(score(make_group(None, None), Judge(KeyboardInterrupt()) if together else stop))


async def test_an_earlier_scoring_leaves_neither_advantages_nor_reasons():
    group = make_group(None, None)
    group.trajectories[1].notes["unscored"] = "the judge was away"
    scored = await score(replace(group, advantages=(1.0, -1.0), call_advantages=((), ())), Judge([0.5, None]))
    assert (scored.advantages, scored.call_advantages) == ((), ())
    assert why_unscored([scored]) == ["the reward does not say why"]


async def test_an_exception_of_the_reward_function_is_raised_from_it():
    def exact_match(trajectory):
        return trajectory.output["answer"]

    with pytest.raises(RewardError, match=r"exact_match raised TypeError.*rollout r0.*; fix the reward") as caught:
        await score(make_group(None), exact_match)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("together", [False, True])
def test_a_reward_that_calls_exit_is_named_and_does_not_end_the_event_loop(together):
    reward = Judge(SystemExit(3)) if together else lambda trajectory: sys.exit(3)
    with pytest.raises(RewardError, match="raised SystemExit: 3"):
        asyncio.run(score(make_group(None), reward))


@pytest.mark.parametrize("together", [False, True])
async def test_a_reward_of_which_something_is_cancelled_is_named_and_cancels_nothing_else(together):
    async def reward(trajectory):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="raised RuntimeError: CancelledError was raised"):
        await score(make_group(None), Judge(asyncio.CancelledError()) if together else reward)


class Panic(BaseException):
    """As extensions in Rust and test runners raise."""


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("error", "said"), [(Panic("no"), "Panic: no"), (Wordless(), "Wordless: its text can't be read")]
)
async def test_whatever_a_reward_raises_leaves_its_rollouts_unscored(error, said, together):
    def reward(trajectory):
        raise error

    with pytest.raises(RewardError, match=f"raised {said}"):
        await score(make_group(None), Judge(error) if together else reward)


async def test_a_reward_beyond_every_float_is_no_number():
    with pytest.raises(RewardError, match="return a finite int, float or bool"):
        await score(make_group(None), lambda trajectory: 10**400)


async def test_a_judge_that_fails_is_named():
    with pytest.raises(RewardError, match="Judge raised OSError: no network"):
        await score(make_group(None), Judge(OSError("no network")))


@pytest.mark.parametrize("answer", [[1.0], 1.0, "11", None])
async def test_a_judge_must_return_one_reward_per_run(answer):
    with pytest.raises(RewardError, match=r"Judge returned .*one"):
        await score(make_group(None, None), Judge(answer))


@pytest.mark.parametrize("thing", [Judge, 3, None, "ruler"])
async def test_what_is_no_reward_is_refused(thing):
    with pytest.raises(RewardError, match="isn't a reward"):
        await score(make_group(None), thing)


async def test_a_failed_run_is_scored_like_any_other():
    failed = Trajectory(task="t", calls=(), error="TimeoutError: too slow")
    scored = await score(Group(task="t", trajectories=(failed,)), lambda t: -1.0 if t.error else 1.0)
    assert rewards_of(scored) == [-1.0]


async def test_numbers_that_the_reward_adds_are_kept():
    def reward(trajectory):
        trajectory.metrics["success"] = 1.0
        return 0.5

    scored = await score(make_group(None), reward)
    assert scored.trajectories[0].metrics == {"success": 1.0}


async def test_words_that_the_reward_adds_are_kept_and_an_old_reason_is_not():
    group = make_group(None)
    group.trajectories[0].notes.update(unscored="the judge was away", other="kept")

    def reward(trajectory):
        trajectory.notes["mine"] = "half right"
        return 0.5

    scored = await score(group, reward)
    assert scored.trajectories[0].notes == {"other": "kept", "mine": "half right"}


async def test_a_run_with_a_reward_keeps_no_reason_for_having_none():
    def reward(trajectory):
        trajectory.notes["unscored"] = "it was hard to tell"
        return 0.5

    assert (await score(make_group(None), reward)).trajectories[0].notes == {}


@pytest.mark.parametrize(("name", "text"), [("mine", 1.0), ("mine", None), (3, "why")])
@pytest.mark.parametrize("together", [False, True])
async def test_a_note_that_is_no_text_is_refused(name, text, together):
    def noting(trajectory):
        trajectory.notes[name] = text
        return 0.5

    class Noting:
        async def score(self, group):
            return [noting(trajectory) for trajectory in group.trajectories]

    with pytest.raises(RewardError, match=r"[Nn]oting set notes\[.*for rollout r0.*; a note must be text under a name"):
        await score(make_group(None), Noting() if together else noting)


async def test_a_metric_of_a_judge_that_is_no_number_is_refused():
    class Verdict:
        async def score(self, group):
            group.trajectories[0].metrics["verdict"] = "good"
            return [1.0]

    with pytest.raises(RewardError, match=r"Verdict set metrics\['verdict'\] to 'good'"):
        await score(make_group(None), Verdict())


def already_scored() -> Group:
    """Two runs with rewards, advantages, and a reward that was noted for a call."""
    group = replace(make_group(0.0, 1.0), advantages=(-1.0, 1.0), call_advantages=((), ()))
    for trajectory in group.trajectories:
        trajectory.call_rewards[0] = 1.0
    return group


def check_nothing_is_left(group: Group, reason: str):
    assert (rewards_of(group), group.advantages, group.call_advantages) == ([None, None], (), ())
    assert [(it.notes, it.call_rewards) for it in group.trajectories] == [({"unscored": reason}, {})] * 2
    assert [it.rollout_id for it in group.trajectories] == ["r0", "r1"] and group.task == "capital of France"


def test_a_group_that_is_left_unscored_keeps_the_reason_and_nothing_of_an_earlier_scoring():
    check_nothing_is_left(unscored(already_scored(), Unscorable("it raised", "a run")), "it raised")


async def test_a_reward_that_takes_too_long_leaves_its_group_unscored_with_the_time_that_it_had():
    async def late(trajectory):
        trajectory.call_rewards[0] = 1.0
        await asyncio.Event().wait()

    found = await score(already_scored(), late, timeout=0.01)
    check_nothing_is_left(found, f"reward {late.__qualname__} did not finish within 0.01 seconds (score_timeout)")


async def test_what_a_judge_raised_is_the_reason_its_cause_and_has_its_place():
    failure = KeyError("score")
    with pytest.raises(Unscorable) as raised:
        await score(make_group(None), Judge(failure))
    assert raised.value.reason.startswith("reward Judge raised KeyError: 'score' (")
    assert raised.value.__cause__ is failure
    assert f"{__file__}:" in raised.value.reason
    assert str(raised.value) == f"{raised.value.reason} for the group of task 'capital of France'"


@pytest.mark.parametrize("error", [RewardError("no judge answered"), Unscorable("no judge answered", "one run")])
async def test_a_judges_own_refusal_is_passed_on_with_its_words(error):
    with pytest.raises(Unscorable) as raised:
        await score(make_group(None), Judge(error))
    assert raised.value.reason == "no judge answered"
    where = "one run" if isinstance(error, Unscorable) else "the group of task 'capital of France'"
    assert str(raised.value) == f"no judge answered for {where}"
    assert (raised.value is error) == isinstance(error, Unscorable)
    assert raised.value.__cause__ is (None if raised.value is error else error)


@pytest.mark.parametrize(
    ("answer", "reason", "to_do"),
    [
        (3, "returned 3 instead of a list of rewards", "return a list with one number (or None) per trajectory"),
        (
            [1.0],
            "returned 1 rewards for 2 trajectories",
            "return one per trajectory, in the same order, None if it has none",
        ),
    ],
)
async def test_an_answer_of_a_wrong_shape_is_refused_with_the_right_one(answer, reason, to_do):
    with pytest.raises(Unscorable) as raised:
        await score(make_group(None, None), Judge(answer))
    assert raised.value.reason == f"reward Judge {reason}"
    assert str(raised.value) == f"reward Judge {reason} for the group of task 'capital of France'; {to_do}"


def test_the_most_frequent_reason_is_told_for_unscored_runs():
    def unscored(reason):
        return Trajectory(task="t", calls=(), notes={"unscored": reason} if reason else {})

    scored = Trajectory(task="t", calls=(), reward=0.0)
    groups = [Group("t", (unscored("a"), unscored("b"))), Group("t", (unscored("b"), scored))]
    assert why_unscored(groups) == ["b"]
    assert why_unscored([Group("t", (unscored(""), scored))]) == ["the reward does not say why"]
    assert why_unscored([Group("t", (scored,))]) == []


def test_mean_std_is_the_sample_standard_deviation():
    group = advantages(make_group(0.0, 1.0, 2.0), "mean_std")
    assert group.advantages == pytest.approx((-1 / 1.0001, 0, 1 / 1.0001))


def test_mean_leaves_the_scale_of_the_rewards():
    assert advantages(make_group(0.0, 1.0, 2.0), "mean").advantages == pytest.approx((-1, 0, 1))


def test_leave_one_out_compares_a_run_with_the_others():
    rewards = (0.0, 1.0, 5.0)
    others = [(1 + 5) / 2, (0 + 5) / 2, (0 + 1) / 2]
    by_hand = [reward - mean for reward, mean in zip(rewards, others, strict=True)]
    assert advantages(make_group(*rewards), "leave_one_out").advantages == pytest.approx(by_hand)


@pytest.mark.parametrize("how", ["mean_std", "mean", "leave_one_out"])
@given(rewards=st.lists(st.floats(-10, 10) | st.none(), max_size=8))
def test_advantages_add_up_to_zero_and_are_in_the_order_of_the_rewards(how, rewards):
    group = advantages(make_group(*rewards), how)
    assert sum(group.advantages) == pytest.approx(0, abs=1e-6)
    in_order = [
        a for r, a in sorted(zip(rewards, group.advantages, strict=True), key=lambda p: p[0] or 0.0) if r is not None
    ]
    assert in_order == sorted(in_order)
    assert group.call_advantages == ()


def test_unscored_runs_have_no_advantage_and_do_not_move_the_mean():
    assert advantages(make_group(0.0, None, 2.0), "mean").advantages == pytest.approx((-1, 0, 1))


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (None, None), (3.0,), (1.0, None), (), (0.3, 0.1 + 0.2)])
def test_a_group_without_contrast_teaches_nothing(rewards):
    group = make_group(*rewards)
    assert not has_contrast(group)
    assert advantages(group).advantages == (0.0,) * len(rewards)


def test_different_rewards_are_contrast():
    assert has_contrast(make_group(0.0, None, 0.01))


def test_an_unknown_kind_of_advantage_is_refused():
    with pytest.raises(ConfigError, match="must be one of mean_std, mean, leave_one_out, branch, got .median."):
        advantages(make_group(0.0, 1.0), "median")


def call_of(agent=None, reward=None) -> Call:
    return Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.5,), agent=agent, reward=reward)


def run_of(*calls: Call, reward=None) -> Trajectory:
    return Trajectory(task="t", calls=calls, reward=reward)


async def test_a_reward_function_can_reward_single_calls():
    def reward(trajectory):
        trajectory.call_rewards[1] = trajectory.output
        return trajectory.output

    runs = tuple(Trajectory(task="t", calls=(call_of(), call_of()), output=value) for value in (0, 1))
    scored = await score(Group(task="t", trajectories=runs), reward)
    assert [[call.reward for call in t.calls] for t in scored.trajectories] == [[None, 0.0], [None, 1.0]]
    assert [t.call_rewards for t in scored.trajectories] == [{}, {}]
    assert [[call.reward for call in t.calls] for t in runs] == [[None, None]] * 2, "what was given is as it was"


async def test_a_judge_can_reward_single_calls_too():
    class Stepwise:
        async def score(self, group):
            for trajectory in group.trajectories:
                trajectory.call_rewards[0] = np.float32(0.5)
            return [None] * len(group.trajectories)

    scored = await score(Group(task="t", trajectories=(run_of(call_of()),)), Stepwise())
    assert scored.trajectories[0].calls[0].reward == 0.5 and scored.trajectories[0].reward is None


async def test_call_rewards_of_another_reward_function_do_not_linger():
    def stepwise(trajectory):
        trajectory.call_rewards[0] = 1.0
        return 0.0

    group = Group(task="t", trajectories=(run_of(call_of(), call_of(reward=0.25)),))
    await score(group, stepwise)
    scored = await score(group, lambda trajectory: 0.0)
    assert [call.reward for call in scored.trajectories[0].calls] == [None, 0.25]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (2, 1.0, r"call_rewards\[2\].*2 calls"),
        (-1, 1.0, "index"),
        ("a", 1.0, "index"),
        (0, None, "finite"),
        (0, "1", "finite"),
    ],
)
async def test_what_is_no_call_reward_is_refused(index, value, message):
    def stepwise(trajectory):
        trajectory.call_rewards[index] = value
        return 0.0

    with pytest.raises(RewardError, match=message) as caught:
        await score(Group(task="t", trajectories=(run_of(call_of(), call_of()),)), stepwise)
    assert "stepwise set call_rewards[" in str(caught.value)


def test_a_rewarded_call_is_compared_with_rewarded_calls_of_the_same_agent():
    runs = (
        run_of(call_of("plan", 0.0), call_of("write", 10.0), call_of("plan"), reward=1.0),
        run_of(call_of("plan", 1.0), call_of("write", 30.0), call_of("plan", 2.0), reward=3.0),
    )
    group = advantages(Group(task="t", trajectories=runs), "mean")
    assert group.advantages == (-1.0, 1.0)
    assert group.call_advantages == ((-1.0, -10.0, -1.0), (0.0, 10.0, 1.0))


def test_contrast_among_calls_alone_teaches():
    different = tuple(run_of(call_of(reward=value), call_of(), reward=1.0) for value in (0.0, 1.0))
    group = Group(task="t", trajectories=different)
    assert has_contrast(group)
    assert advantages(group, "mean").call_advantages == ((-0.5, 0.0), (0.5, 0.0))
    apart = (run_of(call_of("plan", 0.0)), run_of(call_of("write", 1.0)))
    assert not has_contrast(Group(task="t", trajectories=apart)), "agents are not compared with each other"


def test_rewards_of_runs_are_no_contrast_where_every_call_has_its_own_and_all_are_equal():
    runs = tuple(run_of(call_of(reward=0.5), call_of(reward=0.5), reward=value) for value in (0.0, 1.0))
    assert not has_contrast(Group(task="t", trajectories=runs))
    some = tuple(run_of(call_of(reward=0.5), call_of(), reward=value) for value in (0.0, 1.0))
    assert has_contrast(Group(task="t", trajectories=some)), "the other calls take what the run is worth"


def test_without_rewarded_calls_the_tree_takes_the_trajectorys_advantage():
    group = advantages(Group(task="t", trajectories=(run_of(call_of(), reward=0.0), run_of(call_of(), reward=1.0))))
    assert group.call_advantages == ()


def test_a_run_whose_calls_have_no_reward_either_is_not_scored():
    calls = tuple(Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(0.0,), reward=reward) for reward in (None, 0.0))
    runs = tuple(Trajectory(task="t", calls=calls[:count]) for count in (0, 1, 2))
    assert [bool(why_unscored([Group("t", (run,))])) for run in runs] == [True, True, False]


def test_advantages_that_are_there_say_whether_there_is_contrast():
    group = make_group(1.0, 1.0)
    assert has_contrast(replace(group, advantages=(1.0, -1.0)))
    assert not has_contrast(replace(make_group(0.0, 1.0), advantages=(0.0, 0.0)))


def test_of_a_group_the_calls_of_some_nodes_are_kept_with_the_advantages_of_their_own():
    def run(*agents):
        calls = (Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(0.0,), agent=agent) for agent in agents)
        return Trajectory(task="t", calls=tuple(calls), output=agents)

    group = Group("t", (run("a", "b", "a"), run("b"), run("b", "a")), (1.0, 2.0, 3.0), ((1, 2, 3), (4,), (5, 6)))
    kept = of_nodes(group, ["a"])
    assert kept.trajectories == tuple(calls_of(it, ["a"]) for it in group.trajectories)
    assert [[call.agent for call in it.calls] for it in kept.trajectories] == [["a", "a"], [], ["a"]]
    assert [it.output for it in kept.trajectories] == [it.output for it in group.trajectories]
    assert (kept.advantages, kept.call_advantages) == ((1.0, 2.0, 3.0), ((1, 3), (), (6,)))
    assert of_nodes(group, []) is group and calls_of(group.trajectories[0], []) is group.trajectories[0]
    assert of_nodes(replace(group, call_advantages=()), ["a"]).call_advantages == ()
    for wrong in (((1, 2), (4,), (5, 6)), ((1, 2, 3), (4,))):
        with pytest.raises(ValueError, match="zip"):
            of_nodes(replace(group, call_advantages=wrong), ["a"])
