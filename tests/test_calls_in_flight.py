"""Calls in flight: clients that disconnect or retry, rollouts that close, servers that stop. Without a socket."""

import asyncio
import json

import pytest
from asgi import Asked, answered, asked_of, said, settle, under_way
from capture_fakes import EchoEngine, ListRecorder, chat

from art_core.capture import CaptureApp
from art_core.errors import CaptureError
from art_core.types import Sampling

AS_ASKED = Sampling()


class Waiting(EchoEngine):
    """Says the first letter, and the rest when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.begun = 0

    async def chat(self, request):
        self.begun += 1
        await self.may.wait()
        return await super().chat(request)

    async def stream(self, request):
        self.begun += 1
        async for chunk in super().stream(request):
            yield chunk
            await self.may.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_call(stream):
    app = CaptureApp(engine := Waiting(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = asked_of("r1", chat("hi", stream=stream))
    task = under_way(app, asked)
    await settle()
    asked.leave.set()
    await task
    assert engine.begun == 1 and "sent it again" in asked.text
    kept = [(bytes(call.sampled_ids), call.finish_reason) for call in recorder.of("r1")]
    assert kept == ([(b"h", "aborted")] if stream else [])
    app.release("r1")
    app.open("r1", AS_ASKED)


async def test_what_a_cancelled_upstream_returns_is_recorded():
    class Obliging(Waiting):
        async def chat(self, request):
            try:
                return await super().chat(request)
            except asyncio.CancelledError:
                return await EchoEngine.chat(self, request)

    app = CaptureApp(Obliging(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = asked_of("r1", chat("hi"))
    task = under_way(app, asked)
    await settle()
    asked.leave.set()
    await task
    assert [(bytes(call.sampled_ids), call.finish_reason) for call in recorder.of("r1")] == [(b"hi", "aborted")]
    assert asked.status == 409


async def test_a_disconnect_after_the_whole_answer_does_not_cancel_the_call():
    class Slow(Asked):
        async def send(self, message):
            await super().send(message)
            if message["type"] == "http.response.body":
                self.leave.set()
                await settle()

    app = CaptureApp(EchoEngine(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    body = json.dumps(chat("hi")).encode()
    asked = await answered(app, Slow(body, "/rollouts/r1/v1/chat/completions"))
    assert said(asked) == "hi"
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop"]


async def test_a_retry_cancels_the_first_request_and_is_answered():
    app = CaptureApp(engine := Waiting(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    first = under_way(app, asked_of("r1", chat("a"), x_art_request_id="q"))
    await settle()
    second = under_way(app, asked_of("r1", chat("b"), x_art_request_id="q"))
    assert (await first).status == 409
    await settle()
    engine.may.set()
    assert said(await second) == "b"
    assert [call.request_id for call in recorder.of("r1")] == ["q"]


async def test_calls_without_a_request_id_do_not_replace_each_other():
    app = CaptureApp(engine := Waiting(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    tasks = [under_way(app, asked_of("r1", chat(text))) for text in ("a", "b")]
    await settle()
    engine.may.set()
    assert [said(await task) for task in tasks] == ["a", "b"]
    assert len({call.request_id for call in recorder.of("r1")}) == 2


async def test_an_id_is_open_once_until_it_is_closed():
    app = CaptureApp(EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED)
    with pytest.raises(CaptureError, match="'r1' is open already"):
        app.open("r1", AS_ASKED)
    await app.close("r1", 0.0)
    await app.close("r1", 0.0)
    assert (await answered(app, asked_of("r1", chat("hi")))).error["code"] == "rollout_not_open"
    app.open("r1", AS_ASKED)
    app.release("r1")
    app.release("r1")
    assert (await answered(app, asked_of("r1", chat("hi")))).status == 404


async def test_closing_a_rollout_refuses_new_calls_and_lets_those_in_flight_finish():
    app = CaptureApp(engine := Waiting(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    under = under_way(app, asked_of("r1", chat("hi")))
    await settle()
    app.release("r1")
    closing = asyncio.create_task(app.close("r1", 10.0))
    await settle()
    assert (await answered(app, asked_of("r1", chat("late")))).error["code"] == "rollout_not_open"
    assert not closing.done()
    engine.may.set()
    await closing
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop"]
    assert said(await under) == "hi"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_times_out_is_a_504_and_not_retried(stream):
    app = CaptureApp(Waiting(), recorder := ListRecorder(), call_timeout=0.5)
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("hi", stream=stream)))
    error = asked.events[-1]["error"] if stream else asked.error
    assert (error["message"], error["code"]) == (
        "the engine did not answer within 0.5 seconds (call_timeout)",
        "upstream_timeout",
    )
    if not stream:
        assert (asked.status, asked.told["x-should-retry"]) == (504, "false")
    assert [call.finish_reason for call in recorder.of("r1")] == ["aborted"] * stream


@pytest.mark.parametrize("end", ["close", "release"])
async def test_a_rollouts_activity_is_known_until_it_closes(end):
    app = CaptureApp(engine := Waiting(), ListRecorder())
    app.open("r1", AS_ASKED)
    under = under_way(app, asked_of("r1", chat("hi")))
    await settle()
    ended, oldest = app.activity.snapshot(app.gate).rollouts["r1"]
    assert ended == 0 and oldest is not None
    engine.may.set()
    await under
    assert app.activity.snapshot(app.gate).rollouts == {"r1": (1, None)}
    if end == "close":
        await app.close("r1", 0.0)
    else:
        app.release("r1")
    assert app.activity.snapshot(app.gate).rollouts == {}


async def test_close_returns_the_counts_of_error_answers():
    app = CaptureApp(EchoEngine(), ListRecorder())
    for rollout in ("r1", "r2"):
        app.open(rollout, AS_ASKED)
    for status, code in ((503, "full"), (429, "busy"), (503, "full")):
        assert (await answered(app, asked_of("r1", chat(f"refuse {status} {code}")))).status == status
    assert await app.close("r1", 0.0) == {"503 full: refused with 503": 2, "429 busy: refused with 429": 1}
    assert await app.close("r2", 0.0) == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopping_server_says_when_to_retry(stream):
    app = CaptureApp(Waiting(), recorder := ListRecorder())
    for rollout in ("r1", "r2"):
        app.open(rollout, AS_ASKED)
    tasks = [under_way(app, asked_of(rollout, chat("hi", stream=stream))) for rollout in ("r1", "r2")]
    await settle()
    await app.close_all()
    late = await answered(app, asked_of("r1", chat("late")))
    for asked in (late, *[await task for task in tasks]):
        if asked.status == 200:
            assert asked.events[-1]["error"]["code"] == "stopping"
            continue
        assert (asked.status, asked.error["code"]) == (503, "stopping")
        assert (asked.told["retry-after"], "x-should-retry" in asked.told) == ("5", False)
    assert all(call.finish_reason == "aborted" for call in recorder.of("r1"))


async def test_an_answer_that_was_not_sent_completely_is_recorded_as_aborted():
    reading = asyncio.Event()

    class Stalled(Asked):
        async def send(self, message):
            await super().send(message)
            await reading.wait()

    app = CaptureApp(engine := Waiting(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = Stalled(json.dumps(chat("hi", stream=True)).encode(), "/rollouts/r1/v1/chat/completions")
    task = under_way(app, asked)
    await settle()
    engine.may.set()
    await settle()
    asked.leave.set()
    await settle()
    reading.set()
    await task
    assert [(bytes(call.sampled_ids), call.finish_reason) for call in recorder.of("r1")] == [(b"hi", "aborted")]
