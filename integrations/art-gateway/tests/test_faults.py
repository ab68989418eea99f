"""What can go wrong, one test a row: the upstream, the network, the client."""

import asyncio
import io
import json
import sqlite3
import time
from urllib.parse import unquote

import pytest
from yarl import URL

from art_core.capture import UNREACHABLE, HttpUpstream
from art_core.errors import UpstreamError
from art_core.store import writer
from art_gateway.routing import LONGEST_REST, Backend

# A stream that broke in its middle is no passing fault: it has a test of its own.
TRANSIENT = [
    (fault, stream)
    for fault in (429, 500, 502, 503, 504, "reset", "half", "not json")
    for stream in (False, True)
    if not (fault == "half" and stream)
]


@pytest.mark.parametrize(("fault", "stream"), TRANSIENT)
async def test_a_passing_fault_is_retried_and_the_call_recorded_once(start, upstream, fault, stream):
    upstream.faults.extend([fault, fault])
    async with start() as desk:
        status, answer, _ = await desk.ask("r1", "hello", stream=stream)
        assert status == 200, answer
        [call] = desk.of("r1")
    assert bytes(call.sampled_ids) == b"hello"
    assert call.finish_reason == "stop"
    assert len(upstream.requests) == 3
    assert desk.gateway.status()["retried"] == 2


@pytest.mark.parametrize(("fault", "stream"), TRANSIENT)
async def test_a_fault_that_stays_is_told_with_its_status_and_nothing_is_recorded(start, upstream, fault, stream):
    upstream.faults.extend([fault] * 10)
    async with start(retries=2) as desk:
        status, answer, _ = await desk.ask("r1", "hello", stream=stream)
        assert not desk.store.has_rollout("r1")
    assert status == (fault if isinstance(fault, int) else 502)
    message = (json.loads(answer) if stream else answer)["error"]["message"]
    assert "fault" in message or "connection" in message or "JSON" in message or "stream" in message
    assert len(upstream.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_takes_too_long_is_a_504_and_not_asked_again(start, upstream, stream):
    upstream.faults.append("hang")
    async with start(timeout=1.0) as desk:
        status, answer, _ = await desk.ask("r1", "hello", stream=stream)
    assert (status, len(upstream.requests)) == (504, 1)
    assert "did not answer in time" in str(answer)


@pytest.mark.parametrize("fault", ["half", "half json"])
async def test_a_stream_that_breaks_in_its_middle_ends_with_an_error_and_is_kept_as_aborted(start, upstream, fault):
    upstream.faults.append(fault)
    upstream.delay = 0.02
    async with start() as desk:
        status, answer, _ = await desk.ask("r1", "hello you", stream=True)
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
        [call] = desk.of("r1")
    assert status == 200
    assert "error" in events[-1]
    assert "[DONE]" not in answer
    assert call.finish_reason == "aborted"
    assert b"hello you".startswith(bytes(call.sampled_ids))
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_without_token_ids_is_told_at_its_first_call_and_not_asked_again(start, upstream, stream):
    upstream.faults.append("no ids")
    async with start() as desk:
        status, answer, headers = await desk.ask("r1", "hello", stream=stream)
        assert not desk.store.has_rollout("r1")
    error = (json.loads(answer) if stream else answer)["error"]
    assert (status, error["code"], len(upstream.requests)) == (502, "no_token_ids", 1)
    assert "return_token_ids" in error["message"]
    assert headers["x-should-retry"] == "false"


async def test_an_answer_of_another_shape_is_a_bad_gateway(start, upstream):
    upstream.faults.append("no shape")
    async with start(retries=0) as desk:
        status, answer, _ = await desk.ask("r1", "hello")
    assert status == 502
    assert "isn't a completion" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_closes_the_connection_to_the_upstream(start, upstream, until, stream):
    upstream.delay = 0.02 if stream else 30
    async with start() as desk:
        asking = asyncio.create_task(desk.ask("r1", "x" * 1000, stream=stream))
        await until(lambda: upstream.open == 1)
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not desk.gateway.rollouts_inside)
        if stream:
            await until(lambda: upstream.cut_off == 1)
            [call] = desk.of("r1")
            assert call.finish_reason == "aborted"
            assert 0 < len(call.sampled_ids) < 1000
        else:
            assert not desk.store.has_rollout("r1"), "nothing of it has come"
        upstream.delay = 0
        assert (await desk.ask("r1", "again"))[0] == 200


