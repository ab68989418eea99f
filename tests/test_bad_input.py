"""Bad input gets an error that says what happened and what to do, and loses nothing."""

import asyncio
import functools
import re
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import art_core as art
from art_core.errors import AgentError, CaptureError, ConfigError, RewardError, StoreError, UpstreamError
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "nowhere"])
def test_no_such_model_folder(tmp_path, model):
    with pytest.raises(ConfigError, match=r"no model folder .*tiny"):
        run_of(tmp_path, model=model)


def test_a_folder_that_is_not_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"without config\.json"):
        run_of(tmp_path, model=str(tmp_path))


async def test_a_task_list_that_is_empty(tmp_path):
    with pytest.raises(ConfigError, match="task list is empty"):
        await art.train(ScriptedAgent(), [], model="tiny", steps=1, run_dir=tmp_path / "run", engine=FakeEngine())
    assert not (tmp_path / "run").exists()


async def test_a_task_that_is_not_json(tmp_path):
    async with run_of(tmp_path) as run:
        with pytest.raises(ConfigError, match="JSON-serializable"):
            await run.collect(ScriptedAgent(), [object()], group_size=2)


def test_a_setting_that_does_not_exist_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        run_of(tmp_path, learning_rat=1e-3)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("eval_evry", "eval_every"), ("rewards", "reward"), ("trackrs", "trackers"), ("run_dirs", "run_dir")],
)
async def test_a_keyword_of_train_that_is_misspelt_names_the_nearest(tmp_path, given, meant):
    with pytest.raises(ConfigError, match=f"'{given}' is not a setting of a run; did you mean '{meant}'"):
        await art.train(ScriptedAgent(), ["a"], model="tiny", steps=1, **{given: 2})


async def test_settings_are_keywords_and_not_a_dict_of_that_name():
    with pytest.raises(ConfigError, match="'settings' is not a setting of a run; the settings are"):
        await art.train(ScriptedAgent(), ["a"], model="tiny", steps=1, settings={"seed": 2})


@pytest.mark.parametrize("given", ['{"enforce-eager": True}', None, ["enforce-eager"]])
@pytest.mark.parametrize("name", ["engine_args", "learner_args", "executor_args"])
def test_options_that_are_no_dict(tmp_path, name, given):
    with pytest.raises(ConfigError, match=rf"{name} must be a dict of options, got .*on the command line write JSON"):
        run_of(tmp_path, **{name: given})


@pytest.mark.parametrize(
    ("returned", "said"), [(float("nan"), "nan"), ("good", "good"), (None, "None"), ([1.0, 2.0], r"\[1.0, 2.0\]")]
)
async def test_a_reward_that_is_not_a_number(tmp_path, returned, said):
    def mine(trajectory):
        return returned

    async with run_of(tmp_path) as run:
        groups = await run.collect(ScriptedAgent(), ["a"], group_size=2)
        with pytest.raises(RewardError, match=f"mine.*{said}"):
            await run.score(groups, mine)
        assert len(run.store.trajectories()) == 2, "what was recorded is kept"


async def test_a_group_reward_that_returns_the_wrong_number(tmp_path):
    class Judge:
        async def score(self, group):
            return [1.0]

    async with run_of(tmp_path) as run:
        groups = await run.collect(ScriptedAgent(), ["a"], group_size=3)
        with pytest.raises(RewardError, match=r"Judge.*1.*3"):
            await run.score(groups, Judge())


async def test_an_upstream_that_gives_no_token_ids(tmp_path):
    class NoIds(FakeEngine):
        async def chat(self, request):
            answer = await super().chat(request)
            del answer["prompt_token_ids"]
            return answer

    async with run_of(tmp_path, engine=NoIds()) as run:
        with pytest.raises(CaptureError, match=r"none of 2 model calls.*: 2 were refused by it, the first with: 502"):
            await run.collect(ScriptedAgent(), ["a"], group_size=2)


def own_bug(task_input):
    return {"known": 1}[task_input]


def own_client(task_input):
    raise ConnectionRefusedError("model.example:443.")


def no_key(task_input):
    raise RuntimeError("set the OPENAI_API_KEY environment variable.")


@pytest.mark.parametrize(
    ("agent", "begins", "advised"),
    [
        (own_bug, rf"KeyError: 'a' \({__file__}:\d+ in own_bug\): all 2 rollouts .*", ""),
        (own_client, rf"ConnectionRefusedError: model.example:443 \({__file__}:\d+ in own_client\): .*", "art plugins"),
        (no_key, r"RuntimeError: .*", "set OPENAI_API_KEY=unused"),
    ],
)
async def test_an_agent_that_fails_before_it_asks_is_told_its_own_error_first(tmp_path, agent, begins, advised):
    async with run_of(tmp_path) as run:
        with pytest.raises(CaptureError) as refused:
            await run.collect(agent, ["a"], group_size=2)
    said = str(refused.value)
    assert re.fullmatch(begins, said) and ".." not in said and advised in said
    assert advised == "art plugins" or "plugin" not in said


