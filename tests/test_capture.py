"""Capture over real HTTP: the OpenAI client, streams, threads, and clients that disconnect."""

import asyncio
import json
import logging
import socket
import threading

import httpx
import openai
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat, prompt_ids, wait_until

from art_core.errors import CaptureError, ConfigError, StoreError
from art_core.serving import ServingProxy
from art_core.types import Sampling, Weights


class Desk:
    """A server in a thread of this process, with the fakes behind it within reach."""

    def __init__(self, serving: ServingProxy, engine: EchoEngine, recorder: ListRecorder) -> None:
        self.serving, self.engine, self.recorder = serving, engine, recorder
        self.clients: list[openai.AsyncOpenAI] = []

    def client(self, url: str, max_retries: int = 0) -> openai.AsyncOpenAI:
        self.clients.append(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries))
        return self.clients[-1]

    async def post(self, url: str, body: object = None, **options) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            if body is None:
                body = chat("hello")
            return await client.post(f"{url}/chat/completions", json=body, **options)


def sync_client(url: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **options)


def async_client(url: str, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, **options)


@pytest.fixture
async def desk():
    engine, recorder = EchoEngine(), ListRecorder()
    async with await ServingProxy.start(lambda: engine, lambda: recorder, process=False) as serving:
        desk = Desk(serving, engine, recorder)
        yield desk
        for client in desk.clients:
            await client.close()
    assert engine.stopped.is_set()
    assert recorder.closed


async def test_a_call_is_answered_and_recorded_with_its_exact_tokens(desk):
    url = await desk.serving.open("r1")
    headers = {"x-art-agent": "planner", "x-art-request-id": "q1"}
    response = await desk.post(url, chat("hello", temperature=0.7, tools=[{"type": "function"}]), headers=headers)
    assert response.json() == {
        "id": "chatcmpl-q1",
        "created": 1,
        "model": "policy",
        "object": "chat.completion",
        "service_tier": None,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    }
    [call] = desk.recorder.of("r1")
    assert call.prompt_ids == tuple(prompt_ids([{"role": "user", "content": "hello"}]))
    assert bytes(call.sampled_ids) == b"hello"
    assert call.logprobs == tuple(-(i + 1) / 64 for i in range(5))
    assert (call.agent, call.request_id, call.choice, call.temperature) == ("planner", "q1", 0, 0.7)
    assert call.request["tools"] == [{"type": "function"}]
    assert call.response == {"role": "assistant", "content": "hello"}


async def test_a_request_without_a_temperature_is_sampled_at_openais_default(desk):
    await desk.post(await desk.serving.open("r1"))
    [call] = desk.recorder.of("r1")
    assert call.temperature == 1.0
    assert call.request_id


