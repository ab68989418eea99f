"""Orders at the door: what engines with and without an ability are asked, limits of time, what is told outside the loop."""

import asyncio
import concurrent.futures
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from capture_fakes import EchoEngine, ListRecorder, NeverEndsWell, chat, wait_until

from art_core.capture import Stamped
from art_core.errors import CaptureError, ConfigError
from art_core.serving import ServingProxy
from art_core.serving.service import ServingThread
from art_core.types import Call, Sampling, Weights


class AbleEngine(EchoEngine):
    """Has every ability, and says in which order it was asked for what."""

    def __init__(self, *, overlaps=True, keeps_start=True):
        super().__init__()
        self.said, self._overlaps, self._keeps_start = [], overlaps, keeps_start

    def begin(self, run_dir):
        self.said.append(("begin", run_dir))

    async def start(self):
        self.said.append("start")

    async def stop(self):
        self.said.append("stop")
        await super().stop()

    async def score(self, ids):
        return [-float(token) for token in ids[1:]]

    async def counters(self):
        return {"sampled_tokens": 3.0}

    async def rest(self):
        self.said.append("rest")

    async def wake(self):
        self.said.append("wake")

    def overlaps(self, weights):
        return self._overlaps and weights.version > self.version

    def keeps_start(self):
        return self._keeps_start

    def at(self, version):
        return Stamped(self, version)

    async def load(self, weights):
        self.said.append(f"load {weights.version}")
        self.version = weights.version

    async def retire(self, version):
        self.said.append(f"retire {version}")


class Stuck(EchoEngine):
    """Takes weights, and does not come back."""

    async def load(self, weights):
        await asyncio.sleep(60)


def opened(engine, recorder=None, **settings):
    recorder = recorder or ListRecorder()
    return ServingProxy.start(lambda: engine, lambda: recorder, process=False, **settings)


async def said(url, text="hello", **headers):
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{url}/chat/completions", json=chat(text), headers=headers)


def weights(version):
    return Weights(version=version, path=None)


async def test_an_engine_without_abilities_is_asked_for_none():
    engine = EchoEngine()
    async with await opened(engine) as door:
        assert await door.score([1, 2]) is None
        assert await door.counters() == {}
        await door.pause(rest=True)
        assert await door.swap(weights(1), [1, 2]) is None
    assert engine.version == 1


async def test_abilities_are_used_where_the_engine_has_them(tmp_path):
    engine = AbleEngine()
    async with await opened(engine, folder=tmp_path) as door:
        assert await door.score((5, 6, 7)) == [-6.0, -7.0]
        assert await door.counters() == {"sampled_tokens": 3.0}
        assert await door.swap(weights(1)) is None
        await door.pause(rest=True)
        assert await door.swap(weights(2), (5, 6)) == [-6.0]
        await door.pause(rest=True)
        await door.resume()
        await door.pause()
        await door.resume()
    loads = ["load 1", "retire 0", "rest", "wake", "load 2", "retire 1", "rest", "wake"]
    assert engine.said == [("begin", tmp_path), "start", *loads, "stop"]


async def test_without_a_folder_an_engine_keeps_no_files():
    engine = AbleEngine()
    async with await opened(engine):
        assert engine.said == ["start"]


async def test_versions_are_retired_when_the_last_rollout_that_began_with_them_is_closed():
    engine, recorder = AbleEngine(), ListRecorder()
    async with await opened(engine, recorder) as door:
        first = await door.open("first")
        await door.swap(weights(1))
        second = await door.open("second")
        newest = await door.open("newest", newest=True)
        assert engine.said == ["start", "load 1"]
        await door.swap(weights(2))
        for url in (first, second, newest):
            await said(url)
        assert [recorder.of(it)[0].policy_version for it in ("first", "second", "newest")] == [0, 1, 2]
        await door.close("second")
        assert engine.said[-1] == "retire 1"
        await door.close("first")
        assert engine.said[-1] == "retire 0"
        await door.close("newest")
        assert engine.said == ["start", "load 1", "load 2", "retire 1", "retire 0"]