async def test_a_body_of_100_megabytes_is_refused_and_the_gateway_goes_on(start):
    async with start() as desk:
        address = f"{desk.url}/rollouts/r1/v1/chat/completions"
        async with desk.client.post(address, data=io.BytesIO(b"x" * 100_000_000)) as response:
            assert response.status == 413
            assert "100000000 bytes" in (await response.json())["error"]["message"]
        assert (await desk.ask("r1", "hello"))[0] == 200


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"", b"[]", b"null", b'{"messages": 3}'])
async def test_a_body_that_is_no_request_is_a_400_and_opens_no_rollout(start, body):
    async with start() as desk:
        async with desk.client.post(f"{desk.url}/rollouts/r1/v1/chat/completions", data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert not desk.store.has_rollout("r1")


@pytest.mark.parametrize(
    "order",
    [{"metrics": [1]}, {"metrics": "good"}, {"metrics": {"success": "yes"}}, {"reward": "1"}, {"error": 1}, [1]],
)
async def test_an_order_that_says_nothing_of_its_kind_is_a_400_and_changes_nothing(start, order):
    async with start() as desk:
        await desk.ask("r1", "hello")
        status, answer = await desk.order("POST", "/rollouts/r1/finish", order)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_bug_of_ours_is_told_as_json_and_logged_and_the_gateway_goes_on(start, monkeypatch, caplog):
    async with start() as desk:
        with monkeypatch.context() as broken:
            broken.setattr(desk.gateway, "status", lambda: 1 // 0)
            status, answer = await desk.order("GET", "/status")
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError" in answer["error"]["message"]
        assert "a request failed inside the gateway" in caplog.text
        assert (await desk.order("GET", "/status"))[0] == 200


@pytest.mark.parametrize("name", ["%FF", "a%FEb", "a%2Fv1", "a%2fv1", "x%2Fv1%2Fy", "x/v1/y"])
async def test_an_id_that_another_path_could_stand_for_is_refused(start, name):
    async with start() as desk:
        for path in ("v1/chat/completions", "finish"):
            address = URL(f"{desk.url}/rollouts/{name}/{path}", encoded=True)
            async with desk.client.post(address, json={"messages": [{"role": "user", "content": "x"}]}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (400, "rollout_id")
        assert desk.gateway.status()["calls"] == 0


@pytest.mark.parametrize(
    "name", ["a%2Fb", "a/b", "%25", "%E4%BD%A0", "v1", "v1/b", "v1.2", "av1", "finish", "%20", "x%3Fy"]
)
async def test_any_other_id_is_taken_as_it_is_said(start, name):
    async with start() as desk:
        for path, body in (
            ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("v1/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("finish", {"reward": 1.0}),
        ):
            address = URL(f"{desk.url}/rollouts/{name}/{path}", encoded=True)
            async with desk.client.post(address, json=body) as response:
                assert response.status == 200, await response.text()
        assert len(desk.of(unquote(name))) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "secret"}, 401),
        ({"x-api-key": "wröng"}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer of-somebody-else", "x-api-key": "secret"}, 200),
    ],
)
async def test_where_a_key_is_set_only_the_key_opens(start, upstream, headers, status):
    async with start(api_key="secret") as desk:
        answer = await desk.ask("r1", "hello", headers=headers)
        assert answer[0] == status
        assert len(upstream.requests) == (status == 200)
        assert (await desk.order("GET", "/status", headers=headers))[0] == status
        assert (await desk.order("GET", "/v1/models", headers=headers))[0] == status
        assert (await desk.order("GET", "/health"))[0] == 200
    if status == 401:
        assert answer[1]["error"]["code"] == "invalid_api_key"


async def test_a_server_that_is_not_there_is_named(start):
    async with start("http://127.0.0.1:1/v1", retries=1) as desk:
        status, answer, _ = await desk.ask("r1", "hello")
    assert status == 502
    assert "http://127.0.0.1:1/v1" in answer["error"]["message"]
    assert "is the server running?" in answer["error"]["message"]


async def test_a_client_that_sends_half_a_request_and_leaves_harms_nobody(start):
    async with start() as desk:
        host, port = desk.url.removeprefix("http://").split(":")
        for start_of_request in (
            b"POST /roll",
            b"POST /rollouts/r1/v1/chat/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(start_of_request)
            await writer.drain()
            writer.close()
        assert (await desk.ask("r1", "hello"))[0] == 200


async def test_an_upstream_that_comes_back_is_asked_again(start, upstream, another_upstream):
    async with start(retries=0) as desk:
        upstream.faults.append("reset")
        assert (await desk.ask("r1", "hello"))[0] == 502
        assert (await desk.ask("r1", "hello"))[0] == 200, "where there is no other one it is always worth a try"


def test_an_outage_of_many_failures_rests_for_the_longest_time_and_no_longer():
    backend = Backend(HttpUpstream("http://127.0.0.1:1/v1"))
    for _ in range(1100):
        backend.rests_until = 0.0
        with pytest.raises(UpstreamError, match="gone"), backend.track_request():
            raise UpstreamError("gone", status=502, code=UNREACHABLE)
    assert backend.failures == 1100
    assert 0 < backend.rests_until - time.monotonic() <= LONGEST_REST


async def test_after_a_long_outage_the_others_still_answer(start, upstream, another_upstream):
    async with another_upstream() as second, start(upstream.url, second.url) as desk:
        desk.gateway.pool.backends[0].failures = 1100
        await upstream.stop()
        for number in range(10):
            assert (await desk.ask(f"r{number}", "hello"))[0] == 200


async def test_calls_that_fail_together_are_one_failure(start, upstream, another_upstream):
    async with another_upstream() as second, start(upstream.url, second.url) as desk:
        pool = desk.gateway.pool
        names = [f"r{number}" for number in range(40)]
        names = [name for name in names if pool.route(name).backends[0] is pool.backends[0]][:8]
        upstream.faults.extend(["reset"] * len(names))
        assert {status for status, *_ in await asyncio.gather(*(desk.ask(name, "hello") for name in names))} == {200}
        assert (len(names), pool.backends[0].failures) == (8, 1)


@pytest.fixture
def full(monkeypatch):
    """A list: the disk is full while anything is in it."""
    full = []

    def commit(connection, writes, write=writer._commit):
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(connection, writes)

    monkeypatch.setattr(writer, "_commit", commit)
    return full


async def test_a_full_disk_is_told_before_anything_is_sampled_and_passes_when_there_is_room(
    start, upstream, until, full
):
    async with start() as desk:
        assert (await desk.ask("r1", "one"))[0] == 200
        full.append(True)
        for text in ("two", "three", "three"):  # the first finds it out
            status, answer, _ = await desk.ask("r1", text)
            assert (status, answer["error"]["code"]) == (503, "not_recorded")
            assert "free space" in answer["error"]["message"]
        assert len(upstream.requests) == 2
        full.clear()
        assert (await desk.ask("r1", "four"))[0] == 200
        kept = [(bytes(call.sampled_ids), call.finish_reason) for call in desk.of("r1")]
        assert kept == [(b"one", "stop"), (b"two", "aborted"), (b"four", "stop")]


async def test_calls_in_flight_while_the_disk_fills_are_refused_and_kept_as_aborted(start, upstream, until, full):
    async with start() as desk:
        assert (await desk.ask("known", "one"))[0] == 200
        upstream.may_answer.clear()
        asking = [asyncio.create_task(desk.ask(rollout_id, "two")) for rollout_id in ("known", "new")]
        await until(lambda: upstream.open == 2)
        full.append(True)
        desk.store.set_meta("key", "value")
        await until(lambda: desk.store.is_behind(10**9))
        upstream.may_answer.set()
        assert [status for status, *_ in await asyncio.gather(*asking)] == [503, 503]
        assert (await desk.ask("new", "three"))[0] == 503
        full.clear()
        assert [(bytes(call.sampled_ids), call.finish_reason) for call in desk.of("known")][1:] == [(b"two", "aborted")]
        assert [(bytes(call.sampled_ids), call.finish_reason) for call in desk.of("new")] == [(b"two", "aborted")]


@pytest.mark.parametrize("version", [2**63, -2, 1.5, None, "1"])
async def test_a_policy_version_that_cannot_be_kept_is_refused(start, version):
    async with start() as desk:
        status, answer = await desk.order("POST", "/resume", {"policy_version": version})
        assert status == 400 and "policy_version" in answer["error"]["message"]
        assert (await desk.ask("r1", "hello"))[0] == 200
        assert desk.of("r1")[0].policy_version == 0
