"""What is recorded of an engine's answer, and which answers are refused before they reach the store."""

import httpx
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat

from art_core.capture import Door
from art_core.capture.record import Recording
from art_core.errors import UpstreamError
from art_core.store import Store


async def test_ids_that_are_no_numbers_are_refused_before_they_reach_the_store():
    class Words(EchoEngine):
        async def chat(self, request):
            answer = await super().chat(request)
            answer["choices"][0]["token_ids"] = ["a", "b"]
            answer["choices"][0]["token_logprobs"] = [0.0, 0.0]
            return answer

    recorder = ListRecorder()
    async with await Door.start(Words, lambda: recorder, process=False) as door:
        url = await door.open("r1")
        async with httpx.AsyncClient(trust_env=False) as client:
            refused = await client.post(f"{url}/chat/completions", json=chat("hi"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "no_token_ids")
    assert recorder.calls == []


async def test_a_temperature_that_is_nearly_zero_is_recorded_as_zero():
    recorder, engine = ListRecorder(), EchoEngine()
    async with (
        await Door.start(lambda: engine, lambda: recorder, process=False) as door,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        url = await door.open("r1")
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1e-8}
        await client.post(f"{url}/chat/completions", json=body)
    assert [call.temperature for _, call in recorder.calls] == [0]
    assert engine.requests[0]["temperature"] == 0


@pytest.mark.parametrize("version", [2**63, None, 1.5, "1"])
def test_an_answer_whose_policy_version_cannot_be_kept_is_refused(version):
    with pytest.raises(UpstreamError, match="policy_version"):
        Recording({}, "q").add({"prompt_token_ids": [1], "policy_version": version, "choices": []})


@pytest.mark.parametrize(
    "choice",
    [
        {"index": None, "delta": {}},
        {"index": -1, "delta": {}},
        {
            "delta": {"tool_calls": [{"index": 10**9, "function": {"name": "f"}}]},
            "token_ids": [3],
            "token_logprobs": [-1.0],
        },
        {"message": "text", "token_ids": [3], "token_logprobs": [-1.0]},
        {"delta": {"content": ["text"]}, "token_ids": [3], "token_logprobs": [-1.0]},
        {"delta": {"content": "a"}, "token_ids": [3], "token_logprobs": [float("inf")]},
        {"delta": {"content": "a"}, "token_ids": [3], "token_logprobs": [-1.0], "forced": [5]},
        {"delta": {"content": "a"}, "finish_reason": 5, "token_ids": [3], "token_logprobs": [-1.0]},
    ],
)
def test_an_answer_that_is_no_completion_is_refused_and_what_came_before_it_can_be_stored(tmp_path, choice):
    recording = Recording({}, "q")
    recording.add(
        {"prompt_token_ids": [1], "choices": [{"delta": {"content": "a"}, "token_ids": [2], "token_logprobs": [-1.0]}]}
    )
    with pytest.raises(UpstreamError) as refused:
        recording.add({"choices": [choice]})
    assert refused.value.status == 502
    with Store(tmp_path / "run.sqlite") as store:
        for call in recording.calls(aborted=True):
            store.record("r", call)
        store.flush()
        assert store.calls("r")[0].sampled_ids == (2,)
