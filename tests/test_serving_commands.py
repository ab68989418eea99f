"""The commands of ServingProxy: what engines are asked, time limits, and calls from other threads."""

import asyncio
import concurrent.futures
import contextvars
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from capture_fakes import EchoEngine, ListRecorder, NeverEndsWell, chat, wait_until

from art_core.capture import Dialect, FixedVersion
from art_core.errors import CaptureError, ConfigError
from art_core.serving import ServingProxy
from art_core.serving.service import ServingThread
from art_core.types import Call, Sampling, Weights


class AbleEngine(EchoEngine):
    """Overrides every optional method, and notes the calls in order."""

    def __init__(self, *, overlaps=True, keeps_start=True):
        super().__init__()
        self.events, self._overlaps, self._keeps_start = [], overlaps, keeps_start

    def begin(self, run_dir):
        self.events.append(("begin", run_dir))

    async def start(self):
        self.events.append("start")

    async def stop(self):
        self.events.append("stop")
        await super().stop()

    async def score(self, ids):
        return [-float(token) for token in ids[1:]]

    async def counters(self):
        return {"sampled_tokens": 3.0}

    async def rest(self):
        self.events.append("rest")

    async def wake(self):
        self.events.append("wake")

    def overlaps(self, weights):
        return self._overlaps and weights.version > self.version

    def keeps_start(self):
        return self._keeps_start

    def at(self, version):
        return FixedVersion(self, version)

    async def load(self, weights):
        self.events.append(f"load {weights.version}")
        self.version = weights.version

    async def retire(self, version):
        self.events.append(f"retire {version}")


class Stuck(EchoEngine):
    """Never finishes loading weights."""

    async def load(self, weights):
        await asyncio.sleep(60)


def opened(engine, recorder=None, **settings):
    recorder = recorder or ListRecorder()
    return ServingProxy.start(lambda: engine, lambda: recorder, process=False, **settings)


async def post(url, text="hello", **headers):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(f"{url}/chat/completions", json=chat(text), headers=headers)


def weights(version):
    return Weights(version=version, path=None)


async def test_a_serving_thread_does_not_inherit_the_context_that_starts_it():
    class Notes(EchoEngine):
        async def start(self):
            seen.append(caller.get())

    caller, seen = contextvars.ContextVar("caller", default="nobody"), []
    caller.set("a rollout")
    async with await ServingProxy.start(Notes, ListRecorder, process=False):
        assert seen == ["nobody"]


async def test_an_engine_without_optional_methods_gets_the_defaults():
    engine = EchoEngine()
    async with await opened(engine) as serving:
        assert await serving.score([1, 2]) is None
        assert await serving.counters() == {}
        await serving.pause(rest=True)
        assert await serving.swap(weights(1), [1, 2]) is None
    assert engine.version == 1


async def test_an_engines_optional_methods_are_called(tmp_path):
    engine = AbleEngine()
    async with await opened(engine, folder=tmp_path) as serving:
        assert await serving.score((5, 6, 7)) == [-6.0, -7.0]
        assert await serving.counters() == {"sampled_tokens": 3.0}
        assert await serving.swap(weights(1)) is None
        await serving.pause(rest=True)
        assert await serving.swap(weights(2), (5, 6)) == [-6.0]
        await serving.pause(rest=True)
        await serving.resume()
        await serving.pause()
        await serving.resume()
    loads = ["load 1", "retire 0", "rest", "wake", "load 2", "retire 1", "rest", "wake"]
    assert engine.events == [("begin", tmp_path), "start", *loads, "stop"]


async def test_begin_is_not_called_without_a_folder():
    engine = AbleEngine()
    async with await opened(engine):
        assert engine.events == ["start"]


async def test_a_version_is_retired_when_the_last_rollout_that_began_with_it_closes():
    engine, recorder = AbleEngine(), ListRecorder()
    async with await opened(engine, recorder) as serving:
        first = await serving.open("first")
        await serving.swap(weights(1))
        second = await serving.open("second")
        newest = await serving.open("newest", newest=True)
        assert engine.events == ["start", "load 1"]
        await serving.swap(weights(2))
        for url in (first, second, newest):
            await post(url)
        assert [recorder.of(it)[0].policy_version for it in ("first", "second", "newest")] == [0, 1, 2]
        await serving.close("second")
        assert engine.events[-1] == "retire 1"
        await serving.close("first")
        assert engine.events[-1] == "retire 0"
        await serving.close("newest")
        assert engine.events == ["start", "load 1", "load 2", "retire 1", "retire 0"]


