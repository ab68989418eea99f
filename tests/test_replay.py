"""Replayed answers: to which requests, how often, and in which shape."""

import json

import pytest
from capture_fakes import EchoEngine, chat

from art_core.capture.record import Recording
from art_core.capture.replay import RecordedAnswers
from art_core.types import Call


def made(number: int, text: str = "hi", choice: int = 0, **fields) -> Call:
    """A call of request ``q{number}``, whose tokens tell which it is."""
    said = {"role": "assistant", "content": f"{number}{choice}"}
    told = {"request": chat(text), "response": said, "temperature": 0.5, "policy_version": number} | fields
    return Call(
        prompt_ids=(1, 2, 3), sampled_ids=(number, choice), logprobs=(-0.5, -1.0), request_id=f"q{number}",
        choice=choice, **told,
    )  # fmt: skip


def sampled(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def streamed(upstream, request: dict) -> list[dict]:
    return [chunk async for chunk in upstream.stream(request)]


async def test_each_answer_is_replayed_once_in_order_before_the_engine_is_asked():
    engine = EchoEngine()
    upstream = RecordedAnswers([made(1), made(2, "other"), made(3)]).with_fallback(engine)
    given = [sampled(await upstream.chat(chat(text))) for text in ("hi", "hi", "hi", "other", "other")]
    assert given == [[[1, 0]], [[3, 0]], [list(b"hi")], [[2, 0]], [list(b"other")]]
    assert engine.requests == [chat("hi"), chat("other")]


async def test_a_stream_for_a_new_request_is_the_engines():
    upstream = RecordedAnswers([made(1)]).with_fallback(EchoEngine())
    chunks = await streamed(upstream, chat("new", stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == "new"


def test_the_order_of_a_requests_fields_does_not_matter():
    request = chat("hi", temperature=0.5)
    answers = RecordedAnswers([made(1, request=request)])
    assert answers.take(dict(reversed(request.items()))) == [made(1, request=request)]
    assert answers.take(request) is None


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [made(1, finish_reason="aborted")],
        [made(1), made(1, choice=1, finish_reason="aborted")],
        [made(1, request=chat("hi", logprobs=True))],
    ],
    ids=["none", "aborted", "one choice aborted", "logprobs"],
)
def test_aborted_answers_are_not_replayed(calls):
    engine = EchoEngine()
    assert RecordedAnswers(calls).with_fallback(engine) is engine


async def test_a_replayed_answer_is_recorded_unchanged():
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
    calls = [made(7, response=said), made(7, choice=1, finish_reason="length", forced=(1,))]
    answer = await RecordedAnswers(calls).with_fallback(EchoEngine()).chat(chat("hi"))
    recording = Recording(chat("hi"), "q7")
    recording.add(answer)
    assert recording.calls() == tuple(calls)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
    assert answer["id"].startswith("chatcmpl-") and type(answer["created"]) is int


async def test_a_replayed_answer_to_a_request_without_a_model_names_the_policy():
    request = {"messages": chat("hi")["messages"]}
    answer = await RecordedAnswers([made(1, request=request)]).with_fallback(EchoEngine()).chat(request)
    assert answer["model"] == "policy"
    request["model"] = "mine"
    answer = await RecordedAnswers([made(1, request=request)]).with_fallback(EchoEngine()).chat(request)
    assert answer["model"] == "mine"


@pytest.mark.parametrize("usage", [None, {}, {"include_usage": False}, {"include_usage": True}], ids=json.dumps)
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_replayed_stream_is_recorded_unchanged(usage, choices):
    tools = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
    said = {"role": "assistant", "content": "x", "tool_calls": tools}
    request = chat("hi", stream=True) | ({} if usage is None else {"stream_options": usage})
    calls = [made(7, request=request, response=said), made(7, request=request, choice=1)][:choices]
    chunks = await streamed(RecordedAnswers(calls).with_fallback(EchoEngine()), request)
    recording = Recording(request, "q7")
    for chunk in chunks:
        recording.add(chunk)
        assert chunk["object"] == "chat.completion.chunk"
    assert recording.calls() == tuple(calls)
    asked = usage == {"include_usage": True}
    sampled = 2 * choices
    expected = [{"prompt_tokens": 3, "completion_tokens": sampled, "total_tokens": 3 + sampled}] if asked else []
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == expected
    assert [len(chunk["choices"]) for chunk in chunks] == ([choices, 0] if asked else [choices])
