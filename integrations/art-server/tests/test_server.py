"""The run from another machine, and workers that run its agents: collect, score and learn over real sockets."""

import asyncio
import gc
import time

import httpx
import pytest
from reward_fakes import unlike
from starlette.websockets import WebSocketDisconnect

from art_core.errors import CaptureError
from art_server import TrainingClient, TrainingServer
from art_server.client import WorkerReplaced
from art_server.loops import background_loop
from art_server.messages import ModelState
from art_server.remote import ServerError


async def ask(address, text):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {address.api_key}"}
        answer = await client.post(f"{address.base_url}/chat/completions", json=body, headers=headers)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]


async def agent(task, address):
    return await ask(address, task)


async def test_workers_run_the_agent_and_the_groups_come_back_whole(serving):
    async with (
        serving() as server,
        server.worker("a", agent) as a,
        server.worker("b", agent) as b,
        server.connect() as run,
    ):
        groups = await run.collect(None, ["one", "two", "three"], group_size=4)
        assert [group.task for group in groups] == ["one", "two", "three"]
        stored = {t.rollout_id: t for t in server.run.store.trajectories()}
        for trajectory in (t for group in groups for t in group.trajectories):
            assert trajectory == stored.pop(trajectory.rollout_id)
            assert len(trajectory.calls) == 1 and trajectory.calls[0].sampled_ids and trajectory.error is None
        assert not stored
        assert a.finished + b.finished == 12 and a.finished and b.finished


async def test_scoring_and_learning_are_those_of_a_run_that_is_held_here(serving, tmp_path):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        groups = await run.collect(None, ["one", "two"], group_size=3)
        scored = await run.score(groups, unlike)
        metrics = await run.learn(scored)
        again = await server.run.score(groups, unlike)
        assert [group.advantages for group in scored] == [group.advantages for group in again]
        assert metrics["groups_with_contrast"] == sum(any(group.advantages) for group in scored)
        assert server.run.step == 1 and (await run.status())["step"] == 1
        assert {score.by for score in server.run.store.scores(groups[0].trajectories[0].rollout_id)} == {"unlike"}


async def test_a_pool_without_a_worker_is_logged_while_rollouts_wait_for_one(serving, monkeypatch, caplog):
    monkeypatch.setattr("art_server.roster.NO_WORKER", 0.2)
    async with serving() as server, server.connect() as run, server.worker("a", agent):
        await run.collect(None, ["one"], group_size=1)
        await asyncio.sleep(0.3)
        assert "no worker serves" not in caplog.text
        collecting = asyncio.create_task(run.collect(None, ["one"], group_size=2, pool="gpus"))
        async with asyncio.timeout(20):
            while "2 rollouts wait, because no worker serves pool gpus; start one: art worker " not in caplog.text:
                await asyncio.sleep(0.05)
        async with server.worker("b", agent, pool="gpus"):
            assert len((await collecting)[0].trajectories) == 2


async def test_an_agent_given_to_collect_runs_here_and_nowhere_else(serving):
    async with serving() as server, server.worker("elsewhere", agent) as elsewhere, server.connect() as run:
        seen = []

        async def mine(task, address):
            seen.append(task)
            return {"said": await ask(address, task)}

        [group] = await run.collect(
            mine,
            [{"input": 3}],
            group_size=2,
            to_input=lambda task: f"number {task['input']}",
            to_output=lambda it: it["said"],
        )
    assert seen == ["number 3", "number 3"] and elsewhere.finished == 0
    assert all(isinstance(t.output, str) for t in group.trajectories)


async def test_an_agent_that_fails_on_a_worker_has_failed_as_it_would_here(serving):
    async def broken(task, address):
        await ask(address, task)
        raise KeyError("no such city")

    async with serving() as server, server.worker("a", broken), server.connect() as run:
        [group] = await run.collect(None, ["one"], group_size=2)
    assert [t.error for t in group.trajectories] == ["KeyError: 'no such city'"] * 2