async def test_weights_that_cannot_be_served_beside_others_wait_for_the_calls_in_flight():
    engine = AbleEngine(overlaps=False)
    engine.delay = 0.01
    async with await opened(engine) as door:
        url = await door.open("r1")
        answer = asyncio.create_task(said(url, "x" * 20))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        await door.swap(weights(1))
        assert not engine.sampling
        assert (await answer).status_code == 200


@pytest.mark.parametrize("kept", [True, False])
async def test_the_start_weights_are_a_second_engine_only_where_the_first_does_not_keep_them(kept, tmp_path):
    engine, second, recorder = AbleEngine(keeps_start=kept), AbleEngine(), ListRecorder()
    how = {"trained_nodes": ["planner"], "frozen": lambda: second, "frozen_start": True, "folder": tmp_path}
    async with await opened(engine, recorder, **how) as door:
        await door.swap(weights(4))
        url = await door.open("r1", Sampling(temperature=0.5))
        for node in ("planner", "writer"):
            assert (await said(url, **{"x-art-agent": node})).status_code == 200
    assert [(call.agent, call.policy_version) for call in recorder.of("r1")] == [("planner", 4), ("writer", 0)]
    assert [call.temperature for call in recorder.of("r1")] == [0.5, 1.0]
    assert second.said == ([] if kept else [("begin", tmp_path), "start", "stop"])


async def test_a_frozen_model_that_is_not_the_start_answers_itself():
    engine, other, recorder = AbleEngine(), EchoEngine(), ListRecorder()
    async with await opened(engine, recorder, trained_nodes=["planner"], frozen=lambda: other) as door:
        await said(await door.open("r1"), **{"x-art-agent": "writer"})
    assert len(other.requests) == 1 and not engine.requests


@pytest.mark.parametrize("kind", [EchoEngine, AbleEngine])
async def test_what_was_answered_before_is_answered_so_again_and_the_engine_is_not_asked(kind):
    engine, recorder = kind(), ListRecorder()
    async with await opened(engine, recorder) as door:
        await said(await door.open("before"))
        await door.close("before")
        [call] = recorder.of("before")
        assert isinstance(call, Call)
        await said(await door.open("after", answered=[call]))
        assert len(engine.requests) == 1
        await said(await door.open("other"))
        assert len(engine.requests) == 2


async def test_an_order_that_takes_too_long_is_told_with_the_setting_that_limits_it():
    async with await opened(Stuck(), timeout=1.0) as door:
        asked = asyncio.create_task(door.swap(weights(1)))
        await asyncio.sleep(0.05)
        [(order, since)] = door.pending.values()
        assert order == "swap" and 0 <= time.monotonic() - since < 5
        with pytest.raises(CaptureError, match=r"did not finish 'swap' within 1 seconds \(engine_timeout\)"):
            await asked
        assert not door.pending
        await door.flush()


async def test_a_start_that_takes_too_long_leaves_no_thread():
    class Slow(EchoEngine):
        async def start(self):
            await asyncio.sleep(60)

    before = set(threading.enumerate())
    with pytest.raises(CaptureError, match="did not finish 'start' within 0.1 seconds"):
        await opened(Slow(), timeout=0.1)
    wait_until(lambda: {it for it in threading.enumerate() if it.name == "art-capture"} <= before)


async def test_orders_wait_side_by_side_and_each_is_listed():
    async with await opened(Stuck()) as door:
        first, second = (asyncio.create_task(door.swap(weights(version))) for version in (1, 2))
        await asyncio.sleep(0.05)
        assert [order for order, _ in door.pending.values()] == ["swap", "swap"]
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert not door.pending


async def test_what_an_order_raises_for_lateness_of_its_own_is_passed_on():
    class Late(EchoEngine):
        async def load(self, weights):
            raise TimeoutError("the file server")

    async with await opened(Late(), timeout=60) as door:
        with pytest.raises(TimeoutError, match="the file server"):
            await door.swap(weights(1))


