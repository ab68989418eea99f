"""How a run stands or ended, why, and what it gained, as the pages are told it."""

import asyncio
import os
from contextlib import suppress

import pytest
from recorded_runs import record

import art_core as art
from art_core.errors import RewardError
from art_core.store import Store
from art_core.store.run_folder import claimed
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_server import reading
from art_server.folders import RunFolders
from art_server.read_routes import read_routes
from art_server.responses import Page
from art_server.store_view import RolloutFilter


def evaluation(name, step, temperature, success, **more):
    return {"name": name, "step": step, "temperature": temperature, "success": success, **more}


def folder_with(path, *, steps=0, **meta):
    path.mkdir(parents=True, exist_ok=True)
    with Store(path / "run.sqlite") as store:
        for key, value in {"reward": "right", "learner": "TorchLearner", "planned_steps": 5, **meta}.items():
            store.set_meta(key, value)
        for step in range(1, steps + 1):
            store.add_step(step, {"reward": float(step)})
    return path


def ended(folder):
    it = reading.run_summary("run", folder)
    assert it.problem is None
    return it.status, it.reason


def test_before_and_after_are_of_one_temperature(tmp_path):
    found = [
        evaluation("before", 0, 1.0, 0.207),
        evaluation("before", 0, None, 0.093),
        evaluation("step 25", 25, 1.0, 0.5),
        evaluation("after", 50, 1.0, 0.747),
        evaluation("after", 50, None, 0.843),
    ]
    it = reading.run_summary("run", folder_with(tmp_path, evaluations=found))
    assert [(pair.temperature, pair.before["success"], pair.after["success"]) for pair in it.pairs] == [
        (1.0, 0.207, 0.747),
        (None, 0.093, 0.843),
    ]
    assert (it.before["success"], it.after["success"]) == (0.207, 0.747)


def test_a_run_under_way_is_compared_with_its_newest_evaluation(tmp_path):
    found = [
        evaluation("before", 0, None, 0.1),
        evaluation("after", 10, None, 0.3),
        evaluation("step 20", 20, None, 0.6),
    ]
    it = reading.run_summary("run", folder_with(tmp_path, evaluations=found))
    assert [(pair.before["step"], pair.after["step"]) for pair in it.pairs] == [(0, 20)] and it.after is None


@pytest.mark.parametrize(
    ("steps", "meta", "status", "reason"),
    [
        (5, {"ended": ""}, "finished", None),
        (5, {}, "finished", None),
        (3, {"ended": "", "stopped": {"step": 3, "reason": "all rewards are equal"}}, "stopped", "all rewards are equal"),
        (3, {"stopped": {"step": 3, "reason": "all rewards are equal"}}, "stopped", "all rewards are equal"),
        (3, {"ended": "CancelledError"}, "stopped", "interrupted"),
        (3, {"ended": "RewardError: no judge"}, "crashed", "RewardError: no judge"),
        (3, {"ended": None}, "crashed", "killed"),
        (4, {"ended": None, "stopped": {"step": 3, "reason": "before that"}}, "crashed", "killed"),
        (3, {"ended": None, "stopped": {"step": 3, "reason": "before it was resumed"}}, "crashed", "killed"),
        (3, {}, "crashed", "no reason was recorded"),
        (0, {"ended": "", "planned_steps": None, "dry_run": True}, "dry run", None),
        (5, {"ended": "", "dry_run": True}, "finished", None),
        (2, {"ended": "", "planned_steps": None, "reward": None}, "finished", None),
        (2, {"planned_steps": None, "reward": None}, None, None),
        (0, {"ended": "", "planned_steps": None, "learner": None}, "crashed", "no reason was recorded"),
        (0, {"planned_steps": None, "learner": None, "evaluations": [evaluation("evaluation", 0, None, 1)]}, "finished", None),
        (3, {"ended": 7, "stopped": [], "evaluations": 3}, "crashed", "7"),
    ],
)  # fmt: skip
def test_the_notes_of_a_run_say_how_it_ended(tmp_path, steps, meta, status, reason):
    said, why = ended(folder_with(tmp_path, steps=steps, **meta))
    assert said == status
    assert why is None if reason is None else reason in why


