"""Calls that an engine's ``relay`` sends to a provider itself: what it is passed, and what the capture server does around it."""

import asyncio
import time
from concurrent.futures import Future

from asgi import answered, asked_of, settle, under_way
from capture_fakes import EchoEngine, ListRecorder

from art_core.capture import CaptureApp, Dialect, Gate
from art_core.types import Call, Sampling

AS_ASKED = Sampling()


class Relaying(EchoEngine):
    """Records each call and answers with its body, once it may."""

    def __init__(self, may: bool = True) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.calls = []
        self.headers = []
        if may:
            self.may.set()

    async def relay(self, exchange, call):
        self.calls.append(call)
        self.headers.append(exchange.raw_headers)
        await self.may.wait()
        await call.record([Call((1,), (2,), (-0.5,), 0, request_id=call.request_id)])
        await exchange.answer(200, {"body": call.body.decode()})


class LateRecorder(ListRecorder):
    """What it records is saved once ``disk`` is done."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Future()

    def saved(self):
        return self.disk


async def test_a_relaying_engine_gets_the_request_as_it_was_sent():
    app = CaptureApp(engine := Relaying(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", b"{not JSON", x_art_request_id="q1"))
    assert asked.json == {"body": "{not JSON"}
    [call], [headers] = engine.calls, engine.headers
    assert (call.path, call.model, call.body, call.request_id) == ("/v1/chat/completions", None, b"{not JSON", "q1")
    assert headers == [(b"x-art-request-id", b"q1")]
    assert [(rollout, call.request_id) for rollout, call in recorder.calls] == [("r1", "q1")]


async def test_a_relaying_engine_gets_the_model_that_the_path_names():
    app = CaptureApp(engine := Relaying(), ListRecorder(), dialects={"/{model}:shout": Dialect()})
    app.open("r1", AS_ASKED)
    await answered(app, asked_of("r1", {}, "/gemini:shout"))
    [call] = engine.calls
    assert (call.path, call.model) == ("/{model}:shout", "gemini")


async def test_a_relayed_call_is_recorded_for_good_before_it_is_answered():
    app = CaptureApp(Relaying(), recorder := LateRecorder())
    app.open("r1", AS_ASKED)
    asked = asked_of("r1", b"{}")
    task = under_way(app, asked)
    await settle()
    assert (len(recorder.of("r1")), asked.sent) == (1, [])
    recorder.disk.set_result(None)
    await task
    assert asked.status == 200


async def test_relayed_calls_pass_through_the_gate():
    app = CaptureApp(engine := Relaying(may=False), ListRecorder(), gate=Gate(limit=1))
    app.open("r1", AS_ASKED)
    tasks = [under_way(app, asked_of("r1", b"{}")) for _ in range(2)]
    await settle()
    assert (len(engine.calls), app.gate.inside, app.gate.waiting) == (1, 1, 1)
    engine.may.set()
    assert [(await task).status for task in tasks] == [200, 200]


async def test_a_retry_of_a_relayed_call_replaces_it_and_another_call_does_not():
    app = CaptureApp(engine := Relaying(may=False), ListRecorder())
    app.open("r1", AS_ASKED)
    first, other, nameless, another = (
        under_way(app, asked_of("r1", b"{}", **ids))
        for ids in ({"x_art_request_id": "q"}, {"x_art_request_id": "p"}, {}, {})
    )
    await settle()
    retry = under_way(app, asked_of("r1", b"{}", x_art_request_id="q"))
    assert (await first).status == 409
    await settle()
    engine.may.set()
    assert [(await task).status for task in (other, nameless, another, retry)] == [200] * 4


async def test_a_relayed_call_counts_as_activity_of_its_rollout():
    app = CaptureApp(engine := Relaying(may=False), ListRecorder())
    app.open("r1", AS_ASKED)
    task = under_way(app, asked_of("r1", b"{}"))
    await settle()
    ended, oldest = app.activity.snapshot(app.gate).rollouts["r1"]
    assert ended == 0 and oldest is not None
    [call], before = engine.calls, time.monotonic()
    call.note_progress()
    assert app.activity.snapshot(app.gate).quiet <= time.monotonic() - before
    engine.may.set()
    await task
    assert app.activity.snapshot(app.gate).rollouts == {"r1": (1, None)}
