"""HttpUpstream with a small server that speaks vLLM's dialect."""

import asyncio
import json
import socket
from contextlib import aclosing, asynccontextmanager

import openai
import pytest
from capture_fakes import ListRecorder, recorded, wait_until
from vllm_like import vllm_like

from art_core.capture import HttpUpstream
from art_core.errors import ConfigError, UpstreamError
from art_core.serving import ServingProxy
from art_core.types import Weights


@pytest.fixture(scope="module")
def vllm():
    with vllm_like() as fake:
        yield fake


@pytest.fixture
async def served(vllm):
    recorder = ListRecorder()
    upstream = HttpUpstream(vllm.url, "served-model", api_key="secret", timeout=2.0)
    async with await ServingProxy.start(lambda: upstream, lambda: recorder, process=False) as serving:
        url = await serving.open("r1")
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, recorder


def asking(text: str, **options) -> dict:
    return {"model": "agents-model", "messages": [{"role": "user", "content": text}], **options}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_servers_token_ids_and_logprobs_become_the_call(vllm, served, stream):
    client, recorder = served
    answer = await client.chat.completions.create(**asking("hello"), stream=stream)
    if stream:
        async for chunk in answer:
            assert chunk.choices[0].logprobs is None
    else:
        assert answer.choices[0].logprobs is None
        assert "token_ids" not in answer.choices[0].model_extra
    [(_, call)] = recorder.calls
    assert (call.prompt_ids, bytes(call.sampled_ids)) == ((1, 2, 3), b"hello")
    assert call.logprobs == tuple(-ord(letter) / 64 for letter in "hello")
    assert call.finish_reason == "stop"
    assert call.request["model"] == "agents-model"
    assert vllm.requests[-1]["model"] == "served-model"
    assert vllm.keys[-1] == "Bearer secret"


async def test_an_agent_that_requests_logprobs_gets_them(served):
    client, recorder = served
    answer = await client.chat.completions.create(**asking("hi"), logprobs=True)
    assert [token.logprob for token in answer.choices[0].logprobs.content] == list(recorder.calls[0][1].logprobs)


@pytest.mark.parametrize("prompt", ["once upon", [5, 6, 7]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_is_answered_in_the_shape_of_a_chat_completion(vllm, stream, prompt):
    [call] = await recorded(HttpUpstream(vllm.url), {"prompt": prompt, "stream": stream})
    ids = tuple(prompt if isinstance(prompt, list) else prompt.encode())
    assert (call.prompt_ids, call.sampled_ids, call.logprobs) == (ids, ids, (-0.5,) * len(ids))
    assert call.response == {"role": "assistant", "content": "more"}
    assert call.finish_reason == "stop"
    assert vllm.requests[-1]["logprobs"] == 1


async def test_a_long_request_reaches_the_server_whole(vllm):
    upstream = HttpUpstream(vllm.url)
    said = {"role": "user", "content": "x" * 3_000_000}  # before the last message, which the server answers with
    long = asking("hi")["messages"]
    await upstream.chat({"messages": [said, *long]})
    assert vllm.requests[-1]["messages"] == [said, *long]
    await upstream.stop()


async def test_the_version_is_the_one_that_was_set(vllm):
    upstream = HttpUpstream(vllm.url)
    upstream.policy_version = 4
    assert (await upstream.chat(asking("hi")))["policy_version"] == 4
    await upstream.stop()


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "code", "message"),
    [
        ("too long", 400, "context_length_exceeded", "maximum context length"),
        ("full", 400, "context_length_exceeded", "max_tokens must be at least 1"),
        ("old shape", 404, None, "no such model"),
        ("page", 503, None, "gateway"),
        ("no ids", 502, "no_token_ids", "return_token_ids"),
        ("slow", 504, "upstream_timeout", "did not answer in time"),
    ],
)
async def test_a_servers_refusal_keeps_its_status_and_message(served, stream, text, status, code, message):
    client, recorder = served
    with pytest.raises(openai.APIStatusError, match=message) as refusal:
        await client.chat.completions.create(**asking(text), stream=stream)
    assert (refusal.value.status_code, refusal.value.code) == (status, code)
    assert recorder.calls == []