async def test_the_n_choices_of_a_request_are_calls_with_one_request_id(desk):
    client = desk.client(await desk.serving.open("r1"))
    completion = await client.chat.completions.create(**chat("abc"), n=3)
    assert [choice.message.content for choice in completion.choices] == ["abc", "abc1", "abc2"]
    calls = desk.recorder.of("r1")
    assert [call.choice for call in calls] == [0, 1, 2]
    assert len({call.request_id for call in calls}) == 1
    assert [bytes(call.sampled_ids) for call in calls] == [b"abc", b"abc1", b"abc2"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_arrives_in_chunks_and_is_recorded_like_a_whole_answer(desk, n):
    client = desk.client(await desk.serving.open("r1"))
    texts = [""] * n
    async for chunk in await client.chat.completions.create(**chat("hello"), n=n, stream=True):
        assert "token_ids" not in chunk.choices[0].model_extra
        assert "prompt_token_ids" not in chunk.model_extra
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["hello"] * n
    calls = desk.recorder.of("r1")
    assert [bytes(call.sampled_ids) for call in calls] == [b"hello"] * n
    assert [call.finish_reason for call in calls] == ["stop"] * n
    assert calls[0].logprobs == tuple(-(i + 1) / 64 for i in range(5))
    assert calls[0].response == {"role": "assistant", "content": "hello"}


async def test_a_raw_stream_ends_with_done(desk):
    response = await desk.post(await desk.serving.open("r1"), chat("hi", stream=True))
    events = response.text.strip().split("\n\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"] == {"content": "h"}


@pytest.mark.smoke
@pytest.mark.system
async def test_sixty_four_rollouts_on_threads_and_tasks_do_not_mix(desk):
    async def rollout(number: int) -> None:
        name = f"r{number}"
        url = await desk.serving.open(name)
        if number % 2:
            with sync_client(url) as client:
                for turn in range(3):
                    said = await asyncio.to_thread(client.chat.completions.create, **chat(f"{name} {turn}"))
                    assert said.choices[0].message.content == f"{name} {turn}"
        else:
            async with async_client(url) as client:
                for turn in range(3):
                    stream = await client.chat.completions.create(**chat(f"{name} {turn}"), stream=True)
                    said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                    assert said == f"{name} {turn}"
        await desk.serving.close(name)

    await asyncio.gather(*(rollout(number) for number in range(64)))
    for number in range(64):
        assert [bytes(c.sampled_ids).decode() for c in desk.recorder.of(f"r{number}")] == [
            f"r{number} {turn}" for turn in range(3)
        ]


async def test_an_async_agent_that_blocks_on_a_sync_client_does_not_deadlock(desk):
    url = await desk.serving.open("r1")
    with sync_client(url) as client:
        assert client.chat.completions.create(**chat("blocking")).choices[0].message.content == "blocking"


async def test_the_rollouts_sampling_overrides_the_agents_and_is_logged_once(desk, caplog):
    url = await desk.serving.open("r1", Sampling(temperature=1.0, top_p=1.0))
    for _ in range(2):
        await desk.post(url, chat("hello", temperature=0, top_p=1.0, seed=7))
    assert [(r["temperature"], r["top_p"]) for r in desk.engine.requests] == [(1.0, 1.0)] * 2
    assert not any("seed" in r for r in desk.engine.requests), "one seed would make the runs of a group equal"
    assert desk.recorder.calls[0][1].temperature == 1.0
    [record] = [record for record in caplog.records if record.name == "art_core.capture"]
    assert record.levelno == logging.WARNING, "what is less is not shown to who has set up no logging"
    assert "temperature=0" in record.getMessage()
    assert "top_p" not in record.getMessage()


async def test_models_are_listed(desk):
    async with async_client(await desk.serving.open("r1")) as client:
        assert [model.id async for model in await client.models.list()] == ["policy"]


async def test_an_unknown_path_is_refused_with_the_known_ones(desk):
    url = await desk.serving.open("r1")
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for request in (
            client.post(f"{url}/embeddings", json={}),
            client.get(f"{url}/chat/completions"),
            client.post(f"{desk.serving.address}/v1/chat/completions", json=chat("x")),
            client.get(desk.serving.address),
        ):
            response = await request
            assert response.status_code == 404
            assert "POST /rollouts/{rollout_id}/v1/chat/completions" in response.json()["error"]["message"]


async def test_a_rollout_that_is_not_open_is_refused(desk):
    url = await desk.serving.open("r1")
    await desk.serving.close("r1")
    with pytest.raises(openai.NotFoundError, match="'r1' is not open"):
        await desk.client(url).chat.completions.create(**chat("late"))
    response = await desk.post(f"{desk.serving.address}/rollouts/r2/v1")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "rollout_not_open"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"messages": []}', b'{"messages": ["hi"]}', b'{"messages": [{}], "temperature": "hot"}'],
)
async def test_a_body_that_is_not_a_chat_request_is_a_400(desk, body):
    url = await desk.serving.open("r1")
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        response = await client.post(f"{url}/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_beyond_the_limit_is_a_413():
    async with await ServingProxy.start(EchoEngine, ListRecorder, process=False, max_body=1000) as serving:
        url = await serving.open("r1")
        async with async_client(url) as client:
            with pytest.raises(openai.APIStatusError) as refusal:
                await client.chat.completions.create(**chat("x" * 3_000_000))
            assert refusal.value.status_code == 413
            assert (await client.chat.completions.create(**chat("x"))).choices[0].message.content == "x"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstreams_refusal_reaches_the_client_with_its_status_and_code(desk, stream):
    client = desk.client(await desk.serving.open("r1"))
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(**chat("refuse 400 context_length_exceeded"), stream=stream)
    assert refusal.value.code == "context_length_exceeded"
    assert desk.recorder.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_token_ids_is_an_error(desk, stream):
    client = desk.client(await desk.serving.open("r1"), max_retries=2)
    with pytest.raises(openai.InternalServerError, match="return_token_ids") as refusal:
        await client.chat.completions.create(**chat("no ids"), stream=stream)
    assert refusal.value.status_code == 502
    assert len(desk.engine.requests) == 1, "the client was told not to try again"
    assert desk.recorder.calls == []


async def test_a_broken_stream_raises_in_the_client_and_is_recorded_as_aborted(desk):
    client = desk.client(await desk.serving.open("r1"))
    with pytest.raises(openai.APIError, match="broke while sampling"):
        async for _ in await client.chat.completions.create(**chat("ab!cd"), stream=True):
            pass
    await desk.serving.close("r1")
    [call] = desk.recorder.of("r1")
    assert (bytes(call.sampled_ids), call.finish_reason) == (b"ab!", "aborted")


async def test_a_bug_in_the_engine_is_a_500_with_its_name_and_a_logged_traceback(desk, caplog):
    client = desk.client(await desk.serving.open("r1"))
    with pytest.raises(openai.InternalServerError, match="RuntimeError: CUDA out of cheese"):
        await client.chat.completions.create(**chat("bug"))
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_stops_the_sampling_and_keeps_what_was_sampled(desk, stream):
    desk.engine.delay = 0.02
    url = await desk.serving.open("r1")
    asked = asyncio.create_task(desk.post(url, chat("x" * 500, stream=stream)))
    await asyncio.to_thread(wait_until, lambda: desk.engine.sampling == 1)
    asked.cancel()
    await asyncio.to_thread(wait_until, lambda: desk.recorder.calls)
    assert desk.engine.sampling == 0
    [call] = desk.recorder.of("r1")
    assert call.finish_reason == "aborted"
    assert 0 < len(call.sampled_ids) < 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_cancels_the_request_that_it_repeats(desk, stream):
    desk.engine.delay = 0.02
    url = await desk.serving.open("r1")
    headers = {"x-art-request-id": "q1"}
    first = asyncio.create_task(desk.post(url, chat("x" * 500, stream=stream), headers=headers))
    await asyncio.to_thread(wait_until, lambda: desk.engine.sampling == 1)
    second = await desk.post(url, chat("again"), headers=headers)
    assert second.json()["choices"][0]["message"]["content"] == "again"
    assert "sent it again" in (await first).text
    aborted, answered = desk.recorder.of("r1")
    assert (aborted.finish_reason, aborted.request_id) == ("aborted", "q1")
    assert (answered.finish_reason, answered.request_id) == ("stop", "q1")


async def test_closing_a_rollout_waits_for_its_calls_then_aborts_them(desk):
    desk.engine.delay = 0.02
    url = await desk.serving.open("r1")
    short = asyncio.create_task(desk.post(url, chat("abc")))
    long = asyncio.create_task(desk.post(url, chat("x" * 500)))
    await asyncio.to_thread(wait_until, lambda: desk.engine.sampling == 2)
    await desk.serving.close("r1", grace=0.3)
    assert sorted(call.finish_reason for call in desk.recorder.of("r1")) == ["aborted", "stop"]
    assert desk.recorder.flushes == 1
    assert (await short).status_code == 200
    assert (await long).status_code == 409


async def test_a_swap_waits_for_the_calls_in_flight_and_holds_new_ones(desk):
    desk.engine.delay = 0.01
    url = await desk.serving.open("r1")
    before = asyncio.create_task(desk.post(url, chat("x" * 30, stream=True)))
    await asyncio.to_thread(wait_until, lambda: desk.engine.sampling == 1)
    load = asyncio.create_task(desk.serving.swap(Weights(version=1, path=None)))
    await asyncio.sleep(0.05)
    after = asyncio.create_task(desk.post(url, chat("after")))
    await asyncio.gather(before, load, after)
    versions = {bytes(call.sampled_ids)[:1]: call.policy_version for call in desk.recorder.of("r1")}
    assert versions == {b"x": 0, b"a": 1}


async def test_a_client_that_stops_reading_does_not_delay_a_swap(desk):
    desk.engine.fingerprint = "x" * 20_000
    url = await desk.serving.open("r1")
    request = chat("x" * 800, stream=True)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{url}/chat/completions", json=request),
    ):
        await desk.serving.swap(Weights(version=1, path=None))


