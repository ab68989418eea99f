"""A run folder belongs to one experiment: the same call resumes it, another call is refused or recorded as a change."""

import asyncio
import importlib.util
import json
import re

import pytest
from reward_fakes import cancelled_at, lines_of, right, settings, told_display, unlike

import art_core as art
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import FakeEngine, ScriptedAgent

TASKS = ["a", "b"]


def train(tmp_path, agent=None, tasks=TASKS, **more):
    arguments = {"reward": unlike, "eval_tasks": ["x"], "eval_reward": right, **more}
    return art.train(agent or ScriptedAgent(), tasks, **settings(tmp_path, **arguments))


def rows(error):
    """Return the table of a refusal: name -> (recorded, passed)."""
    table = str(error.value).split("\n\n")[1].splitlines()
    columns = [re.split(r"  +", line) for line in table]
    assert columns[0] == ["setting", "recorded", "passed"]
    return {name: (recorded, passed) for name, recorded, passed in columns[1:]}


async def other(task, address):
    return await ScriptedAgent()(task, address)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"agent": other}, "agent"),
        ({"agent": ScriptedAgent(), "tasks": ["a", "b", "c"]}, "tasks"),
        ({"reward": right}, "reward"),
        ({"eval_reward": unlike}, "eval_reward"),
        ({"eval_tasks": ["y"]}, "eval_tasks"),
        ({"to_output": str}, "to_output"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"loss": "dapo"}, "loss"),
    ],
)
@pytest.mark.parametrize("steps", [2, 3])
async def test_another_call_is_refused_before_the_engine_starts_with_what_differs(tmp_path, changed, name, steps):
    await train(tmp_path)
    before = (tmp_path / "run" / "report.json").read_bytes()
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=r"holds another experiment \(2 steps done\)") as error:
        await train(tmp_path, **changed, steps=steps, engine=engine)
    assert set(rows(error)) == {name}
    assert (tmp_path / "run" / "report.json").read_bytes() == before and not engine.stopped and not engine.requests


async def test_a_refusal_lists_all_that_differs_and_what_to_do(tmp_path):
    await train(tmp_path)
    with pytest.raises(ConfigError) as error:
        await train(tmp_path, other, ["c"], reward=right, learning_rate=1e-3, steps=5)
    table = rows(error)
    assert set(table) == {"agent", "tasks", "reward", "learning_rate"}
    assert table["agent"][0] == "ScriptedAgent" and table["agent"][1].startswith("other (source ")
    assert table["learning_rate"] == ("None", "0.001") and table["tasks"][0].startswith("2 tasks (")
    assert all(advice in str(error.value) for advice in ("another run_dir", "repeat the call", "allow_changes=True"))
    assert "restore the files of agent, tasks, reward if they were edited, and repeat the call" in str(error.value)
    with pytest.raises(ConfigError, match="To continue with what is recorded, repeat the call"):
        await train(tmp_path, learning_rate=1e-3, steps=5)


async def test_a_name_is_not_evaluated_in_the_folder_of_a_trained_run(tmp_path):
    await train(tmp_path)
    measured = {
        "model": "tiny",
        "reward": right,
        "run_dir": tmp_path / "run",
        "engine": FakeEngine(),
        "progress": False,
    }
    with pytest.raises(ConfigError, match="holds a trained run; pass it as model="):
        await art.evaluate(ScriptedAgent(), ["x"], **measured)
    with Store(tmp_path / "run" / "run.sqlite") as store:
        assert store.meta("reward") == "unlike"


async def test_a_finished_run_returns_its_result_and_keeps_its_report(tmp_path):
    first = await train(tmp_path)
    before = (tmp_path / "run" / "report.json").read_bytes()
    output, screen = told_display()
    engine = FakeEngine()
    again = await train(tmp_path, steps=1, engine=engine, max_concurrent=2, progress=screen)
    assert (tmp_path / "run" / "report.json").read_bytes() == before and not engine.requests
    assert again.report == json.loads(before) and again.report["config"]["steps"] == 2
    assert "all 2 steps are done already" in output.getvalue()
    assert again.after.mean_reward == first.after.mean_reward


