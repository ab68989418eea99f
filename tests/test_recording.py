"""What is recorded of an engine's answer, and which answers are refused before they reach the store."""

import itertools

import httpx
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat
from hypothesis import given
from hypothesis import strategies as st

from art_core.capture.record import Recording, for_client, merge_delta
from art_core.errors import UpstreamError
from art_core.serving import ServingProxy
from art_core.store import Store


def whole(**choice) -> dict:
    answer = {"prompt_token_ids": [1, 2], "policy_version": 3}
    said = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    return answer | {"choices": [said | {"token_ids": [5, 6], "token_logprobs": [-0.5, -1.0]} | choice]}


def recorded(*answers: dict, **request):
    recording = Recording(request, "q", "planner", "main")
    for answer in answers:
        recording.add(answer)
    return recording.calls()


async def test_ids_that_are_not_numbers_are_refused_before_they_reach_the_store():
    class Words(EchoEngine):
        async def chat(self, request):
            answer = await super().chat(request)
            answer["choices"][0]["token_ids"] = ["a", "b"]
            answer["choices"][0]["token_logprobs"] = [0.0, 0.0]
            return answer

    recorder = ListRecorder()
    async with await ServingProxy.start(Words, lambda: recorder, process=False) as serving:
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            refused = await client.post(f"{url}/chat/completions", json=chat("hi"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "no_token_ids")
    assert recorder.calls == []


async def test_a_temperature_that_is_nearly_zero_is_recorded_as_zero():
    recorder, engine = ListRecorder(), EchoEngine()
    async with (
        await ServingProxy.start(lambda: engine, lambda: recorder, process=False) as serving,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        url = await serving.open("r1")
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1e-8}
        await client.post(f"{url}/chat/completions", json=body)
    assert [call.temperature for _, call in recorder.calls] == [0]
    assert engine.requests[0]["temperature"] == 0


@pytest.mark.parametrize("version", [2**63, None, 1.5, "1"])
def test_an_answer_with_an_invalid_policy_version_is_refused(version):
    with pytest.raises(UpstreamError, match="policy_version has invalid values"):
        Recording({}, "q").add({"prompt_token_ids": [1], "policy_version": version, "choices": []})


def test_a_call_has_the_fields_of_the_upstreams_answer():
    [call] = recorded(whole(index=2, forced=[1, 0, 1]) | {"logprobs_temperature": 0.7}, temperature=0.2)
    assert (call.prompt_ids, call.sampled_ids, call.logprobs) == ((1, 2), (5, 6), (-0.5, -1.0))
    assert (call.policy_version, call.request_id, call.choice) == (3, "q", 2)
    assert (call.agent, call.thread) == ("planner", "main")
    assert (call.temperature, call.forced, call.finish_reason) == (0.7, (0, 1), "stop")
    assert (call.request, call.response) == ({"temperature": 0.2}, {"role": "assistant", "content": "ab"})


def test_missing_optional_fields_have_defaults():
    answer = whole()
    del answer["policy_version"]
    [call] = recorded(answer)
    assert (call.policy_version, call.choice, call.temperature, call.forced) == (0, 0, 1.0, ())


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("function_call", "tool_calls"),
        ("abort", "aborted"),
        ("eos", "stop"),
        (None, "aborted"),
    ],
)
def test_finish_reasons_are_normalized(said, kept):
    assert [call.finish_reason for call in recorded(whole(finish_reason=said))] == [kept]


def test_an_answer_that_its_client_did_not_get_is_aborted_whatever_its_finish_reason():
    recording = Recording({}, "q")
    recording.add(whole())
    assert [call.finish_reason for call in recording.calls(aborted=True)] == ["aborted"]


@given(st.data())
def test_a_stream_cut_anywhere_is_recorded_as_the_whole_answer(data):
    texts = data.draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
    chunks = []
    for index, text in enumerate(texts):
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text)))) | {0, len(text)})
        for start, end in itertools.pairwise(cuts):
            ids = [ord(letter) for letter in text[start:end]]
            told = {"token_ids": ids, "token_logprobs": [-float(number) for number in ids]}
            forced = {"forced": [start]} if start % 2 else {}
            ended = {"finish_reason": "length" if end == len(text) else None}
            chunks.append({"index": index, "delta": {"content": text[start:end]}, **told, **forced, **ended})
    order = data.draw(st.permutations(range(len(texts))))
    chunks.sort(key=lambda chunk: order.index(chunk["index"]))
    calls = recorded(*({"prompt_token_ids": [1], "choices": [chunk]} for chunk in chunks))
    assert [call.choice for call in calls] == list(range(len(texts)))
    for call, text in zip(calls, texts, strict=True):
        assert bytes(call.sampled_ids).decode() == text == call.response["content"]
        assert call.logprobs == tuple(-float(ord(letter)) for letter in text)
        assert call.finish_reason == "length"
        mine = [chunk for chunk in chunks if chunk["index"] == call.choice]
        assert call.forced == tuple(sorted({place for chunk in mine for place in chunk.get("forced", ())}))


