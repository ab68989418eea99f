"""``art.weighted`` and metered rewards: the sum, its parts, and how a run ends when a judge's budget is spent."""

import asyncio
import copy
import json
import math
import pickle

import pytest
from reward_fakes import Judge, group_of, lines_of, offering, right, settings, told_display

import art_core as art
from art_core.errors import ConfigError, RewardError
from art_core.loop.rewards import Rewards
from art_core.plugins import Plugins
from art_core.scoring import score
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Group

# The sum


async def test_weights_are_not_normalized_and_every_part_is_a_metric():
    both = art.weighted(judge=(2.0, Judge(0.25)), right=(-0.5, right), seen=(0, lambda trajectory: 9))
    scored = await score(group_of(0, 1), both)
    assert [t.reward for t in scored.trajectories] == [0.5, 0.0]
    assert scored.trajectories[1].metrics == {
        "success": 1.0,
        "reward/judge": 0.25,
        "reward/right": 1.0,
        "reward/seen": 9.0,
    }
    assert scored.trajectories[1].notes == {"judge": "worth 0.25"}


async def test_parts_score_concurrently():
    meeting = asyncio.Barrier(2)

    async def waits(trajectory):
        await meeting.wait()
        return 1.0

    scored = await asyncio.wait_for(score(group_of(0), art.weighted(a=(1, waits), b=(1, waits))), 60)
    assert scored.trajectories[0].reward == 2.0


async def test_a_rollout_that_one_part_leaves_unscored_is_unscored_and_the_part_is_named():
    class Silent:
        async def score(self, group):
            return [None, 1.0]

    parts = {"judge": (1, Judge(budget=0)), "silent": (1, Silent()), "right": (1, right)}
    first, second = (await score(group_of(0, 1), art.weighted(**parts))).trajectories
    assert first.reward is None and second.reward is None
    assert first.notes == {"unscored": "judge: the budget is spent; silent: the reward does not say why"}
    assert second.notes == {"unscored": "judge: the budget is spent"}
    assert second.metrics == {"success": 1.0, "reward/silent": 1.0, "reward/right": 1.0}
    again = await score(Group("t", (first, second)), art.weighted(right=(1, right)))
    assert again.trajectories[0].metrics["reward/right"] == 0.0
    assert [t.notes for t in again.trajectories] == [{}, {}], "a reason of an earlier scoring stayed"


async def test_rewards_of_single_calls_add_up_with_the_weights():
    def first(trajectory):
        trajectory.call_rewards[0] = 1
        return 0.0

    def both(trajectory):
        trajectory.call_rewards.update({0: 0.5, 1: 3.0})
        return 0.0

    scored = await score(group_of(0), art.weighted(first=(0.5, first), both=(2.0, both)))
    assert [call.reward for call in scored.trajectories[0].calls] == [1.5, 6.0]


async def test_a_metric_name_that_two_parts_use_belongs_to_the_first_and_the_other_is_prefixed():
    def strict(trajectory):
        trajectory.metrics["success"] = 0.0
        return 0.0

    parts = {"right": (1, right), "strict": (1, strict), "one": (1, Judge(0.1)), "two": (1, Judge(0.2))}
    (scored,) = (await score(group_of(1), art.weighted(**parts))).trajectories
    assert scored.metrics["success"] == 1.0 and scored.metrics["strict/success"] == 0.0
    assert scored.notes == {"judge": "worth 0.1", "two/judge": "worth 0.2"}
    (again,) = (await score(Group("t", (scored,)), art.weighted(**parts))).trajectories
    assert (again.metrics, again.notes) == (scored.metrics, scored.notes), "scoring again changed them"


async def test_a_value_of_an_earlier_scoring_does_not_replace_a_missing_one():
    (scored,) = (await score(group_of(1), art.weighted(judge=(1, Judge()), right=(1, right)))).trajectories
    assert scored.metrics["reward/judge"] == 0.5
    (scored,) = (
        await score(Group("t", (scored,)), art.weighted(judge=(1, Judge(budget=0)), right=(1, right)))
    ).trajectories
    assert scored.metrics == {"success": 1.0, "reward/right": 1.0}


async def test_a_part_does_not_see_what_another_adds_and_earlier_metrics_stay():
    def adds(trajectory):
        assert trajectory.metrics == {} and trajectory.notes == {}
        trajectory.metrics.update(steps=2.0)
        return pickle.loads(pickle.dumps(trajectory)).metrics["steps"] + copy.deepcopy(trajectory).metrics["steps"]

    group = group_of(1)
    group.trajectories[0].metrics["tool_calls"] = 5.0
    (scored,) = (await score(group, art.weighted(right=(1, right), adds=(1, adds)))).trajectories
    assert scored.metrics == {"tool_calls": 5.0, "success": 1.0, "steps": 2.0, "reward/right": 1.0, "reward/adds": 4.0}


