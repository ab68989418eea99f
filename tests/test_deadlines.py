"""Work that never ends is ended or abandoned at every boundary, and the run continues and names the limit."""

import asyncio
import signal
import threading
import time

import httpx
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat
from reward_fakes import group_of

import art_core as art
from art_core.errors import CaptureError, ConfigError, TooLate
from art_core.runtime.deadlines import within
from art_core.serving import ServingProxy
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call, Weights


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


async def forever(*_):
    await asyncio.Event().wait()


class Stubborn:
    """Ignores its cancellation until it is released."""

    def __init__(self):
        self.released, self.cancelled = asyncio.Event(), 0

    async def __call__(self, *_):
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr("art_core.runtime.deadlines.GRACE", 0.05)


@pytest.fixture
def free_alarm():
    """Take the alarm from pytest-timeout, because nobody uses it in a training run."""
    timer, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    unused = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)
    assert unused == (signal.SIG_DFL, (0, 0))


async def test_work_that_ignores_its_cancellation_is_abandoned(short_grace):
    stubborn = Stubborn()
    with pytest.raises(TooLate):
        await within(stubborn(), 0.05)
    assert stubborn.cancelled == 1
    stubborn.released.set()


async def test_work_ends_with_its_caller():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        try:
            await forever()
        finally:
            ended.set()

    waiting = asyncio.create_task(within(work(), 60))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_agents_of_a_cancelled_collection_have_time_to_clean_up(tmp_path):
    begun, cleaned = [], []

    async def agent(task, address):
        begun.append(task)
        try:
            await forever()
        finally:
            if task == "slow":
                while not any(it.finished for it in run.store.rollouts()):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
            cleaned.append(task)

    async with run_of(tmp_path) as run:
        collecting = asyncio.create_task(run.collect(agent, ["slow", "fast"], group_size=1))
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    assert cleaned == ["fast", "slow"]


@pytest.mark.system
async def test_an_agent_that_ignores_its_cancellation_fails_and_the_run_continues(tmp_path, short_grace):
    stubborn = Stubborn()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await stubborn()

    async with run_of(tmp_path, rollout_timeout=1.0) as run:
        (group,) = await run.collect(agent, ["a"], group_size=2)
    assert {t.error for t in group.trajectories} == {"TimeoutError: not done after 1 seconds"}
    assert [len(t.calls) for t in group.trajectories] == [1, 1]
    stubborn.released.set()


async def test_a_timeout_of_the_agent_is_reported_as_its_own(tmp_path):
    async def agent(task, address):
        await ScriptedAgent()(task, address)
        raise TimeoutError("the tool took too long")

    async with run_of(tmp_path) as run:
        (group,) = await run.collect(agent, ["a"], group_size=1)
    assert group.trajectories[0].error == "TimeoutError: the tool took too long"


class Judge:
    async def score(self, group):
        await forever()


def hanging_function(trajectory):
    threading.Event().wait()


def busy_function(trajectory):
    while True:
        pass


async def hanging_coroutine(trajectory):
    await forever()


@pytest.mark.parametrize("reward", [Judge(), hanging_coroutine, hanging_function, busy_function])
async def test_rollouts_not_scored_in_time_are_unscored(tmp_path, reward, free_alarm):
    async with run_of(tmp_path, score_timeout=0.2) as run:
        scored = await run.score([group_of(1, 2)], reward)
        again = await run.score([group_of(1, 2)], lambda trajectory: trajectory.output)
    assert [t.reward for t in scored[0].trajectories] == [None, None]
    assert all(
        "did not finish within 0.2 seconds (score_timeout)" in t.notes["unscored"] for t in scored[0].trajectories
    )
    assert [t.reward for t in again[0].trajectories] == [1, 2]


async def test_a_part_that_hangs_leaves_the_weighted_sum_unscored(tmp_path, free_alarm):
    reward = art.weighted(right=(1, lambda t: 1.0), hangs=(1, hanging_function))
    async with run_of(tmp_path, score_timeout=0.2) as run:
        (scored,) = await run.score([group_of(1, 2)], reward)
    assert [t.reward for t in scored.trajectories] == [None, None]