async def test_paused_calls_wait_for_resume_even_if_weights_load(desk):
    url = await desk.serving.open("r1")
    await desk.serving.pause()
    held = asyncio.create_task(desk.post(url))
    await desk.serving.swap(Weights(version=1, path=None))
    await asyncio.sleep(0.05)
    assert not held.done()
    await desk.serving.resume()
    assert (await held).status_code == 200


async def test_what_cannot_be_stored_is_not_answered(desk):
    desk.recorder.full = True
    client = desk.client(await desk.serving.open("r1"))
    with pytest.raises(openai.InternalServerError, match="disk full"):
        await client.chat.completions.create(**chat("hello"))
    with pytest.raises(StoreError, match="disk full"):
        await desk.serving.close("r1")


async def test_a_rollout_id_may_contain_any_character(desk):
    url = await desk.serving.open("task 1/run ä?#")
    assert (await desk.post(url)).status_code == 200
    assert len(desk.recorder.of("task 1/run ä?#")) == 1


async def test_an_id_cannot_be_open_twice(desk):
    await desk.serving.open("r1")
    with pytest.raises(CaptureError, match="open already"):
        await desk.serving.open("r1")


@pytest.mark.system
async def test_two_hundred_connections_at_once_are_answered(desk):
    desk.engine.delay = 0.01
    url = await desk.serving.open("r1")
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        answers = await asyncio.gather(
            *(client.post(f"{url}/chat/completions", json=chat(f"{i:03}"), timeout=60) for i in range(200))
        )
    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [f"{i:03}" for i in range(200)]
    assert len(desk.recorder.calls) == 200


async def test_a_port_in_use_is_reported_before_the_engine_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            await ServingProxy.start(EchoEngine, ListRecorder, process=False, port=port)


async def test_stop_leaves_nothing_running_and_may_be_called_twice():
    before = set(threading.enumerate())
    serving = await ServingProxy.start(EchoEngine, ListRecorder, process=False)
    await serving.open("r1")
    await serving.stop()
    await serving.stop()
    wait_until(lambda: {t for t in threading.enumerate() if t.name.startswith("art-")} <= before)
    with pytest.raises(CaptureError, match="was stopped"):
        await serving.open("r2")