def test_the_prompt_comes_from_the_first_chunk():
    first = {"prompt_token_ids": [1], "policy_version": 4, "logprobs_temperature": 0.5, "choices": []}
    later = {"prompt_token_ids": [9], "policy_version": 5, "logprobs_temperature": 0.9} | {
        "choices": [{"delta": {"content": "a"}, "token_ids": [7], "token_logprobs": [0.0], "finish_reason": "stop"}]
    }
    last = {"choices": [{"delta": None, "finish_reason": None}]}
    [call] = recorded(first, later, last)
    assert (call.prompt_ids, call.policy_version, call.temperature) == ((1,), 4, 0.5)
    assert (call.sampled_ids, call.finish_reason) == ((7,), "stop")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (whole() | {"prompt_token_ids": []}, "prompt_token_ids is missing or empty"),
        (whole() | {"prompt_token_ids": [2**31]}, "prompt_token_ids has invalid values"),
        (whole(token_ids=None), "choice 0 has no token_ids"),
        (whole(index=4, token_ids=None), "choice 4 has no token_ids"),
        (whole(token_ids=[5]), "choice 0 has 1 token ids and 2 logprobs"),
        (whole(index=4, token_logprobs=None), "choice 4 has 2 token ids and 0 logprobs"),
        (whole(token_ids=[5, 2**31]), "token_ids has invalid values"),
        (whole(token_logprobs=[-0.5, "x"]), "logprobs has invalid values"),
        (whole(forced=["x"]), "forced has invalid values"),
        (whole(forced=[0, 2]), "choice 0 has no tokens at the forced positions"),
        (whole(forced=[-1], index=4), "choice 4 has no tokens at the forced positions"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused_with_the_reason(answer, why):
    with pytest.raises(UpstreamError, match=why) as refusal:
        recorded(answer)
    assert (refusal.value.status, refusal.value.code) == (502, "no_token_ids")


@pytest.mark.parametrize("said", ["content", "tool_calls", "reasoning_content", "reasoning"])
def test_a_chunk_with_text_must_have_tokens_and_an_empty_one_need_not(said):
    chunk = {"prompt_token_ids": [1], "choices": [{"delta": {"role": "assistant", said: None}}]}
    [call] = recorded(chunk)
    assert (call.sampled_ids, call.finish_reason) == ((), "aborted")
    chunk["choices"][0]["delta"][said] = [{"index": 0}] if said == "tool_calls" else "x"
    with pytest.raises(UpstreamError, match="choice 0 has no token_ids"):
        recorded(chunk)


def merged(*deltas: dict) -> dict:
    message = {"role": "assistant", "content": None}
    for delta in deltas:
        merge_delta(message, delta)
    return message


def test_fields_of_chunks_are_appended_by_name():
    told = merged(
        {"role": "assistant", "content": "a", "reasoning": "x"},
        {"role": "assistant", "content": "b", "refusal": None, "extra": {"n": 1}},
        {"reasoning": "y", "tool_calls": None},
    )
    assert told == {"role": "assistant", "content": "ab", "reasoning": "xy", "extra": {"n": 1}}


def test_parts_of_tool_calls_are_merged_by_index():
    told = merged(
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "type": "custom", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 1, "id": None, "function": {"name": None, "arguments": "}"}}, {"index": 0}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "[]", "note": "n"}}]},
    )
    assert told["tool_calls"] == [
        {"id": "a", "type": "custom", "function": {"name": "f", "arguments": "[]", "note": "n"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_a_part_of_a_tool_call_without_an_index_belongs_to_the_last_one():
    named = {"function": {"name": "f", "arguments": "1"}}
    assert merged({"tool_calls": [named]})["tool_calls"] == [{"id": None, "type": "function", **named}]
    told = merged({"tool_calls": [{"index": 1, **named}]}, {"tool_calls": [{"function": {"arguments": "2"}}]})
    assert [call["function"]["arguments"] for call in told["tool_calls"]] == ["", "12"]
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["", "f"]
    assert [call["type"] for call in told["tool_calls"]] == ["function", "function"]


def test_capture_fields_are_hidden_from_clients():
    inner = {"prompt_token_ids": [1], "policy_version": 2, "logprobs_temperature": 1.0}
    choice = {"index": 0, "delta": {"content": "a"}}
    answer = {
        "id": "x",
        "model": "m",
        **inner,
        "choices": [{**choice, "token_ids": [1], "token_logprobs": [0.0], "forced": []}],
    }
    assert for_client(answer) == {"id": "x", "model": "m", "choices": [choice], "service_tier": None}
    assert for_client(answer, Recording({}, "q"))["id"] == "chatcmpl-q"
    asked = for_client(answer, Recording({"return_token_ids": True}, "q"))
    assert (asked["prompt_token_ids"], asked["choices"]) == ([1], [{**choice, "token_ids": [1]}])
    assert for_client({"usage": {}}) == {"usage": {}, "choices": [], "service_tier": None}


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
def test_a_malformed_chunk_is_refused_and_earlier_ones_can_be_stored(tmp_path, choice):
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