async def test_training_continues_after_a_reward_hung_in_one_step(tmp_path):
    hung = []

    async def reward(trajectory):
        if not hung:
            hung.append(trajectory)
            await forever()
        return float(int(trajectory.rollout_id[:8], 16))

    result = await art.train(
        ScriptedAgent(), ["a"], model="tiny", steps=2, tasks_per_step=1, group_size=2, reward=reward, score_timeout=0.3,
        engine=FakeEngine(), learner=CountingLearner(), run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert result.report["steps"] == 2


async def test_an_alarm_that_is_already_set_is_left_alone(tmp_path, free_alarm):
    rung = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rung.set())
    try:
        async with run_of(tmp_path, score_timeout=30.0) as run:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            (scored,) = await run.score([group_of(1)], lambda t: float(rung.wait(10)))
        assert scored.trajectories[0].reward == 1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


class Hangs(EchoEngine):
    """Answers the message ``hang`` with its first letter only."""

    async def chat(self, request):
        if request["messages"][-1]["content"] == "hang":
            await forever()
        return await super().chat(request)

    async def stream(self, request):
        async for chunk in super().stream(request):
            yield chunk
            if request["messages"][-1]["content"] == "hang":
                await forever()


async def ask(url, text, **settings):
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return await client.post(f"{url}/chat/completions", json=chat(text, **settings))


async def test_a_call_that_is_never_answered_fails_alone():
    async with await ServingProxy.start(Hangs, ListRecorder, process=False, call_timeout=0.3) as serving:
        url = await serving.open("r1")
        hung, fine = await asyncio.gather(ask(url, "hang"), ask(url, "hello"))
        await serving.swap(Weights(1, None))  # nothing is in flight now
    assert fine.status_code == 200
    assert hung.status_code == 504 and hung.headers["x-should-retry"] == "false"
    assert "the engine did not answer within 0.3 seconds (call_timeout)" in hung.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_sampled_until_the_timeout_are_kept_as_aborted(stream):
    recorder = ListRecorder()
    engine = (lambda: Hangs()) if stream else (lambda: EchoEngine(0.1))
    async with await ServingProxy.start(engine, lambda: recorder, process=False, call_timeout=0.8) as serving:
        response = await ask(await serving.open("r1"), "hang" if stream else "a long answer", stream=stream)
        assert "call_timeout" in response.text
        await serving.close("r1")
    (call,) = recorder.of("r1")
    assert isinstance(call, Call) and call.finish_reason == "aborted" and call.sampled_ids


@pytest.mark.system
async def test_a_stream_may_take_longer_than_the_timeout_between_two_chunks():
    async with await ServingProxy.start(
        lambda: EchoEngine(0.1), ListRecorder, process=False, call_timeout=1.0
    ) as serving:
        response = await ask(await serving.open("r1"), "a long answer", stream=True)
    assert "call_timeout" not in response.text and "[DONE]" in response.text


class NeverStarts(FakeEngine):
    async def start(self):
        await forever()


class NeverLoads(FakeEngine):
    async def load(self, weights):
        await forever()


@pytest.mark.system
@pytest.mark.parametrize(("engine", "order"), [(NeverStarts, "start"), (NeverLoads, "swap")])
async def test_an_engine_that_never_does_what_it_is_told_ends_the_run(tmp_path, engine, order):
    began = time.monotonic()
    with pytest.raises(CaptureError, match=rf"did not finish '{order}' within 1 seconds \(engine_timeout\)"):
        await art.train(
            ScriptedAgent(), ["a"], model="tiny", steps=1, tasks_per_step=1, group_size=2, engine_timeout=1.0,
            reward=lambda t: float(int(t.rollout_id[:8], 16)), engine=engine(), learner=CountingLearner(),
            run_dir=tmp_path / "run", progress=False,
        )  # fmt: skip
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["call_timeout", "score_timeout", "engine_timeout", "watchdog_seconds"])
def test_a_limit_is_a_number_or_none(name):
    with pytest.raises(ConfigError, match=f"{name} must be a number >= 0, got 'soon'"):
        art.open_run("never-made", **{name: "soon"})