@pytest.mark.system
async def test_an_agent_whose_calls_go_elsewhere_ends_the_collection_with_the_reason(serving):
    async def silent(task):
        return "nothing asked"

    async with serving() as server, server.worker("a", silent), server.connect() as run:
        with pytest.raises(CaptureError, match="no model call was recorded"):
            await run.collect(None, ["one"], group_size=2)
        assert await run.collect(None, ["one"], group_size=2, allow_no_calls=True)
    async with serving() as server, server.worker("a"), server.connect() as run:
        with pytest.raises(CaptureError, match="this worker has no agent; start it with --agent"):
            await run.collect(None, ["one"], group_size=2)


async def test_new_weights_are_told_to_every_worker_and_to_those_to_come(serving):
    async with serving() as server, server.worker("a", agent) as a, server.connect() as run:
        groups = await run.score(await run.collect(None, ["one"], group_size=4), unlike)
        await run.learn(groups)
        assert server.run.version == 1
        async with server.worker("b", agent) as b:
            for client in (a, b):
                while not client.model_state or client.model_state["version"] != 1:
                    await asyncio.sleep(0.01)
                assert client.model_state == {"version": 1, "url": "/api/runs/run/checkpoints"}
        assert {it["version"] for it in server.roster.workers()} == {1}


@pytest.mark.system
async def test_the_same_key_collects_and_learns_once_however_often_it_is_asked(serving):
    async with serving() as server, server.worker("a", agent), server.connect() as run:
        first, second = await asyncio.gather(
            run.collect(None, ["one"], group_size=4, key="first"), run.collect(None, ["one"], group_size=4, key="first")
        )
        assert first == second == await run.collect(None, ["one"], group_size=4, key="first")
        assert len(server.run.store.rollouts()) == 4
        scored = await run.score(first, unlike)
        assert await run.learn(scored, key="step-1") == await run.learn(scored, key="step-1")
        assert server.run.step == 1
        with pytest.raises(ServerError, match="was used for another request"):
            await run.collect(None, ["two"], group_size=4, key="first")


@pytest.mark.system
async def test_a_server_that_is_started_again_goes_on_where_it_was(serving):
    begun, allowed = asyncio.Event(), asyncio.Event()

    async def slow(task, address):
        said = await ask(address, task)
        if task == "slow":
            begun.set()
            await allowed.wait()
        return said

    async with serving() as server, server.worker("a", slow), server.connect(patience=30) as run:
        [before] = await run.collect(None, ["before"], group_size=2, key="before")
        collecting = asyncio.ensure_future(run.collect(None, ["quick", "slow"], group_size=2, key="half"))
        await begun.wait()
        while len(server.run.store.trajectories()) < 4:
            await asyncio.sleep(0.01)
        port = int(server.url.rpartition(":")[2])
        collecting.cancel()
    allowed.set()
    async with serving(port=port) as server, server.worker("a", slow), server.connect() as run:
        assert [before] == await run.collect(None, ["before"], group_size=2, key="before")
        quick, late = await run.collect(None, ["quick", "slow"], group_size=2, key="half")
        assert [t.error for t in (*quick.trajectories, *late.trajectories)] == [None] * 4
        done = [it for it in server.run.store.rollouts() if it.finished and it.error is None]
        assert len(done) == 6


@pytest.mark.system
async def test_a_run_that_takes_too_long_is_ended_on_its_worker_and_its_place_is_free(serving):
    ended = asyncio.Event()

    async def hangs(task, address):
        await ask(address, task)
        if task == "hang":
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

    async with serving(rollout_timeout=0.5) as server, server.worker("a", hangs, workers=1), server.connect() as run:
        groups = await run.collect(None, ["hang", "fine", "fine too"], group_size=1)
        await ended.wait()
    errors = [group.trajectories[0].error for group in groups]
    assert errors == ["TimeoutError: not done after 0.5 seconds", None, None]