async def test_weights_that_do_not_overlap_wait_for_calls_in_flight():
    engine = AbleEngine(overlaps=False)
    engine.delay = 0.01
    async with await opened(engine) as serving:
        url = await serving.open("r1")
        answer = asyncio.create_task(post(url, "x" * 20))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        await serving.swap(weights(1))
        assert not engine.sampling
        assert (await answer).status_code == 200


@pytest.mark.parametrize("kept", [True, False])
async def test_the_frozen_engine_only_starts_if_the_first_does_not_keep_its_start_weights(kept, tmp_path):
    engine, second, recorder = AbleEngine(keeps_start=kept), AbleEngine(), ListRecorder()
    settings = {"trained_nodes": ["planner"], "frozen": lambda: second, "frozen_start": True, "folder": tmp_path}
    async with await opened(engine, recorder, **settings) as serving:
        await serving.swap(weights(4))
        url = await serving.open("r1", Sampling(temperature=0.5))
        for node in ("planner", "writer"):
            assert (await post(url, **{"x-art-agent": node})).status_code == 200
    assert [(call.agent, call.policy_version) for call in recorder.of("r1")] == [("planner", 4), ("writer", 0)]
    assert [call.temperature for call in recorder.of("r1")] == [0.5, 1.0]
    assert second.events == ([] if kept else [("begin", tmp_path), "start", "stop"])


async def test_a_frozen_model_other_than_the_start_weights_answers_untrained_nodes():
    engine, other, recorder = AbleEngine(), EchoEngine(), ListRecorder()
    async with await opened(engine, recorder, trained_nodes=["planner"], frozen=lambda: other) as serving:
        await post(await serving.open("r1"), **{"x-art-agent": "writer"})
    assert len(other.requests) == 1 and not engine.requests


@pytest.mark.parametrize("kind", [EchoEngine, AbleEngine])
async def test_answered_calls_are_replayed_without_the_engine(kind):
    engine, recorder = kind(), ListRecorder()
    async with await opened(engine, recorder) as serving:
        await post(await serving.open("before"))
        await serving.close("before")
        [call] = recorder.of("before")
        assert isinstance(call, Call)
        await post(await serving.open("after", replayed=[call]))
        assert len(engine.requests) == 1
        await post(await serving.open("other"))
        assert len(engine.requests) == 2


async def test_a_command_that_times_out_names_the_setting():
    async with await opened(Stuck(), timeout=1.0) as serving:
        swap = asyncio.create_task(serving.swap(weights(1)))
        await asyncio.sleep(0.05)
        [(command, since)] = serving.pending.values()
        assert command == "swap" and 0 <= time.monotonic() - since < 5
        with pytest.raises(CaptureError, match=r"did not finish 'swap' within 1 seconds \(engine_timeout\)"):
            await swap
        assert not serving.pending
        await serving.flush()


async def test_a_start_that_takes_too_long_leaves_no_thread():
    class Slow(EchoEngine):
        async def start(self):
            await asyncio.sleep(60)

    before = set(threading.enumerate())
    with pytest.raises(CaptureError, match="did not finish 'start' within 0.1 seconds"):
        await opened(Slow(), timeout=0.1)
    wait_until(lambda: {it for it in threading.enumerate() if it.name == "art-capture"} <= before)


async def test_concurrent_commands_are_all_pending():
    async with await opened(Stuck()) as serving:
        first, second = (asyncio.create_task(serving.swap(weights(version))) for version in (1, 2))
        await asyncio.sleep(0.05)
        assert [command for command, _ in serving.pending.values()] == ["swap", "swap"]
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert not serving.pending


async def test_a_timeout_error_of_the_engine_itself_is_raised():
    class Late(EchoEngine):
        async def load(self, weights):
            raise TimeoutError("the file server")

    async with await opened(Late(), timeout=60) as serving:
        with pytest.raises(TimeoutError, match="the file server"):
            await serving.swap(weights(1))


