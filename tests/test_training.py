"""The loop through its public API, with a fake engine and a learner that only counts: capture, store and HTTP are real."""

import asyncio
import concurrent.futures
import json
import shutil
import sys
import threading

import pytest
from screens import Lines

import art_core as art
from art_core import hookimpl
from art_core.errors import CaptureError, ConfigError
from art_core.loop.display import Display
from art_core.plugins import Plugins
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def numbers(request):
    """Answer with the number of this request, so that the runs of a group differ."""
    numbers.count = getattr(numbers, "count", 0) + 1
    return str(numbers.count)


def odd(trajectory):
    trajectory.metrics["success"] = float(int(trajectory.output) % 2)
    return trajectory.metrics["success"]


def settings(tmp_path, **more):
    return {
        "model": "tiny",
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "engine": FakeEngine(numbers),
        "learner": CountingLearner(),
        "run_dir": tmp_path / "run",
        "reward": odd,
        "progress": False,
        **more,
    }


async def test_new_weights_are_served_after_every_step(tmp_path):
    engine = FakeEngine(numbers)
    await art.train(ScriptedAgent(), ["a", "b", "c"], **settings(tmp_path, engine=engine))
    assert [weights.version for weights in engine.loaded] == [1, 2]
    assert engine.stopped == 1


async def test_a_learner_prepares_while_the_engine_starts(tmp_path):
    prepared = threading.Event()

    def learner(model_folder, config, loss):
        return CountingLearner()

    class Plugin:
        @hookimpl
        def register_learners(self, register):
            register("mine", learner, prepare=prepared.set)

    class Engine(FakeEngine):
        async def start(self):
            assert await asyncio.to_thread(prepared.wait, 20), "the learner waits for the engine"
            await super().start()

    parts = {"engine": Engine(numbers), "learner": "mine", "plugins": Plugins(Plugin(), installed=False)}
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **parts))
    assert result.report["steps"] == 2


async def test_a_learner_that_cannot_prepare_says_so_when_it_is_loaded(tmp_path):
    def learner(model_folder, config, loss):
        raise ConfigError("no such library")

    def prepare():
        raise ImportError("no such library")

    class Plugin:
        @hookimpl
        def register_learners(self, register):
            register("mine", learner, prepare=prepare)

    parts = {"learner": "mine", "plugins": Plugins(Plugin(), installed=False)}
    with pytest.raises(ConfigError, match="no such library"):
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, **parts))


async def test_calls_carry_the_version_of_the_weights_that_sampled_them(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(numbers), learner=CountingLearner()) as run:
        versions = []
        for _ in range(3):
            groups = await run.score(await run.collect(ScriptedAgent(2), ["a"], group_size=4), odd)
            await run.learn(groups)
            versions.append({call.policy_version for t in groups[0].trajectories for call in t.calls})
    assert versions == [{0}, {1}, {2}]


async def test_the_run_folder_holds_what_anybody_needs_to_check_the_claim(tmp_path):
    result = await art.train(ScriptedAgent(), ["a", "b"], **settings(tmp_path, eval_tasks=["x", "y", "z"]))
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"reward", "success", "seconds", "groups_with_contrast"} <= set(lines[0])
    report = json.loads((folder / "report.json").read_text())
    for name in ("before", "after"):
        assert report[name]["n"] == 3 and 0 <= report[name]["success"] <= 1 and report[name]["stderr"] >= 0
    assert report["steps"] == 2 and report["seed"] == 0 and len(report["start_weights"]) == 64 and report["seconds"] > 0
    assert report["loss"] == "grpo" and report["learner"] == "CountingLearner"
    assert (folder / "run.sqlite").is_file() and len(list((folder / "checkpoints").iterdir())) == 2
    assert result.before.success == report["before"]["success"]


