"""Agents that run elsewhere: what a lost machine leaves, and what a key makes of runs that were finished before."""

import asyncio

import httpx
import pytest

import art_core as art
from art_core.errors import CaptureError, RolloutLost
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


async def ask(address):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post(f"{address.base_url}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]


class Flaky:
    """Loses the machines of the first ``losses`` runs, after a call."""

    def __init__(self, losses):
        self.losses, self.runs, self.entered = losses, [], 0

    def adapt(self, agent):
        async def run(given, address):
            self.runs.append(address.rollout_id)
            number = len(self.runs)
            said = await ask(address)
            if number <= self.losses:
                raise RolloutLost(f"machine {number} is gone")
            return agent(given, said)

        return run

    async def __aenter__(self):
        self.entered += 1

    async def __aexit__(self, *_):
        self.entered -= 1


async def test_a_run_whose_machine_is_lost_is_made_again_and_only_the_last_counts(tmp_path):
    executor = Flaky(losses=3)
    async with run_of(tmp_path, executor=executor) as run:
        assert executor.entered == 1
        [group] = await run.collect(lambda given, said: given, ["a"], group_size=2)
        stored = run.store.rollouts()
    assert executor.entered == 0
    assert [t.output for t in group.trajectories] == ["a", "a"] and all(len(t.calls) == 1 for t in group.trajectories)
    assert len(stored) == 5 and len({it.group for it in stored}) == 1
    assert sum((it.error or "").startswith("RolloutLost: machine") for it in stored) == 3


async def test_a_run_that_loses_every_machine_has_failed(tmp_path):
    executor = Flaky(losses=100)
    async with run_of(tmp_path, executor=executor) as run:
        [group] = await run.collect(None, ["a"], group_size=1, key="k")
        assert await run.collect(None, ["a"], group_size=1, key="k") == [group]
    assert group.trajectories[0].error == "MachinesLost: 5 machines were lost with it; the last: machine 5 is gone"
    assert len(executor.runs) == 5


async def test_what_was_finished_under_a_key_is_not_run_again(tmp_path):
    ended = asyncio.Event()

    async def agent(given, address):
        if len(asked) == 5:
            await ended.wait()  # killed meanwhile
        asked.append(given)
        await ask(address)
        return f"{given} {len(asked)}"

    asked, finished = [], []
    async with run_of(tmp_path) as run:
        run.on_rollout = lambda: finished.append(1)
        half = asyncio.ensure_future(run.collect(agent, ["a", "b"], group_size=4, key="step-1"))
        while len(finished) < 5:
            await asyncio.sleep(0.01)
        half.cancel()
        await asyncio.wait([half])
        before = {t.rollout_id for t in run.store.trajectories() if t.error is None}
    assert len(before) == 5
    ended.set()
    async with run_of(tmp_path) as run:
        groups = await run.collect(agent, ["a", "b"], group_size=4, key="step-1")
        again = await run.collect(agent, ["a", "b"], group_size=4, key="step-1")
    assert [len(group.trajectories) for group in groups] == [4, 4] and len(asked) == 8
    assert before < {t.rollout_id for group in groups for t in group.trajectories}
    assert [[t.output for t in g.trajectories] for g in groups] == [[t.output for t in g.trajectories] for g in again]


async def test_a_rollout_that_awaited_something_cancelled_has_ended_and_is_not_run_again(tmp_path):
    ran = []

    async def agent(task, address):
        ran.append(await ScriptedAgent()(task, address))
        tool = asyncio.ensure_future(asyncio.sleep(60))
        tool.cancel()
        await tool

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        for _ in range(2):
            [group] = await run.collect(agent, ["a"], group_size=2, key="k")
            assert len(ran) == len(run.collected("k", 0)) == len(group.trajectories) == 2


async def test_what_could_not_be_recorded_under_a_key_is_run_again_once_it_can_be(tmp_path):
    async def elsewhere(given, address):
        raise CaptureError("the client library is not known")

    async def agent(given, address):
        return await ask(address)

    async with run_of(tmp_path) as run:
        with pytest.raises(CaptureError, match="is not known"):
            await run.collect(elsewhere, ["a"], group_size=2, key="k")
        [group] = await run.collect(agent, ["a"], group_size=2, key="k")
    assert [(t.error, len(t.calls)) for t in group.trajectories] == [(None, 1)] * 2


async def test_a_lost_machine_gives_its_place_back_and_the_next_attempt_waits_for_one(tmp_path):
    gate, order = asyncio.Semaphore(1), []

    class Full:
        def adapt(self, agent):
            async def run(given, address):
                order.append("run")
                await ask(address)
                if len(order) == 1:
                    waiting.append(asyncio.create_task(another()))
                    await asyncio.sleep(0)
                    raise RolloutLost("gone")

            return run

        def gate(self, agent):
            return gate

    async def another():
        async with gate:
            order.append("another")

    waiting = []
    async with run_of(tmp_path, executor=Full()) as run:
        await run.collect(None, ["a"], group_size=1)
    assert order == ["run", "another", "run"]