@pytest.mark.system
async def test_no_more_runs_are_under_way_than_the_workers_have_places_for(serving):
    now, most = 0, 0

    async def counting(task, address):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await ask(address, task)
        await asyncio.sleep(0.05)
        now -= 1

    async with serving() as server, server.worker("a", counting, workers=2), server.connect() as run:
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=12))
        while now < 2:
            await asyncio.sleep(0.01)
        status = await run.status()
        assert status["active_clients"] == 1 and status["episodes_queued"] >= 8
        await collecting
    assert most == 2


@pytest.mark.system
async def test_a_worker_that_goes_silent_loses_its_runs_to_another(serving):
    stuck = asyncio.Event()

    async def hangs(task, address):
        await ask(address, task)
        stuck.set()
        await asyncio.sleep(60)

    async with serving(lease=1.0) as server, server.connect() as run:
        silent = TrainingClient("silent", server.url, agent=hangs)
        await silent.connect()
        reading = asyncio.create_task(silent.handle_server_messages())
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=4))
        await stuck.wait()
        silent._send_status = lambda *_: asyncio.sleep(60)  # it lives, and says nothing
        async with server.worker("b", agent):
            [group] = await collecting
        reading.cancel()
        await silent.close()
        stored = server.run.store.rollouts()
    assert [t.error for t in group.trajectories] == [None] * 4
    assert sum((it.error or "").startswith("RolloutLost: worker silent") for it in stored) == 4


@pytest.mark.system
async def test_a_worker_that_leaves_ends_what_it_runs_and_takes_no_more(serving):
    begun, allowed = asyncio.Event(), asyncio.Event()

    async def waits(task, address):
        begun.set()
        await allowed.wait()
        return await ask(address, task)

    async with serving() as server, server.connect() as run:
        client = TrainingClient("leaver", server.url, agent=waits, workers=2)
        work = asyncio.create_task(client.run())
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=4))
        await begun.wait()
        leaving = asyncio.create_task(client.leave())
        await asyncio.sleep(0.1)
        allowed.set()
        await asyncio.wait_for(asyncio.gather(leaving, work), 10)
        assert client.finished == 2 and not server.roster.active_clients
        async with server.worker("next", agent) as following:
            [group] = await collecting
            assert following.finished == 2
    assert [t.error for t in group.trajectories] == [None] * 4


async def test_the_second_worker_of_a_name_takes_over_and_the_first_says_why_it_stops(serving):
    async with serving() as server:
        first = TrainingClient("twin", server.url, agent=agent)
        working = asyncio.create_task(first.run())
        while "twin" not in server.roster.active_clients:
            await asyncio.sleep(0.01)
        async with server.worker("twin", agent):
            with pytest.raises(WorkerReplaced, match="start each worker with its own --id"):
                await asyncio.wait_for(working, 60)
            assert set(server.roster.active_clients) == {"twin"}


@pytest.mark.system
async def test_an_async_agent_that_blocks_its_loop_is_not_taken_for_a_dead_worker(serving):
    async def blocks(task, address):
        time.sleep(1.5)  # longer than the lease
        return await ask(address, task)

    async with serving(lease=0.5) as server, server.connect() as run:
        with background_loop("agents") as loop:
            async with server.worker("a", blocks, agent_loop=loop):
                [group] = await run.collect(None, ["one"], group_size=2)
        assert [t.error for t in group.trajectories] == [None, None] and len(server.run.store.rollouts()) == 2


@pytest.mark.system
async def test_an_agent_of_this_process_is_collected_under_a_key_once_however_often_it_is_asked(serving):
    async with serving() as server, server.connect() as run:
        first = await run.collect(agent, ["one"], group_size=2, key="mine")
    async with serving() as server, server.connect() as run:
        assert first == await run.collect(agent, ["one"], group_size=2, key="mine")
        assert len(server.run.store.rollouts()) == 2