async def test_a_run_that_fails_is_data(tmp_path):
    async def agent(task_input, address):
        answer = await ScriptedAgent()(task_input, address)
        if int(answer) % 2:
            raise RuntimeError("no luck")
        return answer

    async with art.open_run(tmp_path / "run", engine=FakeEngine(numbers), learner=CountingLearner()) as run:
        (group,) = await run.collect(agent, ["a"], group_size=8)
    failed = [t for t in group.trajectories if t.error]
    assert len(failed) == 4 and failed[0].error == "RuntimeError: no luck"
    assert all(len(t.calls) == 1 for t in group.trajectories)


@pytest.mark.parametrize("blocking", [False, True])
def test_an_agent_that_calls_exit_ends_its_own_run_only(tmp_path, blocking):
    def leave(task):
        if task == "b":
            sys.exit("usage: tool FILE")

    async def agent(task_input, address):
        answer = await ScriptedAgent()(task_input, address)
        leave(task_input)
        return answer

    def sync_agent(task_input, address):
        return asyncio.run(agent(task_input, address))

    given = settings(tmp_path, steps=1, reward=lambda t: int(t.output or 0), to_output=str.strip)
    result = art.train_sync(sync_agent if blocking else agent, ["a", "b"], **given)
    with Store(tmp_path / "run" / "run.sqlite") as store:
        errors = sorted(it.error or "" for it in store.trajectories())
    assert result.report["steps"] == 1 and errors == [""] * 4 + ["SystemExit: usage: tool FILE"] * 4


async def _cancelled():
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


class Panic(BaseException):
    """As extensions in Rust and test runners raise."""


class Wordless(Exception):
    def __str__(self):
        return None


async def _cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def _raises(error):
    async def fault():
        raise error

    return fault


FAULTS = {
    "cancels": _cancelled,
    "cancels itself": _cancels_itself,
    "panics": _raises(Panic("broken")),
    "panics in a group": _raises(BaseExceptionGroup("tasks", [Panic()])),
    "has no words": _raises(Wordless()),
    "has a cancelled thread": _raises(concurrent.futures.CancelledError()),
}


class Odd:
    """An output of which nothing can be said."""

    def __repr__(self):
        raise RuntimeError("closed")

    model_dump = __repr__


@pytest.mark.parametrize("blocking", [False, True])
def test_whatever_an_agent_raises_fails_its_own_rollout_only(tmp_path, blocking):
    async def agent(task_input, address):
        answer = await ScriptedAgent()(task_input, address)
        if task_input in FAULTS:
            await FAULTS[task_input]()
        if task_input == "finds nothing":
            next(word for word in () if word)
        return {"no answer": {}, "no output": None, "odd": {"answer": Odd()}}.get(task_input, {"answer": answer})

    def sync_agent(task_input, address):
        answer = asyncio.run(ScriptedAgent()(task_input, address))
        if task_input == "finds nothing":
            next(word for word in () if word)
        return asyncio.run(agent(task_input, address)) if task_input != "fine" else {"answer": answer}

    def to_output(output):
        return sys.exit(3) if output is None else output["answer"]

    tasks = ["fine", "finds nothing", "no answer", "odd", "no output", *FAULTS]
    given = settings(tmp_path, steps=1, tasks_per_step=len(tasks), group_size=2, to_output=to_output)
    result = art.train_sync(
        sync_agent if blocking else agent, tasks, **{**given, "reward": lambda t: float(t.error is None)}
    )
    with Store(tmp_path / "run" / "run.sqlite") as store:
        errors = {it.task: it.error for it in store.trajectories()}
        outputs = {it.task: it.output for it in store.trajectories()}
    assert result.report["steps"] == 1
    assert errors["fine"] is errors["odd"] is None and outputs["odd"] == "<Odd>"
    assert errors["no output"] == "SystemExit: 3" and errors["no answer"] == "KeyError: 'answer'"
    assert errors["finds nothing"].startswith("RuntimeError") and "StopIteration" in errors["finds nothing"]
    assert errors["cancels"] == errors["cancels itself"] == errors["has a cancelled thread"]
    assert errors["cancels"].startswith("RuntimeError: CancelledError was raised"), "not as when the run is stopped"
    assert errors["panics"] == "Panic: broken" and errors["panics in a group"].startswith("BaseExceptionGroup: tasks")
    assert errors["has no words"] == "Wordless: its text can't be read: TypeError in __str__"


