"""What could go wrong between the arrows, each seen once: the pieces of ``open_run`` with a fake engine."""

import asyncio
import fcntl
import io
import json
import threading
from pathlib import Path

import httpx
import pytest
from rich.console import Console

import art_core as art
from art_core.errors import CaptureError, ConfigError, RewardError, StoreError
from art_core.loop.display import Display
from art_core.loop.metrics import wilson_interval
from art_core.loop.report import Report
from art_core.store import Store
from art_core.store.run_folder import claimed, is_claimed, new_run_dir
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call, Weights


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


def trajectory(reward):
    return art.Trajectory(task="t", calls=(Call(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.1,)),), reward=reward)


async def test_no_call_slips_in_between_the_step_and_the_swap(tmp_path):
    """A call that waits while the learner works must be answered by the new weights and counted as theirs."""
    learner = CountingLearner()

    class Engine(FakeEngine):
        async def load(self, weights):
            await asyncio.sleep(0.2)
            await super().load(weights)

        async def chat(self, request):
            answer = await super().chat(request)
            assert answer["policy_version"] == learner.version
            return answer

    async with run_of(tmp_path, engine=Engine(), learner=learner) as run, run.rollout("t") as rollout:
        learning = asyncio.ensure_future(
            run.learn([art.Group(task="t", trajectories=(trajectory(0.0), trajectory(1.0)))])
        )
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for _ in range(20):
                body = {"messages": [{"role": "user", "content": "hi"}]}
                (await client.post(f"{rollout.base_url}/chat/completions", json=body)).raise_for_status()
                await asyncio.sleep(0.01)
        await learning
    versions = [call.policy_version for call in rollout.trajectory.calls]
    assert versions == sorted(versions) and versions[-1] == 1


async def test_groups_built_by_hand_get_their_advantages_from_their_rewards(tmp_path):
    learner = CountingLearner()
    async with run_of(tmp_path, learner=learner) as run:
        await run.learn([art.Group(task="t", trajectories=(trajectory(0.0), trajectory(1.0)))])
    assert {float(a) > 0 for a in learner.trees[0][0].advantages} == {True, False}


async def test_an_evaluation_is_measured_anew_every_time(tmp_path):
    common = {"model": "tiny", "engine": FakeEngine(), "run_dir": tmp_path / "run", "progress": False}
    first = await art.evaluate(ScriptedAgent(), ["a"], reward=lambda t: 1.0, **common)
    second = await art.evaluate(ScriptedAgent(), ["b", "c"], reward=lambda t: 0.0, **common)
    assert (first.mean_reward, second.mean_reward) == (1.0, 0.0)
    assert [t.task for t in second.trajectories] == ["b", "c"]


async def test_a_run_is_evaluated_with_the_limits_and_the_formats_that_it_was_served_with(tmp_path):
    served = {"max_context": 300, "max_tokens": 20, "tool_parser": "hermes", "engine_args": {"seed": 1}, "lora_rank": 0}
    async with run_of(tmp_path, **served):
        pass
    common = {"model": tmp_path / "run", "engine": FakeEngine(), "reward": lambda t: 1.0, "progress": False}
    await art.evaluate(ScriptedAgent(), ["a"], run_dir=tmp_path / "eval", max_tokens=30, **common)
    with Store(tmp_path / "eval" / "run.sqlite") as store:
        config = store.meta("config")
    assert {name: config[name] for name in served} == {**served, "max_tokens": 30}


@pytest.mark.system
async def test_other_evaluation_tasks_on_resume_do_not_break_the_report(tmp_path):
    common = {
        "model": "tiny", "engine": FakeEngine(), "run_dir": tmp_path / "run", "progress": False, "reward": lambda t: 1.0,
        "group_size": 2,
    }  # fmt: skip
    await art.train(ScriptedAgent(), ["a"], steps=1, eval_tasks=["x"], learner=CountingLearner(), **common)
    result = await art.train(
        ScriptedAgent(), ["a"], steps=2, eval_tasks=["x", "y"], learner=CountingLearner(), allow_changes=True, **common
    )
    assert result.before is None and len(result.after.trajectories) == 2


@pytest.mark.parametrize("n", [1, 96, 100, 300, 500])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_chart_can_draw_a_perfect_score_and_none_at_all(tmp_path, n, mean):
    from art_cli.chart import draw

    low, high = wilson_interval(mean, n)
    found = {"name": "after", "step": 1, "temperature": None, "success": mean, "interval": [low, high]}
    report = {"model": "m", "seed": 0, "steps": 1, "seconds": 1.0, "evaluations": [found]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "success": 1.0}\n')
    assert draw(tmp_path).stat().st_size > 1000


