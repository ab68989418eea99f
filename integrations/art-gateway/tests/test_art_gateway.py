"""The gateway as its users see it: rollouts that open by themselves, routing, limits, orders."""

import asyncio
import contextlib
import json
import resource

import openai
import pytest

import art_core as art
from art_core.capture import HttpUpstream
from art_core.errors import UpstreamError
from art_gateway import routing
from art_gateway.app import Limits
from art_gateway.routing import Pool, pause_before, worth_retrying
from art_gateway.serve import raise_file_limit


def prompt_ids(messages):
    """As the fake upstream makes them."""
    return list(json.dumps(messages).encode())


def said(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_call_opens_its_rollout_with_any_key_and_training_can_read_it(start, tmp_path, stream):
    async with start() as desk:
        base_url = f"{desk.url}/rollouts/my-run/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="anything", max_retries=0) as client:
            for text in ("hello", "again"):
                answer = await client.chat.completions.create(model="x", messages=said(text), stream=stream)
                if stream:
                    assert "".join([chunk.choices[0].delta.content or "" async for chunk in answer]) == text
                else:
                    assert answer.choices[0].message.content == text
    [trajectory] = art.load_trajectories(tmp_path)
    assert (trajectory.rollout_id, trajectory.task, trajectory.error) == ("my-run", "my-run", None)
    assert [bytes(call.sampled_ids) for call in trajectory.calls] == [b"hello", b"again"]
    assert trajectory.calls[0].prompt_ids == tuple(prompt_ids(said("hello")))
    assert trajectory.calls[0].logprobs == tuple(-ord(letter) / 64 for letter in "hello")


async def test_a_call_that_names_no_run_says_how_to_name_one(start):
    async with start() as desk:
        status, answer = await desk.order("POST", "/v1/chat/completions", {"messages": said("hello")})
        assert status == 404
        assert "/rollouts/NAME/v1 with any NAME" in answer["error"]["message"]
        for path in (
            "/",
            "/rollouts//v1/chat/completions",
            f"/rollouts/{'x' * 600}/v1/chat/completions",
            "/rollouts/r1",
        ):
            assert (await desk.order("POST", path, {}))[0] == 404
        assert (await desk.order("POST", "/rollouts/r1/v1/embeddings", {}))[0] == 404
        assert not desk.gateway.rollouts_inside


async def test_the_upstreams_models_are_listed_with_and_without_a_rollout(start):
    async with start() as desk:
        for path in ("/v1/models", "/rollouts/r1/v1/models"):
            assert (await desk.order("GET", path)) == (200, {"object": "list", "data": [{"id": "served"}]})
        assert not desk.store.has_rollout("r1")


async def test_a_rollout_goes_on_where_an_earlier_gateway_left_it(start, tmp_path):
    for text in ("one", "two"):
        async with start() as desk:
            assert (await desk.ask("r1", text))[0] == 200
    [trajectory] = art.load_trajectories(tmp_path)
    assert [bytes(call.sampled_ids) for call in trajectory.calls] == [b"one", b"two"]


async def test_a_harness_may_say_what_a_run_was_about_and_what_it_was_worth(start, tmp_path):
    async with start() as desk:
        await desk.ask("r1", "hello", headers={"x-art-task": "say%20hello", "x-art-agent": "greeter"})
        finish = {"reward": 0.5, "metrics": {"success": 1}, "output": {"said": "hello"}}
        assert (await desk.order("POST", "/rollouts/r1/finish", finish))[0] == 200
        assert (await desk.order("POST", "/rollouts/r2/finish", finish))[0] == 404
        assert (await desk.order("POST", "/rollouts/r1/finish", {"reward": "high"}))[0] == 400
    [trajectory] = art.load_trajectories(tmp_path)
    assert (trajectory.task, trajectory.reward, trajectory.output) == ("say hello", 0.5, {"said": "hello"})
    assert trajectory.metrics == {"success": 1.0}
    assert trajectory.calls[0].agent == "greeter"


async def test_a_temperature_of_the_gateway_replaces_the_agents(start, upstream):
    from art_core.types import Sampling

    async with start(sampling=Sampling(temperature=1.0)) as desk:
        await desk.ask("r1", "hello", temperature=0)
        assert desk.of("r1")[0].temperature == 1.0
    assert upstream.requests[0]["temperature"] == 1.0


async def test_a_rollout_stays_with_one_upstream_and_moves_when_that_one_goes(
    start, upstream, another_upstream, monkeypatch
):
    monkeypatch.setattr(routing, "FIRST_REST", 30.0)  # or it could be over before the last line
    names = [f"r{number}" for number in range(40)]
    async with another_upstream() as second, start(upstream.url, second.url) as desk:
        for turn in range(3):
            assert {status for status, *_ in await asyncio.gather(*(desk.ask(n, f"{n} {turn}") for n in names))} == {
                200
            }
        homes = [{r["messages"][0]["content"].split()[0] for r in it.requests} for it in (upstream, second)]
        assert not homes[0] & homes[1]
        assert homes[0] | homes[1] == set(names)
        assert min(map(len, homes)) > 5, "both have work"
        await second.stop()
        asked = await asyncio.gather(*(desk.ask(name, f"{name} 3") for name in names))
        assert {status for status, *_ in asked} == {200}
        for name in names:
            assert [bytes(call.sampled_ids).decode() for call in desk.of(name)] == [
                f"{name} {turn}" for turn in range(4)
            ]
        assert [it["up"] for it in desk.gateway.status()["upstreams"]] == [True, False]


def test_which_upstream_a_rollout_has_does_not_depend_on_their_order():
    urls = [f"http://10.0.0.{number}:8000/v1" for number in range(4)]
    pools = [Pool.of([HttpUpstream(url) for url in order]) for order in (urls, urls[::-1])]
    for name in ("a", "b", "ä/ö", "\udc80"):
        first, second = ([backend.upstream.base_url for backend in pool.route(name).backends] for pool in pools)
        assert first == second


def test_an_upstream_that_names_a_pause_gets_it():
    assert all(pause_before(attempt, 0.5, 7.0) >= 7.0 for attempt in range(3))
    pauses = [pause_before(3, 0.5, None) for _ in range(50)]
    assert 2.0 <= min(pauses) <= max(pauses) <= 6.0
    assert len(set(pauses)) > 1, "many clients must not come back at one moment"
    assert not worth_retrying(UpstreamError("busy", status=429, retry_after=3600.0))
    assert not worth_retrying(UpstreamError("no", status=400))


@pytest.mark.system
async def test_calls_beyond_the_limit_wait_and_beyond_the_queue_are_told_to_come_back(start, upstream, until):
    upstream.may_answer.clear()
    async with start(limits=Limits(calls=2, waiting=3)) as desk:
        asked = [asyncio.create_task(desk.ask(f"r{number}", "hello")) for number in range(5)]
        await until(lambda: desk.gateway.gate.waiting == 3)
        assert upstream.open <= 2
        status, answer, headers = await desk.ask("late", "hello")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_calls", "1")
        upstream.may_answer.set()
        assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 5
        assert desk.gateway.status()["calls"] == 5


async def test_a_client_that_leaves_the_queue_frees_its_place(start, upstream, until):
    upstream.may_answer.clear()
    async with start(limits=Limits(calls=1, waiting=1)) as desk:
        first = asyncio.create_task(desk.ask("r1", "hello"))
        await until(lambda: desk.gateway.gate.inside == 1)
        second = asyncio.create_task(desk.ask("r2", "hello"))
        await until(lambda: desk.gateway.gate.waiting == 1)
        second.cancel()
        await until(lambda: desk.gateway.gate.waiting == 0)
        third = asyncio.create_task(desk.ask("r3", "hello"))
        upstream.may_answer.set()
        assert [(await task)[0] for task in (first, third)] == [200, 200]
    assert [request["messages"][0]["content"] for request in upstream.requests] == ["hello"] * 2


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_a_pause_waits_for_calls_in_flight_and_holds_new_ones_until_resumed(start, upstream, until, stream):
    upstream.may_answer.clear()
    async with start() as desk:
        before = asyncio.create_task(desk.ask("r1", "before", stream=stream))
        await until(lambda: upstream.open == 1)
        pausing = asyncio.create_task(desk.order("POST", "/pause"))
        await asyncio.sleep(0.05)
        assert not pausing.done()
        upstream.may_answer.set()
        status, answer = await pausing
        assert (status, answer["paused"], answer["in_flight"], upstream.open) == (200, True, 0, 0)
        after = asyncio.create_task(desk.ask("r1", "after", stream=stream))
        await until(lambda: desk.gateway.gate.waiting == 1)
        assert upstream.open == 0
        assert (await desk.order("POST", "/resume", {"policy_version": 3}))[1]["paused"] is False
        assert [(await task)[0] for task in (before, after)] == [200, 200]
        assert [call.policy_version for call in desk.of("r1")] == [0, 3]


async def test_orders_need_a_key_where_other_machines_can_reach_the_gateway(start):
    async with start(local=False) as desk:
        assert (await desk.ask("r1", "hello"))[0] == 200
        for method, path in (("POST", "/pause"), ("GET", "/status"), ("POST", "/rollouts/r1/finish")):
            status, answer = await desk.order(method, path, {"reward": 1e6, "output": "forged"})
            assert (status, answer["error"]["code"]) == (403, "no_key_set")
        assert desk.store.trajectory("r1").reward is None
    async with start(local=False, api_key="secret") as desk:
        key = {"authorization": "Bearer secret"}
        assert (await desk.order("POST", "/pause", headers=key))[0] == 200
        assert (await desk.order("POST", "/resume", headers=key))[0] == 200
        assert (await desk.ask("r1", "again", headers=key))[0] == 200
        assert (await desk.order("POST", "/rollouts/r1/finish", {"reward": 1.0}, headers=key))[0] == 200


async def many_rollouts(desk, rollouts, turns, stream=False):
    async def run(number):
        for turn in range(turns):
            status, answer, _ = await desk.ask(f"r{number}", f"{number} {turn}", stream=stream)
            assert status == 200, answer

    await asyncio.gather(*(run(number) for number in range(rollouts)))


def check_nothing_lost_nothing_mixed(run_dir, rollouts, turns):
    found = {it.rollout_id: it.calls for it in art.load_trajectories(run_dir)}
    assert len(found) == rollouts
    for number in range(rollouts):
        calls = found[f"r{number}"]
        assert [bytes(call.sampled_ids).decode() for call in calls] == [f"{number} {turn}" for turn in range(turns)]
        assert [call.prompt_ids for call in calls] == [
            tuple(prompt_ids(said(f"{number} {turn}"))) for turn in range(turns)
        ]
        assert {call.finish_reason for call in calls} == {"stop"}


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_sixty_concurrent_rollouts_lose_and_mix_nothing(start, tmp_path, stream):
    async with start() as desk:
        await many_rollouts(desk, 60, 5, stream)
        assert not desk.gateway.rollouts_inside, "of an idle rollout nothing is kept"
    check_nothing_lost_nothing_mixed(tmp_path, 60, 5)


@pytest.mark.long
async def test_a_thousand_concurrent_rollouts_with_five_calls_lose_and_mix_nothing(start, tmp_path):
    assert raise_file_limit(4200) is None
    async with start(limits=Limits(calls=256)) as desk:
        await many_rollouts(desk, 1000, 5)
    check_nothing_lost_nothing_mixed(tmp_path, 1000, 5)


def test_the_limit_on_open_files_is_raised_and_where_that_is_not_enough_the_message_says_how():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        advice = raise_file_limit(2**40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
        assert "ulimit" in advice and "--max-calls" in advice
        assert raise_file_limit(100) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_error_is_json_that_openai_clients_read(start):
    async with start() as desk, openai.AsyncOpenAI(base_url=f"{desk.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="a separate base URL for every rollout"):
            await client.chat.completions.create(model="x", messages=said("hello"))
        assert [model.id async for model in await client.models.list()] == ["served"]


async def test_the_status_tells_what_goes_on(start, upstream):
    async with start() as desk:
        await desk.ask("r1", "hello")
        status, answer = await desk.order("GET", "/status")
    assert status == 200
    assert (answer["calls"], answer["rollouts"], answer["in_flight"], answer["paused"]) == (1, 1, 0, False)
    assert answer["upstreams"] == [{"url": upstream.url, "up": True, "in_flight": 0, "policy_version": 0}]
    assert json.dumps(answer)


OTHER_PAGES = [
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:1"}, 403),
    ({"origin": "http://evil.example", "host": "evil.example"}, 421),  # its own name, pointed at this machine
    ({"host": "localhost.evil.example"}, 421),
    ({"host": "127.0.0.1.nip.io"}, 421),
    ({"host": "[::1"}, 421),
]


@pytest.mark.parametrize(("headers", "status"), OTHER_PAGES, ids=str)
async def test_a_web_page_elsewhere_can_neither_record_nor_order_in_its_visitors_name(start, upstream, headers, status):
    async with start() as desk:
        # As a page sends it without asking first: plain text.
        headers = headers | {"content-type": "text/plain"}
        assert (await desk.ask("evil", "poison", headers=headers))[0] == status
        for method, path in (
            ("POST", "/pause"),
            ("POST", "/rollouts/evil/finish"),
            ("GET", "/status"),
            ("GET", "/v1/models"),
        ):
            assert (await desk.order(method, path, headers=headers))[0] == status
        assert not desk.store.rollouts() and not desk.gateway.gate.paused and upstream.requests == []


async def test_this_machines_own_names_and_pages_and_whoever_has_the_key_come_in(start):
    async with start() as desk:
        host = desk.url.removeprefix("http://")
        for headers in ({}, {"origin": f"http://{host}"}, {"host": "localhost"}, {"host": "[::1]:8400"}):
            assert (await desk.ask("r", "hello", headers=headers))[0] == 200
    async with start(api_key="given-to-agents") as desk:
        headers = {"x-api-key": "given-to-agents", "origin": "https://app.example", "host": "gateway.example"}
        assert (await desk.ask("r", "hello", headers=headers))[0] == 200
    async with start(local=False) as desk:
        assert (await desk.ask("r", "hello", headers={"host": "gateway.example"}))[0] == 200
        assert (await desk.ask("r", "hello", headers={"origin": "https://evil.example"}))[0] == 403


async def test_headers_without_end_are_cut_off_whoever_sends_them(start):
    async with start(api_key="nobody-knows-it") as desk:
        reader, writer = await asyncio.open_connection(*desk.url.removeprefix("http://").split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # it is closed while we write
            for _ in range(16):
                writer.write(b"y" * 2**16)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 60)
            assert not answer or answer.startswith(b"HTTP/1.1 431 ")
        assert writer.is_closing() or reader.at_eof()
        writer.close()