@pytest.mark.system
async def test_a_run_that_takes_too_long_is_data(tmp_path):
    async def agent(task_input, address):
        await ScriptedAgent()(task_input, address)
        await asyncio.sleep(60)

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), rollout_timeout=2) as run:
        (group,) = await run.collect(agent, ["a"], group_size=2)
    assert [t.error for t in group.trajectories] == ["TimeoutError: not done after 2 seconds"] * 2
    assert all(len(t.calls) == 1 for t in group.trajectories)


async def test_capture_by_hand_gives_a_trajectory_that_can_be_grouped_and_learnt_from(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(numbers), learner=CountingLearner()) as run:
        trajectories = []
        for _ in range(4):
            async with run.rollout("task") as rollout:
                assert rollout.api_key and rollout.model
                rollout.output = await ScriptedAgent()("hello", rollout)
            trajectories.append(rollout.trajectory)
        groups = await run.score([art.Group(task="task", trajectories=tuple(trajectories))], odd)
        metrics = await run.learn(groups)
    assert metrics["groups_with_contrast"] == 1 and metrics["tokens"] > 0


@pytest.mark.system
async def test_64_concurrent_rollouts_do_not_mix_threads_included(tmp_path):
    """Each agent says its own task in every call, from threads of its own; every call must be in its own trajectory."""
    import httpx

    def agent(task_input, address):
        def call(turn):
            body = {"messages": [{"role": "user", "content": f"{task_input}/{turn}"}]}
            httpx.post(
                f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False
            ).raise_for_status()

        threads = [threading.Thread(target=call, args=(turn,)) for turn in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async with art.open_run(tmp_path / "run", engine=FakeEngine()) as run:
        groups = await run.collect(agent, [f"task-{i}" for i in range(64)], group_size=1)
    for i, group in enumerate(groups):
        said = sorted(call.request["messages"][0]["content"] for call in group.trajectories[0].calls)
        assert said == [f"task-{i}/{turn}" for turn in range(3)]


async def test_an_async_agent_that_blocks_on_a_sync_client_does_not_hang(tmp_path):
    import httpx

    async def agent(task_input, address):
        body = {"messages": [{"role": "user", "content": task_input}]}
        return httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=30, trust_env=False).json()

    async with art.open_run(tmp_path / "run", engine=FakeEngine()) as run:
        (group,) = await run.collect(agent, ["a"], group_size=4)
    assert all(t.error is None and len(t.calls) == 1 for t in group.trajectories)


async def test_training_rollouts_override_the_agents_temperature_and_evaluation_keeps_it(tmp_path):
    engine = FakeEngine(numbers)
    shaping = {"min_p": 0.2, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.1}
    agent = ScriptedAgent(temperature=0, top_p=0.5, **shaping)
    await art.train(agent, ["a"], **settings(tmp_path, engine=engine, steps=1, eval_tasks=["held out"]))
    asked = {(r["messages"][0]["content"], r["temperature"], r["top_p"]) for r in engine.requests}
    assert asked == {("a", 1.0, 1.0), ("held out", 0, 0.5)}
    shaped = {(r["messages"][0]["content"], *(r[name] for name in shaping)) for r in engine.requests}
    assert shaped == {("a", 0.0, 1.0, 0.0, 0.0), ("held out", *shaping.values())}


async def test_a_dict_task_gives_its_input_to_the_agent_and_the_rest_to_the_reward(tmp_path):
    def reward(trajectory):
        assert trajectory.task["answer"] == 7
        return float(int(trajectory.output) % 2)

    engine = FakeEngine(numbers)
    await art.train(
        ScriptedAgent(), [{"input": "question", "answer": 7}], **settings(tmp_path, engine=engine, reward=reward)
    )
    assert {r["messages"][0]["content"] for r in engine.requests} == {"question"}