def test_intervals_are_wilsons_for_zeros_and_ones():
    low, high = wilson_interval(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    report = Report(tuple(art.Trajectory(task=i, calls=(), metrics={"success": i % 2}) for i in range(10)), None)
    assert report.success == 0.5 and report.interval[0] < 0.5 < report.interval[1]


@pytest.mark.parametrize(("rewards", "said"), [((0.0, 1.0), None), ((0.25, 1.0), "mean reward 0.625")])
def test_a_success_is_told_with_the_mean_reward_where_that_says_more(rewards, said):
    runs = [art.Trajectory("t", calls=(), reward=it, metrics={"success": float(it == 1)}) for it in rewards]
    assert str(Report(tuple(runs), None)).endswith(f", {said}" if said else "%)")


async def test_sync_tools_that_hang_do_not_stop_the_learner(tmp_path):
    release = threading.Event()

    async def agent(task_input, address):
        await ScriptedAgent()(task_input, address)
        await asyncio.get_running_loop().run_in_executor(None, release.wait)

    async with run_of(tmp_path, max_concurrent=2, rollout_timeout=1.0) as run:
        groups = await run.collect(agent, ["a"], group_size=2)
        scored = [art.Group(task=g.task, trajectories=(trajectory(0.0), trajectory(1.0))) for g in groups]
        metrics = await asyncio.wait_for(run.learn(scored), 20)
    release.set()
    assert metrics["groups_with_contrast"] == 1


async def test_a_failed_swap_leaves_no_checkpoint_of_the_step(tmp_path):
    class Broken(FakeEngine):
        async def load(self, weights: Weights):
            raise ConfigError("cannot load")

    with pytest.raises(ConfigError, match="cannot load"):
        async with run_of(tmp_path, engine=Broken()) as run:
            await run.learn([art.Group(task="t", trajectories=(trajectory(0.0), trajectory(1.0)))])
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


async def test_a_checkpoint_that_is_asked_for_after_a_step_failed_half_way_is_refused(tmp_path):
    class Breaking(FakeEngine):
        async def load(self, weights: Weights):
            if weights.version == 2:
                raise ConfigError("cannot load")

    group = art.Group(task="t", trajectories=(trajectory(0.0), trajectory(1.0)))
    async with run_of(tmp_path, engine=Breaking(), checkpoint_every=5) as run:
        await run.learn([group])
        with pytest.raises(ConfigError, match="cannot load"):
            await run.learn([group])
        with pytest.raises(StoreError, match=r"checkpoint of step 1: .* \(version 2 instead of 1\)"):
            await run.checkpoint()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


async def test_to_output_sees_only_runs_that_ended_well_and_its_result_is_stored(tmp_path):
    async def agent(task_input, address):
        await ScriptedAgent()(task_input, address)
        if task_input == "bad":
            raise RuntimeError("no")
        return {"answer": 7}

    async with run_of(tmp_path) as run:
        good, bad = await run.collect(agent, ["good", "bad"], group_size=2, to_output=lambda output: output["answer"])
        assert [t.output for t in good.trajectories] == [7, 7]
        assert [t.error for t in bad.trajectories] == ["RuntimeError: no"] * 2
        assert run.store.trajectory(good.trajectories[0].rollout_id).output == 7


def test_what_agents_say_is_not_read_as_markup():
    told = io.StringIO()
    with Display(console=Console(file=told, width=200)) as screen:
        screen.phase("evaluation [bold]", 1)
        screen.say("error: [/INST] [type=missing]")
    assert "[/INST] [type=missing]" in told.getvalue() and "[bold]" in told.getvalue()


@pytest.mark.system
async def test_a_reward_is_made_once_and_a_misspelt_one_is_refused_before_anything_runs(tmp_path):
    made = []

    class Plugin:
        @art.hookimpl
        def register_rewards(self, register):
            register("mine", lambda: made.append(1) or (lambda trajectory: float(len(made))))

    from art_core.plugins import Plugins

    plugins, engine = Plugins(Plugin(), installed=False), FakeEngine()
    common = {
        "model": "tiny", "steps": 3, "group_size": 2, "engine": engine, "learner": CountingLearner(), "progress": False,
        "run_dir": tmp_path / "run", "plugins": plugins,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"no reward named 'mina'.*'mine'"):
        await art.train(ScriptedAgent(), ["a"], reward="mina", eval_tasks=["x"], eval_reward=lambda t: 1.0, **common)
    assert engine.requests == []
    await art.train(ScriptedAgent(), ["a"], reward="mine", **common)
    assert made == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "gpro"},
        {"learner": "x"},
        {"executor": "x"},
        {"advantage": "x"},
        {"threads": -1},
        {"keep_checkpoints": 0},
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(tmp_path, wrong):
    with pytest.raises(ConfigError, match="|".join(["named", "must be"])):
        async with run_of(tmp_path, **wrong):
            pass