def test_a_run_is_running_while_a_process_holds_its_folder(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder):
        folder_with(folder, ended=None)
        assert ended(folder) == ("running", None)
    assert ended(folder)[0] == "crashed"


def test_a_log_that_a_killed_process_left_does_not_make_a_run_look_open(tmp_path):
    with claimed(tmp_path):
        folder_with(tmp_path, ended=None)
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("reward", "other")
        store.flush()
        assert (tmp_path / "run.sqlite-wal").exists()
        assert not reading.run_summary("run", tmp_path).open


async def train(run_dir, reward, **settings):
    await art.train(
        ScriptedAgent(max_tokens=4), ["a"], model="tiny", group_size=2, tasks_per_step=1, engine=FakeEngine(),
        learner=CountingLearner(), reward=reward, run_dir=run_dir, progress=False, **{"steps": 2, **settings},
    )  # fmt: skip


async def test_training_records_how_it_ends(tmp_path):
    async def never(_):
        judging.set()
        await asyncio.Event().wait()

    def broken(_):
        raise ValueError("no judge")

    judging = asyncio.Event()
    await train(tmp_path / "all", lambda it: 1.0)
    await train(tmp_path / "dry", lambda it: 1.0, dry_run=True)
    await train(tmp_path / "flat", lambda it: 1.0, steps=9, max_flat_groups=2)
    with pytest.raises(RewardError):
        await train(tmp_path / "broken", broken)
    under_way = asyncio.create_task(train(tmp_path / "cut off", never))
    await judging.wait()
    assert ended(tmp_path / "cut off") == ("running", None)
    under_way.cancel()
    with suppress(asyncio.CancelledError):
        await under_way
    found = {folder.name: ended(folder) for folder in tmp_path.iterdir()}
    assert {name: status for name, (status, _) in found.items()} == {
        "all": "finished",
        "dry": "dry run",
        "flat": "stopped",
        "broken": "crashed",
        "cut off": "stopped",
    }
    assert "all rewards were equal" in found["flat"][1] and "ValueError: no judge" in found["broken"][1]
    assert "interrupted" in found["cut off"][1]


def test_runs_are_listed_the_last_started_first(tmp_path):
    for age, name in enumerate(["newest", "a middle one", "b oldest"]):
        folder = folder_with(tmp_path / name)
        (folder / ".lock").touch()
        os.utime(folder / ".lock", (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "b oldest" / "run.sqlite")  # written last
    [listed] = [it.endpoint for it in read_routes(RunFolders(tmp_path)).routes if it.path == "/api/runs"]
    page = listed(limit=2, offset=0)
    assert isinstance(page, Page) and [it.name for it in page.items] == ["newest", "a middle one"]
    assert [it.name for it in listed(limit=2, offset=2).items] == ["b oldest"]


def test_the_final_reward_is_that_of_the_last_four_steps_or_of_their_calls(tmp_path):
    folder = folder_with(tmp_path, steps=6)
    assert reading.run_summary("run", folder).final_reward == (3 + 4 + 5 + 6) / 4
    with Store(folder / "run.sqlite") as store:
        for step in range(3, 7):
            store.add_step(step, {"reward": 0.0, "call_reward": 0.5})
    assert reading.run_summary("run", folder).final_reward == 0.5


def test_a_trajectory_says_by_which_evaluation_it_was_made(tmp_path):
    folder = record(tmp_path / "run", steps=1)
    with Store(folder / "run.sqlite") as store:
        made = evaluation("before", 0, 1.0, 0.5, rollout_ids=["s1-t2-0", 3])
        store.set_meta("evaluations", [made, None, {"rollout_ids": 7}])
    page = reading.trajectories(folder, RolloutFilter(task_id="task2"), limit=50, offset=0)
    told = {it.rollout_id: it.evaluation for it in page.items}
    assert (told["s1-t2-0"].name, told["s1-t2-0"].temperature) == ("before", 1.0)
    assert told["s1-t2-1"] is None