@pytest.mark.smoke
@pytest.mark.system
async def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    stop_at = 3
    learner = CountingLearner()

    class Stop(Display):
        def log(self, step, metrics):
            if step == stop_at:
                task.cancel()

    task = asyncio.ensure_future(
        art.train(
            ScriptedAgent(), ["a", "b"], **settings(tmp_path, steps=5, learner=learner, progress=Stop(quiet=True))
        )
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 3 and report["after"] is None

    again = CountingLearner()
    result = await art.train(ScriptedAgent(), ["a", "b"], **settings(tmp_path, steps=5, learner=again))
    assert again.version == 5 and len(again.trees) == 2
    assert result.report["steps"] == 5
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.system
async def test_an_evaluation_that_was_interrupted_is_made_up_for_and_one_that_was_not_is_kept(tmp_path):
    asked = []

    async def agent(task_input, address):
        if task_input == "held out":
            asked.append(task_input)
            if len(asked) == 2:
                task.cancel()
        return await ScriptedAgent()(task_input, address)

    more = {"steps": 3, "eval_tasks": ["held out"], "eval_every": 1}
    task = asyncio.ensure_future(art.train(agent, ["a"], **settings(tmp_path, **more)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [it["name"] for it in evaluations(tmp_path)] == ["before"]
    await art.train(agent, ["a"], **settings(tmp_path, **more))
    assert [it["name"] for it in evaluations(tmp_path)] == ["before", "step 1", "step 2", "after"]
    assert len(asked) == 1 + 4


def evaluations(tmp_path):
    return json.loads((tmp_path / "run" / "report.json").read_text())["evaluations"]


@pytest.mark.system
async def test_only_the_newest_checkpoints_are_kept(tmp_path):
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=5, keep_checkpoints=2))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


async def test_every_epoch_takes_every_task_once_and_the_same_seed_the_same_order(tmp_path):
    from art_core.loop.tasks import batch_of_step

    config = art.TrainConfig(tasks_per_step=2, seed=3)
    tasks = list(range(6))
    seen = [batch_of_step(tasks, step, config) for step in range(6)]
    assert sorted(sum(seen[:3], [])) == tasks and sorted(sum(seen[3:], [])) == tasks and seen[:3] != seen[3:]
    assert seen == [batch_of_step(tasks, step, config) for step in range(6)]


async def test_a_dry_run_shows_what_would_be_trained_and_takes_no_step(tmp_path):
    learner, engine = CountingLearner(), FakeEngine(numbers)
    result = await art.train(
        ScriptedAgent(3), ["a"], **settings(tmp_path, learner=learner, engine=engine, dry_run=True, progress=False)
    )
    found = result.report["dry_run"]
    assert found["calls"] == 12 and found["tokens"] < found["tokens_call_by_call"] and found["targets"] > 0
    assert learner.version == 0 and not engine.loaded


async def test_a_dry_run_whose_calls_were_all_cut_off_says_that_nothing_is_trained(tmp_path):
    class Cut(FakeEngine):
        def _choice(self, request, index):
            return super()._choice(request, index) | {"finish_reason": "length"}

    class Refusing(CountingLearner):
        def measure(self, trees):
            raise ValueError("max() arg is an empty sequence")

    more = settings(tmp_path, learner=Refusing(), engine=Cut(numbers), loss="dapo", dry_run=True)
    found = (await art.train(ScriptedAgent(), ["a"], **more)).report["dry_run"]
    assert found["tokens"] > 0 and found["targets"] == 0 and found["learn_seconds"] == 0


async def test_passthrough_calls_and_calls_outside_rollouts_are_left_alone(tmp_path):
    async def agent(task_input, address):
        assert art.destination("gpt-other") is None
        assert art.destination("any").rollout_id == address.rollout_id
        return await ScriptedAgent()(task_input, address)

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), passthrough=("gpt-other",)) as run:
        (group,) = await run.collect(agent, ["a"], group_size=2)
        assert art.destination("any") is None
    assert not [t.error for t in group.trajectories if t.error]


