"""What a server does with what is no message, and with clients that know no leases."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
import websockets
from websockets.asyncio.client import connect as connect_websocket


async def ask(text):
    client = openai.AsyncOpenAI(api_key="x")
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(text)}])
    return answer.choices[0].message.content


@asynccontextmanager
async def socket(server, name, session=None):
    headers = {"x-art-session": session} if session else {}
    async with connect_websocket(f"ws{server.url[4:]}/ws/{name}", max_size=None, additional_headers=headers) as it:
        yield it


async def heard(it, kind):
    """The next message of a kind."""
    async with asyncio.timeout(10):
        while (message := json.loads(await it.recv()))["type"] != kind:
            pass
        return message


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


BAD = [
    ("", "not JSON"),
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("1" * 10_000, "not JSON"),
    ("[]", "dictionary"),
    ("null", "dictionary"),
    ("{}", "type"),
    ('{"type": []}', "type"),
    ('{"type": "dance"}', "'dance' found"),
    ('{"type": "train_episodes", "episodes": []}', "'train_episodes' found"),
    ('{"type": "status_update"}', "status_update.status"),
    ('{"type": "status_update", "status": 7}', "status_update.status"),
    ('{"type": "status_update", "status": "idle", "v": 2}', "schema version 2"),
    ('{"type": "status_update", "status": "idle", "v": "new"}', "schema version 'new'"),
    ('{"type": "status_update", "status": "idle", "v": 1, "capacity": -1}', "capacity"),
    ('{"type": "status_update", "status": "idle", "v": 1, "capacity": 1e300}', "capacity"),
    ('{"type": "status_update", "status": "idle", "v": 1, "pool": "../.."}', "pool"),
    ('{"type": "status_update", "status": "idle", "v": 1, "running": {"a": 1}}', "running"),
    ('{"type": "status_update", "status": "idle", "client_id": "another"}', "this is the connection of 'bad'"),
    ('{"type": "episode_result", "results": 3}', "results"),
    ('{"type": "episode_result", "results": [{}]}', "results.0.episode_id"),
    (b"\x00\xff not text", "not JSON"),
    (b'{"type": "dance"}', "'dance' found"),
]


@pytest.mark.system
@pytest.mark.parametrize(("said", "told"), BAD)
async def test_what_is_no_message_is_answered_and_logged_and_hurts_nobody(serving, caplog, said, told):
    async with serving() as server, server.worker("good", ask), socket(server, "bad", "s") as bad:
        await bad.send(said)
        answer = await heard(bad, "error")
        assert answer["code"] == "bad_message"
        assert told in answer["message"]
        assert len(answer["message"]) < 1000
        assert "bad message from worker bad" in caplog.text
        assert "Traceback" not in caplog.text
        async with server.connect() as run:
            [group] = await run.collect(None, ["a"], group_size=2)
        assert [t.error for t in group.trajectories] == [None, None]
        assert server.roster.active_clients.keys() == {"good", "bad"}


async def test_twenty_bad_messages_end_their_connection_and_no_other(serving):
    async with serving() as server, server.worker("good", ask), socket(server, "bad", "s") as bad:
        for _ in range(20):
            await bad.send("nonsense")
        with pytest.raises(websockets.ConnectionClosed) as closed:
            while True:
                await asyncio.wait_for(bad.recv(), 10)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4002, "20 bad messages")
        await until(lambda: server.roster.active_clients.keys() == {"good"})


async def test_a_message_of_70_megabytes_ends_its_connection_and_no_other(serving):
    async with serving() as server, server.worker("good", ask), socket(server, "bad", "s") as bad:
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await bad.send("x" * 70 * 2**20)
            await asyncio.wait_for(bad.recv(), 30)
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
        await until(lambda: server.roster.active_clients.keys() == {"good"})
        async with server.connect() as run:
            assert len(await run.collect(None, ["a"], group_size=2)) == 1


async def test_leases_and_results_that_were_made_up_change_nothing(serving):
    async with serving() as server, server.worker("good", ask), socket(server, "bad", "s") as bad:
        status = {"type": "status_update", "status": "connected", "v": 1, "session": "s", "capacity": 0}
        await bad.send(json.dumps({**status, "running": ["made up"]}))
        assert (await heard(bad, "cancel_episodes"))["leases"] == ["made up"]
        await bad.send(json.dumps({"type": "episode_result", "v": 1, "results": [{"episode_id": "x", "lease": "no"}]}))
        assert (await heard(bad, "ack"))["stale"] == ["no"]
        assert server.roster.results_queue == []


HELLO = json.dumps({"type": "status_update", "status": "connected"})
"""What a classic client says first."""


def result(episode):
    return {"episode_id": episode["episode_id"], "total_reward": 1.0, "steps": 3, "data": {"done": True}}


async def test_a_classic_client_answers_all_its_episodes_in_one_message(serving):
    async with serving() as server, socket(server, "classic") as classic:
        await classic.send(json.dumps({"type": "status_update", "status": "connected", "client_id": "classic"}))
        await server.roster.distribute_episodes({"episode_id": f"e{n}", "model_name": "tiny"} for n in range(10))
        while len(server.roster.results_queue) < 10:
            batch = (await heard(classic, "train_episodes"))["episodes"]
            answer = {"type": "episode_result", "results": [result(it) for it in batch], "client_id": "classic"}
            before = len(server.roster.results_queue)
            await classic.send(json.dumps(answer))
            await until(lambda before=before, batch=batch: len(server.roster.results_queue) == before + len(batch))
        told = [it["results"][0] for it in server.roster.results_queue]
        assert sorted(it["episode_id"] for it in told) == sorted(f"e{n}" for n in range(10))
        assert {(it["total_reward"], it["steps"]) for it in told} == {(1.0, 3)}


async def test_a_classic_client_is_given_what_was_waiting_when_it_has_said_that_it_is_there(serving):
    async with serving() as server:
        await server.roster.distribute_episodes([{"episode_id": "e"}])
        async with socket(server, "late") as late:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late.recv(), 0.3)
            await late.send(HELLO)
            assert (await heard(late, "train_episodes"))["episodes"][0]["episode_id"] == "e"


async def test_the_episodes_of_a_classic_client_that_is_lost_go_to_another_and_end_once(serving):
    async with serving() as server:
        await server.roster.distribute_episodes({"episode_id": f"e{n}"} for n in range(6))
        first = await connect_websocket(f"ws{server.url[4:]}/ws/first")
        await first.send(HELLO)
        batch = (await heard(first, "train_episodes"))["episodes"]
        await first.send(json.dumps({"type": "episode_result", "results": [result(batch[0])]}))
        await until(lambda: server.roster.results_queue)
        first.transport.abort()
        async with socket(server, "second") as second:
            await second.send(HELLO)
            ended = set()
            while len(ended) < 5:
                batch = (await heard(second, "train_episodes"))["episodes"]
                ended |= {it["episode_id"] for it in batch}
                answer = {"type": "episode_result", "results": [result(it) for it in batch]}
                await second.send(json.dumps(answer))
                await second.send(json.dumps(answer))
            await until(lambda: len(server.roster.results_queue) == 6)
            await asyncio.sleep(0.1)
        ids = [it["results"][0]["episode_id"] for it in server.roster.results_queue]
        assert sorted(ids) == sorted(f"e{n}" for n in range(6))
