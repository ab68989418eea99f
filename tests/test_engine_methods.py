"""What an engine may do besides serving: several versions at a time, rest while the learner works, keep files, count."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

import art_core as art
from art_core.testing import CountingLearner, FakeEngine
from art_core.testing.fakes import version_logprobs
from art_core.types import Call, EngineBase, with_defaults


def group():
    call = Call(prompt_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.1, -0.2))
    return art.Group("t", tuple(art.Trajectory(task="t", calls=(call,), reward=reward) for reward in (0.0, 1.0)))


class Versioned(FakeEngine):
    """Serves adapters by version, from files; says in which order it was asked for what."""

    loads_files = True

    def __init__(self) -> None:
        super().__init__()
        self.said = []
        self.folder = None

    def begin(self, run_dir):
        self.folder = run_dir
        self.said.append("begin")

    async def start(self):
        await super().start()
        self.said.append("start")

    def overlaps(self, weights):
        return True

    def keeps_start(self):
        return True

    def at(self, version):
        return At(self, version)

    async def load(self, weights):
        assert weights.live is None and (weights.path / "version.json").is_file()
        self.said.append(f"load {weights.version}")
        await super().load(weights)

    async def retire(self, version):
        self.said.append(f"retire {version}")

    async def rest(self):
        self.said.append("rest")

    async def wake(self):
        self.said.append("wake")

    async def score(self, ids):
        return version_logprobs(self.version, ids)

    async def counters(self):
        return {"prompt_tokens": 10.0 * len(self.requests), "cached_tokens": 5.0, "sampled_tokens": 1.0}


class At:
    def __init__(self, engine, version):
        self.engine, self.version = engine, version

    async def chat(self, request):
        return {**await self.engine.chat(request), "policy_version": self.version}


class Plain:
    """An engine without a base class."""

    async def chat(self, request):
        return {"said": request}

    async def counters(self):
        return {"sampled_tokens": 2.0}


async def test_an_engine_without_the_base_class_has_its_own_methods_and_the_defaults(tmp_path):
    plain = Plain()
    engine = with_defaults(plain, EngineBase)
    assert await engine.chat("hi") == {"said": "hi"}
    assert await engine.counters() == {"sampled_tokens": 2.0}
    assert await engine.score([1, 2]) is None and await engine.rest() is None and await engine.wake() is None
    assert not engine.overlaps(None) and not engine.keeps_start() and not engine.loads_files
    assert engine.at(3) is engine and engine.begin(tmp_path) is None and await engine.retire(0) is None
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'stream'"):
        engine.stream({})


def test_an_engine_with_the_base_class_is_used_as_it_is():
    engine = FakeEngine()
    assert isinstance(engine, EngineBase) and with_defaults(engine, EngineBase) is engine


def planned(trajectory):
    return tuple(replace(call, agent="planner") for call in trajectory.calls)


async def ask(rollout, **headers):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        (await client.post(f"{rollout.base_url}/chat/completions", json=body, headers=headers)).raise_for_status()


async def test_a_rollout_goes_on_with_the_version_that_it_began_with(tmp_path):
    engine = Versioned()
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner(), max_staleness=1) as run:
        async with run.rollout("a") as old:
            await ask(old)
            await run.learn([group()])
            async with run.rollout("b") as new:
                await ask(new)
                await ask(old)
            assert "retire 0" not in engine.said, "a rollout that began with it is open"
            await run.learn([group()])
        assert engine.said[-1] == "retire 0"
        assert [call.policy_version for call in old.trajectory.calls] == [0, 0]
        assert [call.policy_version for call in new.trajectory.calls] == [1]
    assert [it for it in engine.said if it.startswith(("load", "retire"))] == [
        "load 1",
        "load 2",
        "retire 1",
        "retire 0",
    ]


async def test_an_address_that_outlives_steps_is_answered_by_the_newest_weights(tmp_path):
    engine = Versioned()
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner(), max_staleness=1) as run:
        run.store.add_rollout("long", task="t")
        address = SimpleNamespace(base_url=await run.serving.open("long", newest=True))
        for _ in range(3):
            await ask(address)
            await run.learn([group()])
        assert [it for it in engine.said if it.startswith("retire")] == ["retire 0", "retire 1"]
        await run.serving.flush()
        assert [call.policy_version for call in run.store.calls("long")] == [0, 1, 2]


async def test_untrained_nodes_are_answered_by_the_start_weights_that_the_engine_keeps(tmp_path):
    engine = Versioned()
    settings = {"engine": engine, "learner": CountingLearner(), "train_nodes": ["planner"]}
    async with art.open_run(tmp_path / "run", **settings) as run:
        await run.learn([art.Group("t", tuple(replace(t, calls=planned(t)) for t in group().trajectories))])
        async with run.rollout("a") as rollout:
            await ask(rollout, **{"x-art-agent": "planner"})
            await ask(rollout, **{"x-art-agent": "writer"})
    assert [(call.agent, call.policy_version) for call in rollout.trajectory.calls] == [("planner", 1), ("writer", 0)]
    assert engine.started == 1


async def test_an_engine_that_serves_versions_is_given_new_ones_while_calls_are_in_flight(tmp_path):
    waiting, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Versioned):
        def at(self, version):
            return SlowAt(self, version)

    class SlowAt(At):
        async def chat(self, request):
            waiting.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)
            return await super().chat(request)

    engine = Slow()
    async with (
        art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner(), max_staleness=1) as run,
        run.rollout("a") as rollout,
    ):
        asked = asyncio.create_task(ask(rollout))
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        await run.learn([group()])
        assert engine.said[-1] == "load 1" and not asked.done()
        go_on.set()
        await asked
    assert rollout.trajectory.calls[0].policy_version == 0


async def test_an_engine_rests_while_the_learner_works_and_files_do_not_pile_up(tmp_path):
    engine = Versioned()

    class Learner(CountingLearner):
        def step(self, trees, *, loss=None):
            engine.said.append("step")
            return super().step(trees)

    async with art.open_run(tmp_path / "run", engine=engine, learner=Learner()) as run:
        assert engine.folder == tmp_path / "run"
        for _ in range(4):
            await run.learn([group()])
        assert await run.serving.counters() == {"prompt_tokens": 0.0, "cached_tokens": 5.0, "sampled_tokens": 1.0}
    assert engine.said[:7] == ["begin", "start", "rest", "step", "wake", "load 1", "retire 0"]
    assert sorted(it.name for it in (tmp_path / "run" / "serving").iterdir()) == ["3", "4"]


async def test_an_engine_wakes_where_the_step_fails(tmp_path):
    class Failing(CountingLearner):
        def step(self, trees, *, loss=None):
            raise RuntimeError("no memory")

    engine = Versioned()
    async with art.open_run(tmp_path / "run", engine=engine, learner=Failing()) as run:
        with pytest.raises(RuntimeError, match="no memory"):
            await run.learn([group()])
        assert engine.said[-2:] == ["rest", "wake"]


async def test_nothing_rests_where_rollouts_run_meanwhile(tmp_path):
    engine = Versioned()
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner(), max_staleness=1) as run:
        await run.learn([group()])
    assert "rest" not in engine.said