async def test_plugins_must_be_an_instance_of_plugins(tmp_path):
    with pytest.raises(ConfigError, match=r"plugins= takes Plugins\(module, ...\) of art_core.plugin_api, got list"):
        async with run_of(tmp_path, plugins=[object()]):
            pass


async def test_one_model_to_pass_through_may_be_given_as_text(tmp_path):
    async with run_of(tmp_path, passthrough="gpt-4.1") as run, run.rollout("t"):
        assert art.destination("gpt-4.1") is None and art.destination("g") is not None


async def test_metrics_of_a_reward_do_not_hide_those_of_the_step(tmp_path):
    def reward(trajectory):
        trajectory.metrics.update(step=99.0, seconds=1e9, mine=2.0)
        return 1.0

    await art.train(
        ScriptedAgent(), ["a"], model="tiny", steps=1, group_size=2, engine=FakeEngine(), learner=CountingLearner(),
        reward=reward, run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (line["step"], line["reward/step"], line["mine"]) == (1, 99.0, 2.0) and line["seconds"] < 1e6


async def test_the_success_of_a_step_counts_rollouts_without_it_as_an_evaluation_does(tmp_path):
    rewards = iter([1.0, 0.0, 0.0, 0.0])

    def reward(trajectory):
        if worth := next(rewards):
            trajectory.metrics.update(success=worth, tries=3.0)
        return worth

    async with run_of(tmp_path) as run:
        groups = await run.score(await run.collect(ScriptedAgent(), ["t"], group_size=4), reward)
        metrics = await run.learn(groups)
    assert (metrics["reward"], metrics["success"], metrics["tries"]) == (0.25, 0.25, 3.0)


async def test_a_step_without_calls_after_one_with_some_is_blamed_on_a_cache(tmp_path):
    answers = {}

    async def cached(task, address):
        answers[task] = answers.get(task) or await ScriptedAgent()(task, address)
        return answers[task]

    async with run_of(tmp_path) as run:
        await run.collect(cached, ["t"])
        with pytest.raises(CaptureError, match="no model call was recorded in .*cache its answers") as error:
            await run.collect(cached, ["t"])
    assert "plugin" not in str(error.value)


async def test_a_metric_that_is_no_number_names_itself(tmp_path):
    def reward(trajectory):
        trajectory.metrics["verdict"] = "good"
        return 1.0

    async with run_of(tmp_path) as run:
        with pytest.raises(RewardError, match=r"metrics\['verdict'\].*'good'"):
            await run.score(await run.collect(ScriptedAgent(), ["a"], group_size=2), reward)


async def test_two_processes_do_not_write_one_run_folder(tmp_path):
    async with run_of(tmp_path):
        with pytest.raises(ConfigError, match="is open here or in another process"):
            async with run_of(tmp_path):
                pass


async def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("art_core.store.run_folder.time.strftime", lambda _: "20260101-000000")
    folders = [new_run_dir("tiny") for _ in range(3)]
    assert [it.name for it in folders] == [f"20260101-000000-tiny{end}" for end in ("", "-2", "-3")]
    with claimed(folders[0]) as new:
        assert new and new_run_dir("tiny").name.endswith("-4"), "a folder is taken once it has been named"


async def test_a_folder_of_a_start_that_failed_goes_and_one_with_rollouts_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {"engine": FakeEngine(), "learner": CountingLearner()}

    class Broken(FakeEngine):
        async def start(self):
            raise OSError("the GPU is busy")

    with pytest.raises(OSError, match="busy"):
        async with art.open_run(**{**parts, "engine": Broken()}):
            pass
    assert not list(Path("runs").iterdir())
    async with art.open_run(seed=1, **parts) as run:
        await run.collect(ScriptedAgent(), ["a"], group_size=2)
    for engine, seed, error in (FakeEngine(), 2, "another experiment"), (Broken(), 1, "busy"):
        with pytest.raises(OSError if seed == 1 else ConfigError, match=error):
            async with art.open_run(run.run_dir, **{**parts, "engine": engine, "seed": seed}):
                pass
        with Store(run.run_dir / "run.sqlite") as store:
            assert len(store.rollouts()) == 2


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere"])
async def test_a_place_for_runs_that_cannot_be_made_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("") if kind == "a file" else Path("runs").symlink_to("nowhere")
    with pytest.raises(StoreError, match=r"no run folder can be made in .*runs: .*; pass run_dir="):
        async with art.open_run(engine=FakeEngine(), learner=CountingLearner()):
            pass


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="gpro"):
        art.open_run(engine=FakeEngine(), loss="gpro")
    assert not Path("runs").exists()