async def test_look_works_from_another_thread():
    engine = AbleEngine()
    engine.delay = 0.02
    async with await opened(engine) as serving:
        url = await serving.open("r1")
        answer = asyncio.create_task(post(url, "x" * 10))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        calls, counters = await asyncio.to_thread(serving.snapshot, 5.0)
        assert counters == {"sampled_tokens": 3.0}
        ended, longest = calls.rollouts["r1"]
        assert ended == 0 and longest > 0 and calls.waiting == 0
        await answer
        assert serving.stacks(0.1) == "", "the process that serves is this one"
    assert await asyncio.to_thread(serving.snapshot, 5.0) == (None, None), "it has ended"


async def test_look_does_not_wait_for_an_engine_that_hangs():
    class Hanging(AbleEngine):
        async def counters(self):
            await asyncio.sleep(60)

    async with await opened(Hanging()) as serving:
        calls, counters = await asyncio.to_thread(serving.snapshot, 0.2)
        assert calls is not None and counters is None


async def test_closing_a_rollout_refuses_new_calls_and_gives_calls_in_flight_the_grace_period():
    engine, recorder = EchoEngine(delay=0.02), ListRecorder()
    async with await opened(engine, recorder) as serving:
        url, other = await serving.open("r1"), await serving.open("r2")
        answer = asyncio.create_task(post(url, "x" * 500))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        await serving.close("r1", grace=0.1)
        assert [call.finish_reason for call in recorder.of("r1")] == ["aborted"]
        assert (await answer).status_code == 409
        assert (await post(url)).status_code == 404
        assert (await post(other)).status_code == 200


async def test_the_default_grace_period_is_a_second():
    engine, recorder = EchoEngine(delay=0.01), ListRecorder()
    async with await opened(engine, recorder) as serving:
        for calls, tokens in enumerate((10, 150), start=1):
            answer = asyncio.create_task(post(await serving.open("r1"), "x" * tokens))
            await asyncio.to_thread(wait_until, lambda calls=calls: len(engine.requests) == calls)
            await serving.close("r1")
            await answer
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop", "aborted"]


async def test_a_pause_holds_new_calls_until_resume():
    engine = EchoEngine()
    async with await opened(engine) as serving:
        url = await serving.open("r1")
        await serving.pause()
        answer = asyncio.create_task(post(url))
        await asyncio.to_thread(wait_until, lambda: serving.snapshot(5.0)[0].waiting == 1)
        assert not engine.requests
        await serving.resume()
        assert (await answer).status_code == 200


class Plain(Dialect):
    """An API whose requests and answers are plain text."""

    def to_chat(self, body):
        return chat(body["text"])

    def from_chat(self, body, completion):
        return {"said": completion["choices"][0]["message"]["content"]}

    def error(self, message, status, code):
        return {"oops": message}


async def test_settings_reach_the_server():
    settings = {"dialects": {"/v1/plain": Plain()}, "max_body": 500, "call_timeout": 0.3}
    async with await opened(EchoEngine(delay=0.01), **settings) as serving:
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.post(f"{url}/plain", json={"text": "hi"})).json() == {"said": "hi"}
        assert (await post(url, "x" * 600)).status_code == 413
        late = await post(url, "x" * 300)
        assert late.status_code == 504 and "within 0.3 seconds (call_timeout)" in late.text


async def test_the_serving_thread_is_a_daemon():
    async with await opened(EchoEngine()):
        assert [it.daemon for it in threading.enumerate() if it.name == "art-capture"] == [True]


async def test_commands_after_stop_are_refused():
    serving = await opened(EchoEngine())
    await serving.stop()
    for command, ask in {"flush": serving.flush, "pause": serving.pause, "resume": serving.resume}.items():
        with pytest.raises(CaptureError, match=f"cannot {command}: this server was stopped; start a new one"):
            await ask()


@pytest.mark.system
def test_a_command_during_stop_completes_is_cancelled_or_is_refused():
    for _ in range(25):
        serving, asked = ServingThread(), []
        serving.start(EchoEngine, ListRecorder).result(10)
        serving.stop()
        with pytest.raises(CaptureError, match="the serving thread has ended"):
            while True:
                asked.append(serving.request("flush"))
                time.sleep(0.0002)
        assert not concurrent.futures.wait(asked, 10).not_done
        assert all(it.cancelled() or it.exception() is None for it in asked)


