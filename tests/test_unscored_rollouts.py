"""Runs that could not be scored: counted, explained, never trained on; and what a person is told of rewards."""

import io

import pytest
from reward_fakes import Judge, lines_of, right, settings, told_display
from rich.console import Console

import art_core as art
from art_cli.summary import print_result
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import FakeEngine, ScriptedAgent


async def test_unscored_groups_are_counted_and_the_reason_is_said_once(tmp_path):
    class Half:
        async def score(self, group):
            if group.task == "a":
                return [0.0, None]
            for trajectory in group.trajectories:
                trajectory.notes["unscored"] = "the answer has no JSON"
            return [None, None]

    told, screen = told_display()
    await art.train(
        ScriptedAgent(), ["a", "b", "c"], **settings(tmp_path, reward=Half(), tasks_per_step=3, progress=screen)
    )
    assert [(line["groups_unscored"], line["unscored"]) for line in lines_of(tmp_path)] == [(2.0, 5.0)] * 2
    assert told.getvalue().count("rollouts could not be scored: the answer has no JSON") == 1
    assert told.getvalue().count("unscored rollouts 5") == 2


class Refuses:
    """Scores nothing, until it is told to."""

    name = "a judge of mine"
    works = False

    async def score(self, group):
        for trajectory in group.trajectories:
            trajectory.notes["unscored"] = "the judge refuses the key"
        return [float(place) if self.works else None for place in range(len(group.trajectories))]


async def test_training_ends_in_good_order_where_three_steps_in_a_row_could_not_be_scored_and_can_go_on(tmp_path):
    told, screen = told_display()
    judge = Refuses()
    common = {"reward": judge, "steps": 6, "progress": screen}
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **common))
    assert result.report["steps"] == 3
    assert (
        "after step 3 of 6: no rollout of the last 3 steps could be scored (the judge refuses the key)"
        in told.getvalue()
    )
    assert "taught nothing" not in told.getvalue() and result.report["stopped"]["may_pass"]
    judge.works = True
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **common))
    assert result.report["steps"] == 6


@pytest.mark.parametrize(("most", "steps"), [(2, 2), (5, 5), (None, 6)])
async def test_how_many_unscored_steps_end_training_is_a_setting(tmp_path, most, steps):
    given = settings(tmp_path, reward=Refuses(), steps=6, max_unscored_steps=most)
    result = await art.train(ScriptedAgent(), ["a"], **given)
    assert result.report["steps"] == steps and bool(result.report["stopped"]) == (most is not None)


async def test_rewards_of_calls_alone_are_enough_to_go_on(tmp_path):
    class OfCalls:
        async def score(self, group):
            for place, trajectory in enumerate(group.trajectories):
                trajectory.call_rewards[0] = float(place)
            return [None] * len(group.trajectories)

    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=OfCalls(), steps=4))
    assert result.report["steps"] == 4
    assert [line["groups_with_contrast"] for line in lines_of(tmp_path)] == [1.0] * 4


async def test_what_cannot_score_is_told_before_the_engine_starts(tmp_path):
    class Engine(FakeEngine):
        started = False

        async def start(self):
            Engine.started = True

    class Unusable(Judge):
        def begin(self, run_dir):
            raise ConfigError("the judge needs a key")

    for reward, said in ((Unusable(), "the judge needs a key"), ("nobody", "there is no reward named 'nobody'")):
        with pytest.raises(ConfigError, match=said):
            await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=reward, engine=Engine()))
    assert not Engine.started


async def test_a_report_says_which_reward_and_what_it_took(tmp_path):
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=Judge()))
    shown = io.StringIO()
    print_result(result, Console(file=shown, width=200), ())
    assert result.report["reward"] == "Judge"
    assert f"Judge: {', '.join(f'{name} {it:g}' for name, it in result.report['account'].items())}" in shown.getvalue()
    judge = Refuses()
    judge.works = True
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path / "named", reward=judge))
    assert result.report["reward"] == "a judge of mine"
    with Store(tmp_path / "named" / "run" / "run.sqlite") as store:
        assert {it.by for rollout in store.rollouts() for it in store.scores(rollout.rollout_id)} == {"a judge of mine"}


async def test_the_advice_names_the_reason_where_no_run_could_be_scored(tmp_path):
    told, screen = told_display()

    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=Refuses(), steps=3, progress=screen))
    assert "no rollout of the last one could be scored (the judge refuses the key)" in told.getvalue()
    assert "easier tasks" not in told.getvalue()


async def test_an_evaluation_tells_how_many_runs_could_not_be_scored(tmp_path):
    class Every:
        async def score(self, group):
            return [None if group.task == "b" else 1.0]

    told, screen = told_display()
    common = {"eval_tasks": ["a", "b"], "eval_reward": Every(), "reward": right, "progress": screen, "steps": 1}
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **common))
    assert result.report["after"]["unscored"] == result.after.unscored == 1
    assert told.getvalue().count("rollouts could not be scored: the reward does not say why") == 1
    assert told.getvalue().count("on 2 tasks, 1 unscored rollout") == 2, "at every evaluation"
    shown = io.StringIO()
    print_result(result, Console(file=shown, width=200), ())
    assert "unscored runs" in shown.getvalue()
    clean = await art.train(
        ScriptedAgent(), ["a"], **settings(tmp_path / "clean", **{**common, "eval_reward": right, "progress": False})
    )
    shown = io.StringIO()
    print_result(clean, Console(file=shown, width=200), ())
    assert "unscored" not in shown.getvalue()


async def test_an_evaluation_that_is_measured_again_stays_the_first_of_its_temperatures(tmp_path):
    class FailsOnce:
        calls = 0

        async def score(self, group):
            self.calls += 1
            return [None if self.calls == 3 else 1.0]

    common = {
        "eval_tasks": ["a"],
        "eval_reward": FailsOnce(),
        "reward": right,
        "steps": 1,
        "eval_temperatures": (0.5, 1),
    }
    for unscored in (1, 0):
        result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **common))
        rows = [(it["name"], it["temperature"], it["unscored"]) for it in result.report["evaluations"]]
        assert rows == [("before", 0.5, 0), ("before", 1, 0), ("after", 0.5, unscored), ("after", 1, 0)]
    assert result.report["before"]["temperature"] == result.report["after"]["temperature"] == 0.5