async def test_a_run_folder_may_be_given_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    async with run_of(Path("~")) as run:
        assert run.run_dir == tmp_path / "run" and (tmp_path / "run" / "run.sqlite").is_file()


async def test_whoever_asks_whether_a_run_is_under_way_does_not_keep_it_from_starting(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert is_claimed(folder) is None
    async with run_of(tmp_path):
        assert is_claimed(folder) is True
    assert is_claimed(folder) is False
    with (folder / ".lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as is_claimed does, for a moment
        monkeypatch.setattr("art_core.store.run_folder.time.sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        with claimed(folder):
            monkeypatch.undo()


@pytest.mark.system
async def test_a_blocking_agent_that_never_returns_does_not_keep_the_others_waiting(tmp_path):
    release = threading.Event()

    def agent(task_input, address):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        release.wait()

    async with run_of(tmp_path, rollout_timeout=4.0) as run:
        (group,) = await run.collect(agent, ["a"], group_size=16)
    release.set()
    assert all("not done after 4 seconds" in t.error for t in group.trajectories)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("rollout "))


@pytest.mark.system
async def test_rollouts_of_a_step_carry_its_number(tmp_path):
    await art.train(
        ScriptedAgent(), ["a"], model="tiny", steps=2, group_size=2, engine=FakeEngine(), learner=CountingLearner(),
        reward=lambda t: 1.0, run_dir=tmp_path / "run", progress=False, eval_tasks=["x"],
    )  # fmt: skip
    with Store(tmp_path / "run" / "run.sqlite") as store:
        assert sorted({(r.split, r.step) for r in store.rollouts()}) == [
            ("eval", 0),
            ("eval", 2),
            ("train", 1),
            ("train", 2),
        ]


async def test_a_step_without_groups_is_refused_and_does_not_count(tmp_path):
    async with run_of(tmp_path) as run:
        with pytest.raises(ConfigError, match="no groups to learn from"):
            await run.learn([])
        assert run.step == 0


async def test_rewards_of_single_calls_reach_the_store_and_the_tree(tmp_path):
    """The first turn is rewarded by itself, the second takes what the whole run is worth."""
    order = []

    def reward(trajectory):
        order.append(trajectory.rollout_id)
        better = float(len(order) > 1)
        trajectory.call_rewards[0] = better
        return -better

    learner = CountingLearner()
    async with run_of(tmp_path, learner=learner, advantage="mean") as run:
        groups = await run.score(await run.collect(ScriptedAgent(turns=2), ["t"], group_size=2), reward)
        await run.learn(groups)
        stored = [run.store.trajectory(t.rollout_id) for t in groups[0].trajectories]
    assert [[call.reward for call in t.calls] for t in stored] == [[0.0, None], [1.0, None]]
    assert stored[0].calls == groups[0].trajectories[0].calls
    [tree] = learner.trees[0]
    by_call = dict(zip(tree.call.tolist(), tree.advantages.tolist(), strict=True))
    assert by_call == {0: -0.5, 1: 0.5, 2: 0.5, 3: -0.5}


@pytest.mark.parametrize(
    ("loss", "settings", "trained"),
    [
        ("grpo", {}, True),
        ("dapo", {}, False),
        ("grpo", {"overlong": "drop"}, False),
        ("dapo", {"overlong": "train"}, True),
    ],
)
async def test_overlong_calls_are_dropped_where_the_loss_or_the_run_asks_for_it(tmp_path, loss, settings, trained):
    call = Call(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.1,), finish_reason="length")
    runs = tuple(art.Trajectory(task="t", calls=(call,), reward=reward) for reward in (0.0, 1.0))
    learner = CountingLearner()
    async with run_of(tmp_path, learner=learner, loss=loss, **settings) as run:
        await run.learn([art.Group(task="t", trajectories=runs)])
    assert learner.trees[0][0].weights.any() == trained


@pytest.mark.parametrize(
    "settings", [{"advantage": "median"}, {"overlong": "skip"}, {"importance_cap": 0.5}, {"importance_cap": "2"}]
)
def test_settings_of_the_step_that_cannot_be_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be"):
        run_of(tmp_path, **settings)


async def test_a_retry_after_an_answer_that_was_lost_on_its_way_is_one_call(tmp_path):
    async with (
        art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run,
        run.rollout("x") as rollout,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for request_id in ("one", "one", "two"):
            headers = {"x-art-request-id": request_id}
            response = await client.post(f"{rollout.base_url}/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
    assert [call.request_id for call in rollout.trajectory.calls] == ["one", "two"]