@pytest.mark.system
async def test_a_collection_with_an_agent_of_this_process_does_not_outlive_its_worker(serving):
    async def waits(task, address):
        await asyncio.Event().wait()

    async with serving() as server, server.connect() as run:
        collecting = asyncio.ensure_future(run.collect(waits, ["one"], group_size=1))
        while not server.roster.active_clients:
            await asyncio.sleep(0.01)
        [name] = server.roster.active_clients
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await http.post(f"{server.url}/api/workers/{name}/shutdown")
        with pytest.raises(ServerError, match="shut down the worker in this process"):
            await asyncio.wait_for(collecting, 10)


async def test_a_worker_that_is_away_for_a_moment_keeps_no_place_of_another(serving):
    async def waits(task, address):
        await asyncio.Event().wait()

    async with serving(lease=20) as server, server.connect() as run:
        away = TrainingClient("away", server.url, agent=waits)
        await away.connect()
        reading = asyncio.create_task(away.handle_server_messages())
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=12))
        while server.roster.workers()[0]["running"] < 4:
            await asyncio.sleep(0.01)
        async with server.worker("there", agent) as there:
            await away.websocket.close()
            await reading
            async with asyncio.timeout(10):
                while there.finished < 8:
                    await asyncio.sleep(0.01)
        collecting.cancel()
        await asyncio.wait([collecting])
        await away.close()


@pytest.mark.system
async def test_the_gate_of_a_pool_ends_with_its_rollouts(serving):
    async with serving() as server, server.connect() as run:
        for _ in range(3):
            await run.collect(agent, ["one"], group_size=1)
        gc.collect()
        assert not server.roster._gates


async def test_a_worker_that_leaves_goes_when_its_last_result_has_arrived_and_not_before(serving, monkeypatch):
    begun, allowed, cuts = asyncio.Event(), asyncio.Event(), []

    async def waits(task, address):
        begun.set()
        await allowed.wait()
        return await ask(address, task)

    async with serving(lease=30) as server, server.connect() as run:
        handle = server.roster.handle

        async def cut_once(client_id, text):
            if "episode_result" in text and not cuts:
                cuts.append(text)
                await server.roster.active_clients[client_id].close(1012)
            else:
                await handle(client_id, text)

        monkeypatch.setattr(server.roster, "handle", cut_once)
        leaver = TrainingClient("leaver", server.url, agent=waits)
        work = asyncio.create_task(leaver.run())
        collecting = asyncio.ensure_future(run.collect(None, ["one"], group_size=1))
        await begun.wait()
        leaving = asyncio.create_task(leaver.leave())
        allowed.set()
        await asyncio.wait_for(asyncio.gather(leaving, work), 15)
        [group] = await asyncio.wait_for(collecting, 10)
    assert cuts and group.trajectories[0].error is None


class Broken:
    """A socket whose connection is gone, as Starlette says it."""

    async def send_text(self, data):
        raise WebSocketDisconnect(1006)

    async def close(self, code=1000, reason=None):
        raise WebSocketDisconnect(1006)


@pytest.mark.system
async def test_a_server_ends_though_a_worker_was_gone_and_nobody_knew():
    roster = TrainingServer()
    await roster.register_client("a", Broken())
    roster.publish(ModelState(version=1))
    await roster.handle("a", "no message")
    await roster.close()
    gc.collect()  # a task that failed unheard would be told of now


async def test_a_collection_that_is_cancelled_here_ends_on_the_server_unless_it_has_a_key(serving):
    async def never(task, address):
        await asyncio.sleep(60)

    async with serving() as server, server.connect() as run:
        for key in (None, "kept"):
            collecting = asyncio.ensure_future(run.collect(never, ["one"], group_size=2, key=key))
            while not any(it["running"] for it in server.roster.workers()):
                await asyncio.sleep(0.01)
            collecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await collecting
        assert server.run.store.meta("server/unfinished") == ["kept"]