async def test_an_answer_that_is_not_json_is_a_bad_gateway(served):
    client, _ = served
    with pytest.raises(openai.APIStatusError, match="not JSON") as refusal:
        await client.chat.completions.create(**asking("not json"))
    assert refusal.value.status_code == 502


async def test_a_stream_that_breaks_off_is_an_error(served):
    client, recorder = served
    with pytest.raises(openai.APIError, match="engine died"):
        async for _ in await client.chat.completions.create(**asking("ab!"), stream=True):
            pass
    await asyncio.to_thread(wait_until, lambda: recorder.calls)
    assert (bytes(recorder.calls[0][1].sampled_ids), recorder.calls[0][1].finish_reason) == (b"ab", "aborted")


async def test_a_disconnect_from_a_stream_disconnects_from_the_server(vllm, served):
    client, recorder = served
    stream = await client.chat.completions.create(**asking("x" * 500), stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.to_thread(wait_until, lambda: recorder.calls and not vllm.streaming)
    [(_, call)] = recorder.calls
    assert call.finish_reason == "aborted"
    assert 0 < len(call.sampled_ids) < 500


@asynccontextmanager
async def saying(head: bytes, body: bytes = b""):
    """An address where every request gets these bytes and the end of the connection."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + head + b"\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize(
    ("asked", "finished", "whole"),
    [(2, [0, 1], True), (2, [0], False), (2, [1], False), (1, [0], True), (1, [], False), (None, [0, 1], True)],
)
async def test_a_stream_ends_when_every_choice_has(asked, finished, whole):
    def chunk(index, reason=None):
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": reason, "token_ids": [1]}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}]}
        return b"data: " + json.dumps({"prompt_token_ids": [1], "choices": [choice]}).encode() + b"\n\n"

    body = chunk(0) + b"".join(chunk(index, "stop") for index in finished)
    async with saying(b"200 OK\r\ncontent-type: text/event-stream", body) as url:
        upstream, chunks = HttpUpstream(url), []
        try:
            async with aclosing(upstream.stream(asking("hi") | ({"n": asked} if asked else {}))) as answer:
                async for part in answer:
                    chunks.append(part)
        except UpstreamError as error:
            assert not whole and "in the middle" in str(error)
        else:
            assert whole
        finally:
            await upstream.stop()
    assert len(chunks) == 1 + len(finished), "what came was passed on"


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", "7"), ("0.5", "1"), ("-5", "0"), ("nan", None), ("inf", None), ("soon", None)]
)
async def test_retry_after_is_passed_on_if_it_is_a_number_of_seconds(said, seconds):
    async with (
        saying(f"429 X\r\nretry-after: {said}\r\ncontent-length: 0".encode()) as url,
        await ServingProxy.start(lambda: HttpUpstream(url), ListRecorder, process=False) as serving,
        openai.AsyncOpenAI(base_url=await serving.open("r1"), api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.chat.completions.create(**asking("hi"))
    assert refusal.value.response.headers.get("retry-after") == seconds


async def test_an_unreachable_server_is_a_bad_gateway():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    upstream = HttpUpstream(f"http://127.0.0.1:{port}/v1")
    with pytest.raises(UpstreamError, match="is the server running") as failure:
        await upstream.chat(asking("hi"))
    assert failure.value.status == 502
    await upstream.stop()


async def test_a_plain_address_cannot_load_weights_and_says_what_to_use_instead():
    with pytest.raises(ConfigError, match="serves fixed weights.*engine='embedded'.*evaluate"):
        await HttpUpstream("http://127.0.0.1:1/v1").load(Weights(version=1, path=None))


async def test_proxy_settings_of_the_machine_are_not_used(vllm, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    upstream = HttpUpstream(vllm.url)
    assert (await upstream.chat(asking("hi")))["choices"]
    await upstream.stop()


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_the_name_that_clients_know(served, stream):
    client, recorder = served
    answer = await client.chat.completions.create(**asking("think"), stream=stream)
    if stream:
        said = [chunk.choices[0].delta.model_extra.get("reasoning_content") async for chunk in answer]
        assert [it for it in said if it] == ["hm"]
    else:
        assert answer.choices[0].message.model_extra == {"reasoning_content": "hm"}
    await client.chat.completions.create(**asking("hello"))
    assert [call.response.get("reasoning_content") for _, call in recorder.calls] == ["hm", None]
