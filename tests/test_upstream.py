"""Any OpenAI-compatible server that returns token ids, behind the door: a small one that speaks vLLM's dialect."""

import asyncio
import socket

import openai
import pytest
from capture_fakes import ListRecorder, wait_until
from vllm_like import vllm_like

from art_core.capture import Door, HttpUpstream
from art_core.capture.record import Recording
from art_core.errors import ConfigError, UpstreamError
from art_core.types import Weights


@pytest.fixture(scope="module")
def vllm():
    with vllm_like() as fake:
        yield fake


@pytest.fixture
async def served(vllm):
    recorder = ListRecorder()
    upstream = HttpUpstream(vllm.url, "served-model", api_key="secret", timeout=2.0)
    async with await Door.start(lambda: upstream, lambda: recorder, process=False) as door:
        url = await door.open("r1")
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


async def test_an_agent_that_asks_for_logprobs_gets_them(served):
    client, recorder = served
    answer = await client.chat.completions.create(**asking("hi"), logprobs=True)
    assert [token.logprob for token in answer.choices[0].logprobs.content] == list(recorder.calls[0][1].logprobs)


@pytest.mark.parametrize("prompt", ["once upon", [5, 6, 7]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_is_answered_in_the_shape_of_a_chat_completion(vllm, stream, prompt):
    upstream = HttpUpstream(vllm.url)
    recording = Recording({}, "q1")
    request = {"prompt": prompt, "stream": stream}
    if stream:
        async for chunk in upstream.stream(request):
            recording.add(chunk)
    else:
        recording.add(await upstream.chat(request))
    await upstream.stop()
    [call] = recording.calls()
    ids = tuple(prompt if isinstance(prompt, list) else prompt.encode())
    assert (call.prompt_ids, call.sampled_ids, call.logprobs) == (ids, ids, (-0.5,) * len(ids))
    assert call.response == {"role": "assistant", "content": "more"}
    assert call.finish_reason == "stop"
    assert vllm.requests[-1]["logprobs"] == 1


async def test_a_long_request_reaches_the_server_whole(vllm):
    upstream = HttpUpstream(vllm.url)
    long = asking("x" * 3_000_000)
    assert (await upstream.chat(long))["choices"][0]["message"]["content"] == "x" * 3_000_000
    await upstream.stop()


async def test_the_version_is_what_the_owner_of_the_server_says(vllm):
    upstream = HttpUpstream(vllm.url)
    upstream.policy_version = 4
    assert (await upstream.chat(asking("hi")))["policy_version"] == 4
    await upstream.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "code", "message"),
    [
        ("too long", 400, "context_length_exceeded", "maximum context length"),
        ("old shape", 404, None, "no such model"),
        ("page", 503, None, "gateway"),
        ("no ids", 502, "no_token_ids", "return_token_ids"),
        ("slow", 504, "upstream_timeout", "did not answer in time"),
    ],
)
async def test_a_servers_refusal_keeps_its_status_and_words(served, stream, text, status, code, message):
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


async def test_a_server_that_fails_in_the_middle_of_a_stream_is_told(served):
    client, recorder = served
    with pytest.raises(openai.APIError, match="engine died"):
        async for _ in await client.chat.completions.create(**asking("ab!"), stream=True):
            pass
    await asyncio.to_thread(wait_until, lambda: recorder.calls)
    assert (bytes(recorder.calls[0][1].sampled_ids), recorder.calls[0][1].finish_reason) == (b"ab", "aborted")


async def test_a_client_that_leaves_a_stream_leaves_the_server_too(vllm, served):
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


async def test_a_server_that_is_not_there_is_a_bad_gateway():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    upstream = HttpUpstream(f"http://127.0.0.1:{port}/v1")
    with pytest.raises(UpstreamError, match="is the server running") as failure:
        await upstream.chat(asking("hi"))
    assert failure.value.status == 502
    await upstream.stop()


async def test_a_plain_address_cannot_take_weights_and_says_what_to_use_instead():
    with pytest.raises(ConfigError, match="serves fixed weights.*engine='embedded'.*evaluate"):
        await HttpUpstream("http://127.0.0.1:1/v1").load(Weights(version=1, path=None))


async def test_proxy_settings_of_the_machine_are_not_used(vllm, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    upstream = HttpUpstream(vllm.url)
    assert (await upstream.chat(asking("hi")))["choices"]
    await upstream.stop()