async def test_an_agent_of_a_package_that_is_called_like_ours_is_told_its_line(tmp_path, monkeypatch):
    (tmp_path / "art_gallery").mkdir()
    (tmp_path / "art_gallery" / "__init__.py").write_text("def agent(task):\n    return {}[task]\n")
    monkeypatch.syspath_prepend(tmp_path)
    from art_gallery import agent

    async with run_of(tmp_path) as run:
        with pytest.raises(CaptureError, match=r"KeyError: 'a' \(.*art_gallery/__init__.py:2 in agent\)"):
            await run.collect(agent, ["a"], group_size=2)


async def test_a_context_that_is_too_long_is_the_400_that_frameworks_know(tmp_path):
    def refuse(request):
        if len(request["messages"]) > 1:
            raise UpstreamError(
                "This model's maximum context length is 8 tokens.", status=400, code="context_length_exceeded"
            )
        return "ok"

    async with run_of(tmp_path, engine=FakeEngine(refuse)) as run:
        (group,) = await run.collect(ScriptedAgent(2), ["a"], group_size=2)
    for trajectory in group.trajectories:
        assert len(trajectory.calls) == 1 and "400" in trajectory.error


@pytest.mark.system
async def test_rewards_all_equal_for_many_steps_get_advice(tmp_path):
    import io

    from rich.console import Console

    from art_core.loop.display import Display

    told = io.StringIO()
    await art.train(
        ScriptedAgent(), ["a"], model="tiny", steps=4, group_size=2, engine=FakeEngine(), learner=CountingLearner(),
        reward=lambda trajectory: 0.25, run_dir=tmp_path / "run", progress=Display(console=Console(file=told, width=500)),
    )  # fmt: skip
    assert "3 steps in a row taught nothing" in told.getvalue() and "rewards seen: 0.25" in told.getvalue()
    assert told.getvalue().count("taught nothing") == 1


async def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*in use"):
            async with run_of(tmp_path, port=port):
                pass


async def test_a_run_folder_that_belongs_to_another_model(tmp_path):
    async with run_of(tmp_path):
        pass
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"belongs to another model: it was started with 'tiny'"):
        async with run_of(tmp_path, model=str(other)):
            pass


async def test_a_run_folder_in_which_a_start_has_failed_may_be_begun_with_another_model(tmp_path):
    async def fail():
        raise ConfigError("no such file")

    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "run").mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no such file"):
        async with run_of(tmp_path, model=str(other), engine=SimpleNamespace(start=fail)):
            pass
    assert (tmp_path / "run" / "run.sqlite").exists(), "a folder that was there before is left"
    async with run_of(tmp_path) as run:
        assert run.store.meta("model") == "tiny"


@pytest.mark.parametrize("left", [None, "server.log"])
async def test_a_start_that_fails_leaves_no_folder_unless_something_is_in_it(tmp_path, left):
    async def fail():
        if left:
            (tmp_path / "run" / left).write_text("why")
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        async with run_of(tmp_path, engine=SimpleNamespace(start=fail)):
            pass
    assert [it.name for it in tmp_path.iterdir()] == (["run"] if left else [])


async def test_a_run_that_fails_when_it_closes_keeps_what_was_recorded(tmp_path):
    class Full(CountingLearner):
        def save(self, folder):
            raise StoreError("no space left")

    with pytest.raises(StoreError, match="no space left"):
        async with run_of(tmp_path, learner=Full(), checkpoint_every=9) as run:
            groups = await run.score(
                await run.collect(ScriptedAgent(), ["a"], group_size=2), lambda trajectory: trajectory.seconds
            )
            await run.learn(groups)
    assert len(art.load_trajectories(tmp_path / "run")) == 2


async def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StoreError, match="cannot be made"):
        async with run_of(tmp_path):
            pass


async def test_an_agent_whose_calls_do_not_reach_the_rollout(tmp_path):
    async with run_of(tmp_path) as run:
        with pytest.raises(CaptureError, match="no model call was recorded.*plugin"):
            await run.collect(lambda task_input: "no call", ["a"], group_size=2)


async def test_an_unknown_name_lists_what_is_installed(tmp_path):
    with pytest.raises(ConfigError, match="no engine named 'warp'.*'embedded'"):
        async with run_of(tmp_path, engine="warp"):
            pass


async def test_a_misspelt_name_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"no engine named 'embeded' \(did you mean 'embedded'\?\)"):
        async with run_of(tmp_path, engine="embeded"):
            pass


@pytest.mark.parametrize("engine", ["http", "127.0.0.1:8000/v1", "gpu-box:8000"])
async def test_an_address_that_is_none(tmp_path, engine):
    with pytest.raises(ConfigError, match="isn't a complete address.*engine='http://HOST:PORT/v1'"):
        async with run_of(tmp_path, engine=engine):
            pass


