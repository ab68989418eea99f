"""What was asked under a key: done once, in the order in which it was asked, and again where nothing came of it."""

import asyncio
import threading
import time
from dataclasses import replace

import httpx
import pytest
from reward_fakes import unlike

from art_core.errors import CaptureError, StoreError


async def agent(task, address):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": task}]}
        answer = await client.post(f"{address.base_url}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]


async def test_a_collection_that_failed_is_made_when_it_is_asked_for_again(serving):
    async with serving() as server, server.connect() as run:
        async with server.worker("without"):
            with pytest.raises(CaptureError, match="this worker has no agent"):
                await run.collect(None, ["one"], group_size=2, key="first")
        async with server.worker("a", agent):
            [group] = await run.collect(None, ["one"], group_size=2, key="first")
        assert [t.error for t in group.trajectories] == [None, None]


@pytest.mark.system
async def test_steps_are_taken_in_the_order_in_which_they_are_asked_for(serving, monkeypatch):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        slow, quick = await run.score(await run.collect(None, ["slow", "quick"], group_size=4), unlike)
        stored, ids = server.run.store.trajectory, {t.rollout_id for t in slow.trajectories}

        def read(rollout_id):
            time.sleep(0.1 if rollout_id in ids else 0)
            return stored(rollout_id)

        monkeypatch.setattr(server.run.store, "trajectory", read)
        first = asyncio.ensure_future(run.learn([slow], key="first"))
        while server.app.state.served.jobs.get("first") is None:
            await asyncio.sleep(0.01)
        await asyncio.gather(first, run.learn([quick], key="second"))
        jobs = server.app.state.served.jobs
        assert [jobs.get(key).result["step"] for key in ("first", "second")] == [1, 2]


@pytest.mark.smoke
@pytest.mark.system
async def test_a_step_whose_weights_a_killed_server_took_along_is_taken_again(serving):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        groups = await run.score(await run.collect(None, ["one"], group_size=4), unlike)
        await run.learn(groups, key="first")
        assert server.run.step == 1
        server.run._learning.step = 0  # as after a kill, where no checkpoint had been written
        await run.learn(groups, key="first")
        assert server.run.step == 1


@pytest.mark.system
async def test_a_disk_that_is_full_when_a_job_ends_ends_the_server_and_the_next_one_knows_the_job(serving, monkeypatch):
    freed = asyncio.Event()

    async def waiting(task, address):
        await freed.wait()
        return await agent(task, address)

    def full():
        raise StoreError("no space is left")

    async with serving() as server, server.worker("a", waiting), server.connect() as run:
        jobs = server.app.state.served.jobs
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=2, key="first"))
        async with asyncio.timeout(10):
            while not server.run.store.rollouts():
                await asyncio.sleep(0.01)
            with monkeypatch.context() as patched:
                patched.setattr(server.run.store, "flush", full)
                freed.set()
                while jobs.died is None:
                    await asyncio.sleep(0.01)
        assert jobs.died.args == ("no space is left",) and not collecting.done()
        collecting.cancel()
    async with serving() as server, server.connect() as run:  # without a worker: it is not made again
        [group] = await run.collect(None, ["one"], group_size=2, key="first")
        assert len(group.trajectories) == len(server.run.store.rollouts()) == 2


async def test_a_collection_that_is_cancelled_while_its_end_is_stored_has_ended(serving, monkeypatch):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        jobs, store, storing = server.app.state.served.jobs, server.run.store, threading.Event()
        flush, set_meta = store.flush, store.set_meta

        def noticed(name, value):
            set_meta(name, value)
            if name == "job/first" and "state" in value:
                storing.set()

        def slow():
            time.sleep(0.2 if storing.is_set() else 0)
            flush()

        monkeypatch.setattr(store, "set_meta", noticed)
        monkeypatch.setattr(store, "flush", slow)
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=2, key="first"))
        async with asyncio.timeout(10):
            await asyncio.to_thread(storing.wait, 10)
            states = await asyncio.gather(jobs.cancel("first"), jobs.cancel("first"))
            assert [state.state for state in states] == ["done", "done"]
            assert len((await collecting)[0].trajectories) == 2


async def test_a_step_counts_the_metrics_that_its_groups_have(serving):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        [group] = await run.collect(None, ["one"], group_size=3)
        by_hand = tuple(
            replace(t, reward=float(n), metrics={"success": float(n == 0)}) for n, t in enumerate(group.trajectories)
        )
        metrics = await run.learn([replace(group, trajectories=by_hand)])
        assert metrics["success"] == pytest.approx(1 / 3)
