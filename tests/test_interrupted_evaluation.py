"""A repeated call reuses what an interrupted evaluation recorded; a reward that raises leaves one rollout unscored."""

import asyncio

import pytest
from reward_fakes import cancelled_at, settings, told_display

import art_core as art
from art_core.errors import RewardError
from art_core.store import Store
from art_core.testing import FakeEngine, ScriptedAgent

TASKS = ["a", "b", "c", "d"]


class Stuck:
    """An agent that finishes ``limit`` rollouts and then hangs."""

    def __init__(self, limit):
        self.limit, self.runs, self.stopped = limit, 0, asyncio.Event()

    async def __call__(self, task, address):
        self.runs += 1
        if self.runs > self.limit:
            self.stopped.set()
            await asyncio.Event().wait()
        return await ScriptedAgent()(task, address)


def one(trajectory):
    return 1.0


def evaluate(tmp_path, agent=None, tasks=TASKS, **more):
    arguments = {"reward": one, "engine": FakeEngine(), "run_dir": tmp_path / "eval", "progress": False, **more}
    return art.evaluate(agent or ScriptedAgent(), tasks, model="tiny", **arguments)


async def test_the_same_call_after_an_interruption_runs_the_agent_on_the_remaining_tasks_only(tmp_path):
    output, screen = told_display()
    agent = Stuck(3)
    await cancelled_at(agent.stopped, evaluate(tmp_path, agent, progress=screen), tmp_path / "eval", finished=3)
    assert "to continue, repeat the call with run_dir=" in output.getvalue()
    agent.limit, engine = 100, FakeEngine()
    report = await evaluate(tmp_path, agent, engine=engine, progress=screen)
    assert len(engine.requests) == 1 and agent.runs == 5
    assert [t.task for t in report.trajectories] == TASKS and report.mean_reward == 1.0
    assert "continuing with the answers recorded before" in output.getvalue()
    again = FakeEngine()
    await evaluate(tmp_path, agent, engine=again)
    assert len(again.requests) == 4, "a finished evaluation runs again"


@pytest.mark.parametrize("other", [{"tasks": [*TASKS, "e"]}, {"temperature": 0.5}, {"max_tokens": 7}])
async def test_another_call_after_an_interruption_starts_over(tmp_path, other):
    agent = Stuck(3)
    await cancelled_at(agent.stopped, evaluate(tmp_path, agent), tmp_path / "eval", finished=3)
    agent.limit, engine = 100, FakeEngine()
    report = await evaluate(tmp_path, agent, engine=engine, **other)
    assert len(engine.requests) == len(report.trajectories)


async def test_scores_are_kept_and_a_corrected_reward_scores_all_without_running_the_agent(tmp_path):
    scored, stuck = [], asyncio.Event()

    def first():
        async def score(trajectory):
            if trajectory.task == "d" and not stuck.is_set():
                stuck.set()
                await asyncio.Event().wait()
            scored.append(trajectory.task)
            return 1.0

        return score

    def corrected():
        def score(trajectory):
            scored.append(trajectory.task)
            return 2.0

        return score

    await cancelled_at(stuck, evaluate(tmp_path, reward=first()), tmp_path / "eval", scored=3)
    assert sorted(scored) == ["a", "b", "c"]
    engine = FakeEngine()
    await evaluate(tmp_path, reward=first(), engine=engine)
    assert sorted(scored) == TASKS and engine.requests == []
    stuck.clear()
    await cancelled_at(stuck, evaluate(tmp_path, reward=first()), tmp_path / "eval", scored=4 + 3)
    scored.clear()
    report = await evaluate(tmp_path, reward=corrected(), engine=engine)
    assert sorted(scored) == TASKS and report.mean_reward == 2.0 and engine.requests == []


async def test_a_reward_that_raises_for_one_rollout_leaves_only_that_one_unscored(tmp_path):
    def picky(trajectory):
        if trajectory.task == "b":
            raise KeyError("answer")
        return 1.0

    output, screen = told_display()
    report = await evaluate(tmp_path, reward=picky, progress=screen)
    assert (report.unscored, report.mean_reward) == (1, 1.0)
    assert "rollouts could not be scored: reward" in output.getvalue()
    assert "raised KeyError: 'answer' (" in output.getvalue()
    with Store(tmp_path / "eval" / "run.sqlite") as store:
        [reason] = [t.notes["unscored"] for t in store.trajectories() if t.reward is None]
    assert "raised KeyError" in reason


async def test_a_judge_that_raises_for_one_group_leaves_that_group_unscored(tmp_path):
    class Judge:
        async def score(self, group):
            if group.task == "b":
                raise OSError("no network")
            return [1.0]

    assert (await evaluate(tmp_path, reward=Judge())).unscored == 1


async def test_a_reward_that_raises_for_all_is_an_error_and_the_corrected_one_reuses_the_answers(tmp_path):
    def broken(trajectory):
        return trajectory.output["answer"]

    output, screen = told_display()
    with pytest.raises(RewardError, match=r"broken raised TypeError.* for rollout \w+ of task"):
        await evaluate(tmp_path, reward=broken, progress=screen)
    assert "to continue, repeat the call with run_dir=" in output.getvalue()
    engine = FakeEngine()
    assert (await evaluate(tmp_path, reward=one, engine=engine)).mean_reward == 1.0
    assert engine.requests == []


async def test_a_reward_that_raises_for_the_one_rollout_left_to_score_does_not_raise_for_all(tmp_path):
    stuck = asyncio.Event()

    async def picky(trajectory):
        if trajectory.task == "b":
            raise KeyError("answer")
        if trajectory.task == "d" and not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()
        return 1.0

    await cancelled_at(stuck, evaluate(tmp_path, reward=picky), tmp_path / "eval", scored=2)
    with Store(tmp_path / "eval" / "run.sqlite") as store:
        [late] = [t for t in store.trajectories() if t.task == "d"]
        store.add_scores([late.rollout_id], [1.0], by="picky")
    assert (await evaluate(tmp_path, reward=picky)).unscored == 1


async def test_training_continues_if_a_reward_raises_for_some_rollouts(tmp_path):
    def picky(trajectory):
        seen.append(trajectory)
        if len(seen) % 4 == 1:
            raise ValueError("no number in the answer")
        return float(len(seen))

    seen = []
    output, screen = told_display()
    arguments = settings(tmp_path, reward=picky, group_size=4, steps=3, progress=screen)
    result = await art.train(ScriptedAgent(), ["a"], **arguments)
    assert result.report["steps"] == 3 and output.getvalue().count("raised ValueError: no number in the answer") == 1


async def test_evaluations_of_a_training_run_keep_their_scores_too(tmp_path):
    scored, stuck = [], asyncio.Event()

    async def score(trajectory):
        if trajectory.task == "y" and not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()
        scored.append(trajectory.task)
        return 1.0

    async def train(engine):
        more = {"reward": one, "eval_reward": score, "eval_tasks": ["x", "y", "z"], "engine": engine, "steps": 1}
        return await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **more))

    await cancelled_at(stuck, train(FakeEngine()), tmp_path / "run", scored=2)
    assert sorted(scored) == ["x", "z"]
    result = await train(FakeEngine())
    assert sorted(scored) == ["x", "x", "y", "y", "z", "z"] and result.before.mean_reward == 1.0