def test_start_returns_the_address_once_the_server_listens(monkeypatch):
    startup = uvicorn.Server.startup

    async def late(server, sockets=None):
        await asyncio.sleep(0.2)
        await startup(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", late)
    serving = ServingThread()
    serving.start(EchoEngine, ListRecorder).result(10)
    assert serving._server.started
    serving.stop().result(10)


def test_a_command_to_a_failed_thread_has_its_error_as_the_cause():
    serving = ServingThread()
    serving.start(NeverEndsWell, ListRecorder).result(10)
    ended = serving.stop().exception(10)
    assert str(ended) == "out of cheese while ending"
    with pytest.raises(CaptureError, match="the serving thread has ended") as refusal:
        serving.request("flush")
    assert refusal.value.__cause__ is ended


async def test_stop_aborts_calls_stops_the_engine_and_closes_the_recorder():
    engine, recorder = EchoEngine(delay=0.02), ListRecorder()
    serving = await opened(engine, recorder)
    url = await serving.open("r1")
    answer = asyncio.create_task(post(url, "x" * 500))
    await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
    await serving.stop()
    assert [call.finish_reason for call in recorder.of("r1")] == ["aborted"]
    assert engine.stopped.is_set() and recorder.closed
    assert (await answer).status_code == 503


async def test_stop_raises_the_engines_error():
    class Breaks(EchoEngine):
        async def stop(self):
            raise RuntimeError("out of cheese")

    recorder = ListRecorder()
    serving = await opened(Breaks(), recorder)
    with pytest.raises(RuntimeError, match="out of cheese"):
        await serving.stop()
    assert recorder.closed
    with pytest.raises(RuntimeError, match="out of cheese"):
        await serving.stop()


async def test_the_default_port_is_a_free_one():
    async with await opened(EchoEngine()) as one, await opened(EchoEngine()) as other:
        assert one.address != other.address


async def test_a_rollout_id_may_contain_a_slash():
    recorder = ListRecorder()
    async with await opened(EchoEngine(), recorder) as serving:
        assert (await post(await serving.open("evaluation/1"))).status_code == 200
    assert len(recorder.of("evaluation/1")) == 1


async def test_live_weights_reach_an_engine_in_this_process_unchanged():
    engine, live = EchoEngine(), {"weight": object()}
    async with await opened(engine) as serving:
        await serving.swap(Weights(version=1, path=None, live=live))
    assert engine.live is live


async def test_a_recorder_that_fails_to_open_fails_the_start_and_frees_the_port():
    def broken():
        raise ConfigError("no such folder")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match="no such folder"):
        await ServingProxy.start(EchoEngine, broken, process=False, port=port)
    async with await opened(EchoEngine(), port=port) as serving:
        assert serving.address == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("process", [pytest.param(True, marks=pytest.mark.system), False])
async def test_a_setting_that_does_not_exist_fails_the_start(process):
    with pytest.raises(TypeError, match="max_bodies"):
        await ServingProxy.start(EchoEngine, ListRecorder, process=process, max_bodies=1)


async def test_a_stamped_answer_has_the_stamps_version():
    engine = EchoEngine()
    engine.version = 7
    stamped = FixedVersion(engine, 3)
    await stamped.start()
    answer = await stamped.chat(chat("hi"))
    assert answer["policy_version"] == 3 and answer["choices"] == (await engine.chat(chat("hi")))["choices"]
    stamped.policy_version = 4
    chunks = [chunk async for chunk in stamped.stream(chat("hi"))]
    assert [chunk["policy_version"] for chunk in chunks] == [4, 4, 4]
    assert [chunk["choices"] for chunk in chunks] == [chunk["choices"] async for chunk in engine.stream(chat("hi"))]
    await stamped.stop()
    assert engine.stopped.is_set() and engine.requests[0] == chat("hi")


async def test_closing_a_stamped_stream_closes_the_engines():
    engine = EchoEngine(delay=0.01)
    stream = FixedVersion(engine, 3).stream(chat("x" * 100))
    await anext(stream)
    assert engine.sampling == 1
    await stream.aclose()
    assert engine.sampling == 0