async def test_a_look_from_another_thread_says_what_the_calls_do():
    engine = AbleEngine()
    engine.delay = 0.02
    async with await opened(engine) as door:
        url = await door.open("r1")
        answer = asyncio.create_task(said(url, "x" * 10))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        calls, counters = await asyncio.to_thread(door.look, 5.0)
        assert counters == {"sampled_tokens": 3.0}
        ended, longest = calls.rollouts["r1"]
        assert ended == 0 and longest > 0 and calls.waiting == 0
        await answer
        assert door.stacks(0.1) == "", "the process that serves is this one"
    assert await asyncio.to_thread(door.look, 5.0) == (None, None), "it has ended"


async def test_a_look_does_not_wait_for_an_engine_that_hangs():
    class Hanging(AbleEngine):
        async def counters(self):
            await asyncio.sleep(60)

    async with await opened(Hanging()) as door:
        calls, counters = await asyncio.to_thread(door.look, 0.2)
        assert calls is not None and counters is None


async def test_a_rollout_that_is_closed_takes_no_more_calls_and_those_in_flight_get_its_grace():
    engine, recorder = EchoEngine(delay=0.02), ListRecorder()
    async with await opened(engine, recorder) as door:
        url, other = await door.open("r1"), await door.open("r2")
        answer = asyncio.create_task(said(url, "x" * 500))
        await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
        await door.close("r1", grace=0.1)
        assert [call.finish_reason for call in recorder.of("r1")] == ["aborted"]
        assert (await answer).status_code == 409
        assert (await said(url)).status_code == 404
        assert (await said(other)).status_code == 200


async def test_calls_in_flight_get_a_second_to_end_unless_the_rollout_says_otherwise():
    engine, recorder = EchoEngine(delay=0.01), ListRecorder()
    async with await opened(engine, recorder) as door:
        for calls, tokens in enumerate((10, 150), start=1):
            answer = asyncio.create_task(said(await door.open("r1"), "x" * tokens))
            await asyncio.to_thread(wait_until, lambda calls=calls: len(engine.requests) == calls)
            await door.close("r1")
            await answer
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop", "aborted"]


async def test_a_pause_holds_new_calls_until_it_is_over():
    engine = EchoEngine()
    async with await opened(engine) as door:
        url = await door.open("r1")
        await door.pause()
        answer = asyncio.create_task(said(url))
        await asyncio.to_thread(wait_until, lambda: door.look(5.0)[0].waiting == 1)
        assert not engine.requests
        await door.resume()
        assert (await answer).status_code == 200


class Plain:
    """An API that is a text each way."""

    def prepare(self):
        pass

    def to_chat(self, body):
        return chat(body["text"])

    def from_chat(self, body, completion):
        return {"said": completion["choices"][0]["message"]["content"]}

    def error(self, message, status, code):
        return {"oops": message}


async def test_what_the_door_is_started_with_reaches_what_serves():
    how = {"dialects": {"/v1/plain": Plain()}, "max_body": 500, "call_timeout": 0.3}
    async with await opened(EchoEngine(delay=0.01), **how) as door:
        url = await door.open("r1")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{url}/plain", json={"text": "hi"})).json() == {"said": "hi"}
        assert (await said(url, "x" * 600)).status_code == 413
        late = await said(url, "x" * 300)
        assert late.status_code == 504 and "within 0.3 seconds (call_timeout)" in late.text


async def test_a_thread_serves_that_keeps_no_process_alive():
    async with await opened(EchoEngine()):
        assert [it.daemon for it in threading.enumerate() if it.name == "art-capture"] == [True]


async def test_a_door_that_was_stopped_says_so_for_every_order():
    door = await opened(EchoEngine())
    await door.stop()
    for order, ask in {"flush": door.flush, "pause": door.pause, "resume": door.resume}.items():
        with pytest.raises(CaptureError, match=f"cannot {order}: this server was stopped; start a new one"):
            await ask()


@pytest.mark.system
def test_an_order_that_comes_while_the_thread_ends_is_answered_cancelled_or_refused():
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