async def test_a_sum_may_be_a_part_and_its_parts_are_metrics_too():
    inner = art.weighted(right=(1, right), judge=(1, Judge(0.5)))
    (scored,) = (await score(group_of(1), art.weighted(inner=(0.5, inner), right=(0.25, right)))).trajectories
    assert scored.reward == 1.0
    assert scored.metrics["reward/inner"] == 1.5 and scored.metrics["reward/judge"] == 0.5
    assert scored.metrics["reward/right"] == 1.0 and scored.metrics["inner/reward/right"] == 1.0


async def test_an_error_of_a_part_names_the_part():
    def wrong(trajectory):
        return "good"

    with pytest.raises(RewardError, match="wrong returned 'good'"):
        await score(group_of(0), art.weighted(right=(1, right), wrong=(1, wrong)))
    with pytest.raises(RewardError, match=r"part 'judge' of art.weighted\(judge=1\) is a name, 'ruler'.*run.score"):
        await score(group_of(0), art.weighted(judge=(1, "ruler")))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "no parts"),
        ({"right": right}, "part 'right'.*NAME=.weight, reward."),
        ({"right": (1, right, 2)}, "part 'right'"),
        ({"right": (right, 1)}, "part 'right'"),
        ({"right": (math.nan, right)}, r"part 'right' .* is \(nan, .*a weight is a finite number"),
        ({"right": (True, right)}, "part 'right'"),
        ({"right": (1, 3)}, r"part 'right' .* is \(1, 3\);.* a reward is a function"),
        ({"right": (1, Judge)}, "part 'right'"),
    ],
)
def test_invalid_parts_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        art.weighted(**parts)


# In a run


def test_a_plugin_that_registers_a_reward_instead_of_a_factory_is_refused(tmp_path):
    class Plugin:
        @art.hookimpl
        def register_rewards(self, register):
            register("right", right)

    with pytest.raises(ConfigError, match=r"must register a factory: register\('right', lambda: right\)"):
        Rewards(Plugins(Plugin(), installed=False), tmp_path).find("right")


async def test_names_of_parts_are_resolved_before_anything_runs(tmp_path):
    judge, engine = Judge(), FakeEngine()
    common = settings(tmp_path, engine=engine, plugins=offering(judge=judge))
    with pytest.raises(
        ConfigError, match=r"part 'mine' of art.weighted\(mine=1\): there is no reward named 'jugde'.*'judge'"
    ):
        await art.train(ScriptedAgent(), ["a"], reward=art.weighted(mine=(1, "jugde")), **common)
    with pytest.raises(ConfigError, match="there is no reward named 'jugde'"):
        await art.train(ScriptedAgent(), ["a"], reward=judge, eval_reward="jugde", **common)
    assert engine.requests == []
    await art.train(ScriptedAgent(), ["a"], reward=art.weighted(mine=(1, "judge"), more=(1, lambda t: 1.0)), **common)
    assert [line["reward/mine"] for line in lines_of(tmp_path)] == [0.5, 0.5]
    assert [line["reward"] for line in lines_of(tmp_path)] == [1.5, 1.5]


@pytest.mark.parametrize("wrong", [Judge, 3])
async def test_an_object_that_is_not_a_reward_is_refused_before_anything_runs(tmp_path, wrong):
    engine = FakeEngine()
    with pytest.raises(RewardError, match="isn't a reward; pass a function"):
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, engine=engine, reward=wrong))
    with pytest.raises(RewardError, match="isn't a reward; pass a function"):
        await art.evaluate(
            ScriptedAgent(), ["a"], model="tiny", reward=wrong, engine=engine, progress=False, run_dir=tmp_path / "eval"
        )
    assert engine.requests == []


async def test_notes_reach_the_store_and_a_sum_is_named_after_its_parts(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        groups = await run.collect(ScriptedAgent(), ["a"], group_size=2)
        scored = await run.score(groups, art.weighted(judge=(1, Judge())))
        run_id = scored[0].trajectories[0].rollout_id
        assert run.store.trajectory(run_id).notes == {"judge": "worth 0.5"}
        assert [score.by for score in run.store.scores(run_id)] == ["weighted(judge=1)"]


async def test_the_cost_of_a_reward_counts_once_however_often_it_is_used(tmp_path):
    judge, other = Judge(), Judge()
    both = art.weighted(judge=(0.5, "judge"), again=(0.5, judge), other=(1, other))
    more = {"eval_reward": judge, "eval_tasks": ["x"], "plugins": offering(judge=judge)}
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=both, **more))
    assert judge.begun == other.begun == [tmp_path / "run"]
    # One evaluation before, then twice a step and once.
    assert [line["judge/cost"] for line in lines_of(tmp_path)] == [4.0, 7.0]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["account"] == {"judge/cost": 8.0} and report["exhausted"] is None