async def test_a_group_reward_and_its_unscored_runs(tmp_path):
    class Judge:
        async def score(self, group):
            return [None, 1.0, 0.0, 0.5]

    async with art.open_run(tmp_path / "run", engine=FakeEngine(numbers), learner=CountingLearner()) as run:
        groups = await run.score(await run.collect(ScriptedAgent(), ["a"], group_size=4), Judge())
        metrics = await run.learn(groups)
    assert groups[0].advantages[0] == 0 and metrics["unscored"] == 1 and metrics["reward"] == 0.5


async def test_an_executor_is_found_by_its_name_and_adapts_the_agent(tmp_path):
    class Elsewhere:
        def __init__(self, config):
            self.size = config.group_size

        def adapt(self, agent):
            async def run(given, address):
                return f"{await agent(given, address)} {self.size}"

            return run

    class Plugin:
        @hookimpl
        def register_executors(self, register):
            register("elsewhere", Elsewhere)

    parts = {"engine": FakeEngine(), "executor": "elsewhere", "plugins": Plugins(Plugin(), installed=False)}
    async with art.open_run(tmp_path / "run", group_size=2, **parts) as run:
        groups = await run.collect(ScriptedAgent(), ["a", "b"])
    assert [g.task for g in groups] == ["a", "b"] and all(t.task == g.task for g in groups for t in g.trajectories)
    assert {t.output for g in groups for t in g.trajectories} == {"ok 2"}


async def test_unattributed_set_up_faults_are_raised_and_not_kept_as_data(tmp_path):
    async def agent(task_input, address):
        raise CaptureError("cannot be recorded")

    async with art.open_run(tmp_path / "run", engine=FakeEngine()) as run:
        with pytest.raises(CaptureError, match="cannot be recorded"):
            await run.collect(agent, ["a"], group_size=4)


def test_train_sync_runs_where_no_loop_runs_and_says_so_where_one_does(tmp_path):
    assert art.train_sync(ScriptedAgent(), ["a"], **settings(tmp_path)).report["steps"] == 2

    async def inside():
        art.train_sync(ScriptedAgent(), ["a"], **settings(tmp_path))

    with pytest.raises(ConfigError, match="await art.train"):
        asyncio.run(inside())


@pytest.mark.system
async def test_a_dry_run_in_a_runs_folder_leaves_its_plan_alone(tmp_path):
    def plan():
        with Store(tmp_path / "run" / "run.sqlite") as store:
            return store.meta("planned_steps")

    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, dry_run=True))
    assert plan() is None
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path))
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, dry_run=True))
    assert plan() == 2
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=1))
    assert plan() == 2, "more are done already"


@pytest.mark.system
async def test_a_run_that_goes_on_says_so_and_one_after_a_dry_run_begins(tmp_path):
    async def said(**more):
        screen = Lines()
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, progress=screen, **more))
        return [line.partition(": ")[2] for line in screen.lines if "resuming" in line]

    await said(dry_run=True)
    assert await said() == []
    assert await said(steps=3) == ["resuming after step 2"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as after a kill before the first
    assert await said() == ["resuming after step 0, with the rollouts recorded for step 1"]


async def test_a_run_in_which_nothing_was_trained_says_that_its_start_is_evaluated(tmp_path):
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, dry_run=True))
    screen = Lines()
    await art.evaluate(
        ScriptedAgent(), ["a"], model=tmp_path / "run", reward=lambda trajectory: 1.0, engine=FakeEngine(numbers),
        run_dir=tmp_path / "eval", progress=screen,
    )  # fmt: skip
    assert sum("has no checkpoint yet: evaluating its start weights" in line for line in screen.lines) == 1