def test_an_address_is_given_once_its_server_has_started(monkeypatch):
    startup = uvicorn.Server.startup

    async def late(server, sockets=None):
        await asyncio.sleep(0.2)
        await startup(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", late)
    serving = ServingThread()
    serving.start(EchoEngine, ListRecorder).result(10)
    assert serving._server.started
    serving.stop().result(10)


def test_an_order_to_a_thread_that_has_ended_with_an_error_names_it():
    serving = ServingThread()
    serving.start(NeverEndsWell, ListRecorder).result(10)
    ended = serving.stop().exception(10)
    assert str(ended) == "out of cheese while ending"
    with pytest.raises(CaptureError, match="the serving thread has ended") as refusal:
        serving.request("flush")
    assert refusal.value.__cause__ is ended


async def test_a_stop_ends_the_calls_and_then_the_engine_and_closes_the_recorder():
    engine, recorder = EchoEngine(delay=0.02), ListRecorder()
    door = await opened(engine, recorder)
    url = await door.open("r1")
    answer = asyncio.create_task(said(url, "x" * 500))
    await asyncio.to_thread(wait_until, lambda: engine.sampling == 1)
    await door.stop()
    assert [call.finish_reason for call in recorder.of("r1")] == ["aborted"]
    assert engine.stopped.is_set() and recorder.closed
    assert (await answer).status_code == 503


async def test_what_an_engine_raises_while_ending_is_raised_by_stop():
    class Breaks(EchoEngine):
        async def stop(self):
            raise RuntimeError("out of cheese")

    recorder = ListRecorder()
    door = await opened(Breaks(), recorder)
    with pytest.raises(RuntimeError, match="out of cheese"):
        await door.stop()
    assert recorder.closed
    with pytest.raises(RuntimeError, match="out of cheese"):
        await door.stop()


async def test_doors_that_name_no_port_each_take_a_free_one():
    async with await opened(EchoEngine()) as one, await opened(EchoEngine()) as other:
        assert one.address != other.address


async def test_a_rollout_may_be_named_with_a_slash():
    recorder = ListRecorder()
    async with await opened(EchoEngine(), recorder) as door:
        assert (await said(await door.open("evaluation/1"))).status_code == 200
    assert len(recorder.of("evaluation/1")) == 1


async def test_weights_in_shared_memory_reach_an_engine_in_this_process_as_they_are():
    engine, live = EchoEngine(), {"weight": object()}
    async with await opened(engine) as door:
        await door.swap(Weights(version=1, path=None, live=live))
    assert engine.live is live


async def test_a_recorder_that_cannot_be_made_fails_the_start_and_gives_the_port_back():
    def broken():
        raise ConfigError("no such folder")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match="no such folder"):
        await ServingProxy.start(EchoEngine, broken, process=False, port=port)
    async with await opened(EchoEngine(), port=port) as door:
        assert door.address == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("process", [pytest.param(True, marks=pytest.mark.system), False])
async def test_a_setting_that_does_not_exist_fails_the_start(process):
    with pytest.raises(TypeError, match="max_bodies"):
        await ServingProxy.start(EchoEngine, ListRecorder, process=process, max_bodies=1)


async def test_an_answer_says_the_version_that_it_is_stamped_with():
    engine = EchoEngine()
    engine.version = 7
    stamped = Stamped(engine, 3)
    await stamped.start()
    answer = await stamped.chat(chat("hi"))
    assert answer["policy_version"] == 3 and answer["choices"] == (await engine.chat(chat("hi")))["choices"]
    stamped.policy_version = 4
    chunks = [chunk async for chunk in stamped.stream(chat("hi"))]
    assert [chunk["policy_version"] for chunk in chunks] == [4, 4, 4]
    assert [chunk["choices"] for chunk in chunks] == [chunk["choices"] async for chunk in engine.stream(chat("hi"))]
    await stamped.stop()
    assert engine.stopped.is_set() and engine.requests[0] == chat("hi")


async def test_a_stamped_stream_that_nobody_reads_any_more_is_ended():
    engine = EchoEngine(delay=0.01)
    stream = Stamped(engine, 3).stream(chat("x" * 100))
    await anext(stream)
    assert engine.sampling == 1
    await stream.aclose()
    assert engine.sampling == 0