FULL_DISK = """
    import asyncio, resource, signal, sys
    from pathlib import Path
    import art_core as art
    from art_core.errors import StoreError
    from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    async def main():
        async with art.open_run(Path(sys.argv[1]), engine=FakeEngine("x" * 2000), learner=CountingLearner()) as run:
            groups = await run.collect(ScriptedAgent(), ["first"], group_size=2)
            size = max(p.stat().st_size for p in Path(sys.argv[1]).glob("run.sqlite*"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, resource.RLIM_INFINITY))
            try:
                for i in range(200):
                    await run.collect(ScriptedAgent(), [f"more {i} " + "y" * 500], group_size=2)
            except StoreError as error:
                print("STOPPED:", error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    asyncio.run(main())
"""


@pytest.mark.smoke
@pytest.mark.system
def test_a_full_disk_stops_the_run_and_loses_nothing_recorded_before(tmp_path):
    """A limit on the size of files stands in for a full disk: writes fail in the same place."""
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL_DISK))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=120, check=False
    )
    assert "STOPPED:" in done.stdout, done.stderr
    assert "run.sqlite" in done.stdout
    store = Store(tmp_path / "run" / "run.sqlite")
    kept = [t for t in store.trajectories() if t.task == "first"]
    store.close()
    assert len(kept) == 2 and all(len(t.calls) == 1 for t in kept)


async def test_two_loops_are_not_nested_by_accident(tmp_path):
    common = {"model": "tiny", "reward": lambda it: 1.0, "run_dir": tmp_path / "run"}
    for name, more in (("train", {"steps": 1}), ("evaluate", {})):
        with pytest.raises(ConfigError, match=f"event loop is running.*await art.{name}"):
            getattr(art, f"{name}_sync")(ScriptedAgent(), ["a"], **common, **more)


@pytest.mark.parametrize("tasks", ["tasks.jsonl", {"a": 1}, None, 5])
async def test_tasks_that_are_no_list_are_refused_before_anything_starts(tmp_path, tasks):
    with pytest.raises(ConfigError, match="must be a list"):
        await art.train(lambda task: task, tasks, model="tiny", steps=1, reward=len, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_an_agent_whose_own_calls_fail_uncaptured_is_told_of_plugins(tmp_path):
    def agent(task: str) -> str:
        raise ConnectionError("refused")

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        with pytest.raises(CaptureError, match=r"ConnectionError: refused.*'art plugins' lists"):
            await run.collect(agent, ["x"], group_size=2)


async def test_a_function_that_takes_no_task_is_refused_before_it_runs(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        with pytest.raises(AgentError, match="a function of a task"):
            await run.collect(lambda a, b, c: "x", ["x"], group_size=2)


async def test_an_object_that_rollouts_cannot_share_fails_with_what_to_do(tmp_path):
    class Busy:
        running = False

        async def __call__(self, task):
            if self.running:
                raise RuntimeError("it is running already")
            self.running = True
            await asyncio.sleep(0.01)

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        [group] = await run.collect(Busy(), ["x"], group_size=2, allow_no_calls=True)
    assert [trajectory.error for trajectory in group.trajectories if trajectory.error] == [
        "RuntimeError: it is running already (If rollouts can't share a Busy, pass a function without parameters that makes one: "
        "def agent(): return Busy(...))"
    ]


async def test_a_partial_function_keeps_nothing_so_its_failures_say_nothing_of_sharing(tmp_path):
    async def failing(wrong, task):
        await asyncio.sleep(0.01)
        raise LookupError(wrong)

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        agent = functools.partial(failing, "not there")
        [group] = await run.collect(agent, ["x"], group_size=2, allow_no_calls=True)
    assert [trajectory.error for trajectory in group.trajectories] == ["LookupError: not there"] * 2


async def test_what_a_function_without_parameters_made_must_be_an_agent(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        with pytest.raises(
            CaptureError, match="of type builtins.str, which a function without parameters made; wrap it"
        ):
            await run.collect(lambda: "x", ["x"], group_size=2)


async def test_a_learner_that_cannot_be_made_leaves_no_run_folder_where_there_was_none(tmp_path):
    with pytest.raises(ConfigError, match="learner='unsloth'"):
        await art.train(
            ScriptedAgent(), ["a"], model="tiny", steps=1, engine=FakeEngine(), load_in_4bit=True, run_dir=tmp_path / "run",
            reward=lambda trajectory: 1.0,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


async def test_a_folder_of_runs_is_not_taken_for_a_run(tmp_path):
    for name in ("first", "second"):
        async with run_of(tmp_path / name):
            pass
    for folder in (tmp_path / "first", tmp_path / "second"):
        (folder / "run").rename(tmp_path / f"{folder.name}-run")
    with pytest.raises(ConfigError, match=r"is a folder of runs \(first-run, second-run\); give a run one of its own"):
        async with art.open_run(tmp_path, engine=FakeEngine(), learner=CountingLearner()):
            pass
    assert not (tmp_path / "run.sqlite").exists()


async def test_what_was_recorded_before_a_program_failed_is_kept(tmp_path):
    with pytest.raises(KeyError):
        async with run_of(tmp_path) as run:
            await run.collect(ScriptedAgent(), ["a"], group_size=2)
            raise KeyError("a bug")
    with Store(tmp_path / "run" / "run.sqlite") as store:
        assert len(store.trajectories()) == 2