async def test_a_report_older_than_the_training_is_written_again(tmp_path):
    await train(tmp_path)
    file = tmp_path / "run" / "report.json"
    stale = file.read_bytes()
    await train(tmp_path, steps=3)
    file.write_bytes(stale)
    assert (await train(tmp_path, steps=3)).report["steps"] == json.loads(file.read_text())["steps"] == 3


async def test_more_steps_are_the_same_experiment(tmp_path):
    await train(tmp_path)
    result = await train(tmp_path, steps=4)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4] and result.report["changes"] == []


async def test_allowed_changes_are_recorded_with_their_step_and_become_the_experiment(tmp_path):
    await train(tmp_path)
    changed = {"reward": right, "learning_rate": 1e-3, "steps": 3}
    result = await train(tmp_path, other, **changed, allow_changes=True)
    [change] = result.report["changes"]
    assert change["step"] == 2 and set(change["changed"]) == {"agent", "reward", "learning_rate"}
    assert change["changed"]["learning_rate"] == [None, 1e-3]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["changes"] == [change]
    assert result.report["reward"] == "right" and result.report["config"]["learning_rate"] == 1e-3
    again = await train(tmp_path, other, **{**changed, "steps": 4})
    assert again.report["changes"] == [change]
    with pytest.raises(ConfigError, match="holds another experiment"):
        await train(tmp_path, steps=4)


async def test_changes_that_no_step_was_trained_with_are_not_recorded(tmp_path):
    await train(tmp_path)
    before = (tmp_path / "run" / "report.json").read_bytes()
    result = await train(tmp_path, other, reward=right, learning_rate=1e-3, allow_changes=True)
    assert (tmp_path / "run" / "report.json").read_bytes() == before and result.report["changes"] == []
    await train(tmp_path, steps=3)
    result = await train(tmp_path, steps=3, eval_tasks=["x", "y"], allow_changes=True)
    assert [list(change["changed"]) for change in result.report["changes"]] == [["eval_tasks"]]


async def test_rollouts_that_another_reward_scored_before_an_allowed_change_are_scored_again(tmp_path):
    stuck = asyncio.Event()

    def first():
        async def score(trajectory):
            if trajectory.task == "b":
                stuck.set()
                await asyncio.Event().wait()
            return unlike(trajectory)

        return score

    def second():
        def score(trajectory):
            scored.append(trajectory.task)
            return unlike(trajectory)

        return score

    scored, common = [], {"tasks_per_step": 2, "steps": 1}
    training = art.train(ScriptedAgent(), TASKS, **settings(tmp_path, reward=first(), **common))
    await cancelled_at(stuck, training, tmp_path / "run", scored=2, split="train")
    engine = FakeEngine()
    common |= {"reward": second(), "engine": engine, "allow_changes": True}
    await art.train(ScriptedAgent(), TASKS, **settings(tmp_path, **common))
    assert sorted(scored) == ["a", "a", "b", "b"] and engine.requests == []


def reward_of(folder, body):
    """Return the reward of a file that is written now."""
    file = folder / "rewards.py"
    file.write_text(f"def score(trajectory):\n    {body}\n")
    spec = importlib.util.spec_from_file_location("rewards", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


async def test_an_edited_reward_is_refused_but_an_edited_comment_is_not(tmp_path):
    body = "return int(trajectory.rollout_id[:8], 16)"
    await train(tmp_path, reward=reward_of(tmp_path, body))
    await train(tmp_path, reward=reward_of(tmp_path, f"{body}  # unlike all others"), steps=3)
    with pytest.raises(ConfigError, match="if an edit of the source does not change what it computes") as error:
        await train(tmp_path, reward=reward_of(tmp_path, f"{body} + 1"), steps=4)
    recorded, passed = rows(error)["reward"]
    assert recorded != passed and all(re.fullmatch(r"score \(source \w{8}\)", text) for text in (recorded, passed))


async def test_a_dry_run_does_not_begin_the_folder(tmp_path):
    await art.train(other, ["c"], **settings(tmp_path, reward=right, dry_run=True, learning_rate=1e-3))
    assert (await train(tmp_path)).report["steps"] == 2