def test_a_sum_costs_what_its_parts_cost(tmp_path):
    judge, other = Judge(budget=2), Judge()
    both = art.weighted(a=(1, judge), b=(1, judge), inner=(1, art.weighted(c=(1, other), right=(1, right))))
    rewards = Rewards(Plugins(installed=False), tmp_path)
    rewards.find(both)
    rewards.begin()
    judge.spent, other.spent = 1.0, 4.0
    assert judge.begun == other.begun == [tmp_path]
    assert rewards.account() == {"judge/cost": 5.0} and rewards.exhausted(both) is None
    judge.spent = 2.0
    assert rewards.exhausted(both) == rewards.exhausted() == judge.exhausted()
    assert rewards.exhausted(other) is None and rewards.exhausted(art.weighted(right=(1, right))) is None


async def test_costs_do_not_overwrite_the_metrics_of_the_step(tmp_path):
    class Odd(Judge):
        def account(self):
            return {"reward": 7.0, "calls": 8.0}

    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=Odd(), steps=1))
    (line,) = lines_of(tmp_path)
    assert (line["reward"], line["calls"], line["account/reward"], line["account/calls"]) == (0.5, 2.0, 7.0, 8.0)


@pytest.mark.system
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_run_ends_cleanly_when_the_budget_is_spent_and_resumes_with_a_larger_one(tmp_path, max_staleness):
    output, screen = told_display()
    judge = Judge(value=float, budget=3)
    common = {"steps": 6, "eval_tasks": ["x"], "eval_reward": right, "max_staleness": max_staleness}
    reward = art.weighted(judge=(1, judge))
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=reward, progress=screen, **common))
    done = result.report["steps"]
    assert done == 3 if not max_staleness else 1 <= done <= 3, "with rollouts ahead, later steps spend some of it"
    assert f"training ends after step {done} of 6: the budget of the judge is spent, raise it" in output.getvalue()
    assert f"run_dir='{tmp_path / 'run'}'" in output.getvalue()
    assert result.after is not None and result.report["exhausted"] == judge.exhausted()
    assert len(lines_of(tmp_path)) == done

    still = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=reward, **common))
    assert still.report["steps"] == done, "rolled out what cannot be scored"
    judge.budget = 100
    more = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=reward, **common))
    assert more.report["steps"] == 6 and more.report["exhausted"] is None
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


async def test_a_spent_budget_of_the_evaluation_reward_ends_evaluations_but_not_training(tmp_path):
    output, screen = told_display()
    more = {"eval_reward": Judge(budget=2), "eval_tasks": ["x"], "eval_every": 1, "steps": 4, "progress": screen}
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=right, **more))
    assert result.report["steps"] == 4 and result.after is None
    assert [(row["name"], row["unscored"]) for row in result.report["evaluations"]] == [("before", 0), ("step 1", 0)]
    assert "evaluation 'after' is skipped: the budget of the judge is spent, raise it" in output.getvalue()


async def test_no_step_follows_an_evaluation_that_spends_the_budget(tmp_path):
    common = {"eval_tasks": ["x", "y"], "eval_every": 1, "steps": 3}
    short = settings(tmp_path, reward=Judge(value=float, budget=5), **common)
    assert (await art.train(ScriptedAgent(), ["a"], **short)).report["steps"] == 1
    assert len(short["engine"].requests) == 2 + 2 + 2
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=Judge(value=float), **common))
    assert [line["unscored"] for line in lines_of(tmp_path)] == [0.0, 0.0, 0.0]
    assert result.report["after"]["unscored"] == 0


@pytest.mark.parametrize(("steps", "budget"), [(1, 1), (1, 4)], ids=["before", "after"])
async def test_an_evaluation_that_could_not_be_scored_is_repeated_when_the_run_resumes(tmp_path, steps, budget):
    common = {"eval_tasks": ["x", "y"], "steps": steps}
    short = await art.train(
        ScriptedAgent(), ["a"], **settings(tmp_path, reward=Judge(value=float, budget=budget), **common)
    )
    assert sum(row["unscored"] for row in short.report["evaluations"]) == 1
    more = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=Judge(value=float), **common))
    assert [(row["name"], row["unscored"]) for row in more.report["evaluations"]] == [("before", 0), ("after", 0)]


async def test_a_spent_budget_ends_extra_rounds_too(tmp_path):
    output, screen = told_display()
    more = {"steps": 3, "dynamic_sampling": True, "max_extra_rounds": 50, "progress": screen}
    await art.train(ScriptedAgent(), ["a", "b"], **settings(tmp_path, reward=Judge(budget=2), **more))
    assert [line["groups_sampled"] for line in lines_of(tmp_path)] == [2]
    assert "max_extra_rounds" not in output.getvalue()
