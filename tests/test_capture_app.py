"""CaptureApp without a socket: whose calls it answers, with which sampling, and what is recorded."""

import json
import logging
from concurrent.futures import Future

import pytest
from asgi import Asked, answered, asked_of, said
from capture_fakes import EchoEngine, ListRecorder, chat

from art_core.capture import CaptureApp, Dialect
from art_core.errors import UpstreamError
from art_core.types import Sampling

AS_ASKED = Sampling()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/v1/models"])
async def test_the_policy_is_the_only_model(path):
    app = CaptureApp(EchoEngine(), ListRecorder(), model="tiny")
    app.open("r1", AS_ASKED)
    asked = await answered(app, Asked(path=f"/rollouts/r1{path}", method="GET"))
    assert asked.status == 200
    model = {"id": "tiny", "object": "model", "created": 0, "owned_by": "art"}
    assert asked.json == {"object": "list", "data": [model]}
    app = CaptureApp(EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, Asked(path=f"/rollouts/r1{path}", method="GET"))
    assert asked.json["data"][0]["id"] == "policy"
    named = await answered(CaptureApp(EchoEngine(), ListRecorder()), Asked(path="/rollouts/r1/v1/models", method="GET"))
    assert (named.status, named.error["code"]) == (404, "rollout_not_open")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/rollouts/r1/v1/models"),
        ("GET", "/rollouts/r1/v1/chat/completions"),
        ("POST", "/rollouts/r1/v1/embeddings"),
        ("POST", "/r1/v1/chat/completions"),
        ("POST", "/rollouts/r1/chat/completions"),
    ],
)
async def test_an_unknown_path_is_refused_with_all_known_ones(method, path):
    app = CaptureApp(EchoEngine(), ListRecorder(), dialects={"/v1/other": Shouting()})
    app.open("r1", AS_ASKED)
    asked = await answered(app, Asked(path=path, method=method))
    assert (asked.status, asked.error["code"]) == (404, "unknown_path")
    there_are = "/rollouts/{rollout_id}/v1/chat/completions, POST /rollouts/{rollout_id}/v1/other, GET /rollouts/"
    assert there_are in asked.error["message"]


async def test_a_client_that_adds_v1_to_its_address_reaches_the_same_rollout():
    app = CaptureApp(EchoEngine(), recorder := ListRecorder())
    app.open("a/b", AS_ASKED)
    asked = await answered(app, asked_of("a/b", chat("hi"), "/v1/v1/chat/completions"))
    assert (asked.status, [rollout for rollout, _ in recorder.calls]) == (200, ["a/b"])


async def test_a_disconnect_before_the_body_is_not_an_error():
    app = CaptureApp(engine := EchoEngine(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = Asked([], "/rollouts/r1/v1/chat/completions")
    asked.leave.set()
    await answered(app, asked)
    assert (asked.sent, engine.requests, recorder.calls) == ([], [], [])


@pytest.mark.parametrize(
    ("body", "why", "code"),
    [
        (b"{", "is not JSON", "invalid_json"),
        (b"[]", "is a list, not a JSON object", "invalid_json"),
        (b'{"messages": %s%s}' % (b"[" * 254, b"]" * 254), "nested deeper than 254 levels", "invalid_json"),
        ({}, "'messages' must be a list", None),
        ({"messages": []}, "'messages' must be a list", None),
        ({"messages": {}}, "'messages' must be a list", None),
        ({"messages": [{}, "x"]}, "'messages' must be a list", None),
        ({"messages": "x", "prompt": "x"}, "'messages' must be a list", None),
        ({"messages": [{}], "temperature": "hot"}, "'temperature' must be a number, not 'hot'", None),
        ({"prompt": ""}, "'prompt' must be", None),
        ({"prompt": []}, "'prompt' must be", None),
        ({"prompt": [1, True]}, "'prompt' must be", None),
        ({"prompt": ["x"]}, "'prompt' must be", None),
        ({"prompt": {"x": 1}}, "'prompt' must be", None),
    ],
)
async def test_a_malformed_request_is_refused_with_the_reason(body, why, code):
    app = CaptureApp(engine := EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", body))
    assert (asked.status, asked.error["code"], asked.told["x-should-retry"]) == (400, code, "false")
    assert why in asked.error["message"] and engine.requests == []


@pytest.mark.parametrize("prompt", ["text", [1, 2]])
async def test_a_raw_prompt_is_passed_on_unchanged(prompt):
    class Raw(EchoEngine):
        async def chat(self, request):
            return await super().chat(chat(json.dumps(request["prompt"])))

    app = CaptureApp(Raw(), ListRecorder())
    app.open("r1", AS_ASKED)
    assert said(await answered(app, asked_of("r1", {"prompt": prompt}))) == json.dumps(prompt)


async def test_a_body_beyond_the_limit_is_refused():
    app = CaptureApp(EchoEngine(), ListRecorder(), max_body=100)
    app.open("r1", AS_ASKED)
    assert (await answered(app, asked_of("r1", chat("hi")))).status == 200
    assert (await answered(app, asked_of("r1", chat("x" * 100)))).status == 413


async def test_the_agents_headers_may_be_percent_encoded():
    app = CaptureApp(EchoEngine(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    named = {"x_art_agent": "a%20b", "x_art_thread": "t%C3%A4", "x_art_request_id": "q"}
    assert (await answered(app, asked_of("r1", chat("hi"), **named))).json["id"] == "chatcmpl-q"
    await answered(app, asked_of("r1", chat("hi"), x_art_agent=""))
    await answered(app, asked_of("r1", chat("hi")))
    assert [(call.agent, call.thread) for call in recorder.of("r1")] == [("a b", "tä"), (None, None), (None, None)]
    first, second, third = [call.request_id for call in recorder.of("r1")]
    assert first == "q" and len({second, third}) == 2 and all((second, third))


@pytest.mark.parametrize(
    ("sampling", "asks", "sampled"),
    [
        (Sampling(), {"temperature": 0.3, "seed": 7}, {"temperature": 0.3, "seed": 7}),
        (Sampling(temperature=1.0), {"temperature": 0.3, "seed": 7}, {"temperature": 1.0}),
        (Sampling(temperature=0.0), {"seed": 7}, {"temperature": 0.0, "seed": 7}),
        (Sampling(top_p=1.0, top_k=-1), {"top_p": 0.5, "seed": 7}, {"top_p": 1.0, "top_k": -1, "seed": 7}),
        (Sampling(), {"temperature": 1e-6}, {"temperature": 0}),
        (Sampling(), {"temperature": 1e-5}, {"temperature": 1e-5}),
        (Sampling(temperature=1e-6), {"seed": 7}, {"temperature": 0}),
        (Sampling(), {"temperature": None, "top_p": None}, {"temperature": None, "top_p": None}),
    ],
    ids=str,
)
async def test_the_rollouts_sampling_overrides_the_agents(sampling, asks, sampled):
    app = CaptureApp(engine := EchoEngine(), ListRecorder())
    app.open("r1", sampling)
    await answered(app, asked_of("r1", chat("hi", **asks)))
    assert engine.requests == [chat("hi", **sampled)]


async def test_overridden_settings_are_logged_once(caplog):
    app = CaptureApp(EchoEngine(), ListRecorder())
    app.open("r1", Sampling(temperature=1.0, top_p=1.0, top_k=-1))
    for asks in ({"temperature": 1.0, "top_k": None}, {"temperature": 0.5, "top_p": 0.9, "seed": 7}, {"top_k": 4}):
        await answered(app, asked_of("r1", chat("hi", **asks)))
    [record] = caplog.records
    assert (record.name, record.levelno) == ("art_core.capture", logging.WARNING)
    expected = "requests temperature=0.5, top_p=0.9, seed=7 but samples with temperature=1.0, top_p=1.0, seed=None:"
    assert expected in record.getMessage()


async def test_a_penalty_that_is_off_is_not_said_to_be_overridden_by_the_temperature(caplog):
    app = CaptureApp(EchoEngine(), ListRecorder())
    app.open("r1", Sampling.plain(1.0))
    await answered(app, asked_of("r1", chat("hi", frequency_penalty=0.5)))
    [message] = caplog.messages
    assert "requests frequency_penalty=0.5 but samples with frequency_penalty=0.0: training" in message
    assert "turns the agent's other sampling settings off" in message and "overrides" not in message


async def test_untrained_nodes_get_the_frozen_model_and_their_own_sampling():
    trained, frozen, own = EchoEngine(), EchoEngine(), EchoEngine()
    app = CaptureApp(trained, ListRecorder(), trained_nodes=["planner"], frozen=frozen)
    app.open("r1", Sampling(temperature=1.0))
    app.open("r2", Sampling(temperature=1.0), own)
    for rollout in ("r1", "r2"):
        await answered(app, asked_of(rollout, chat("t", temperature=0.5), x_art_agent="team/planner"))
        await answered(app, asked_of(rollout, chat("f", temperature=0.5), x_art_agent="team"))
        await answered(app, asked_of(rollout, chat("n", temperature=0.5)))
    assert trained.requests == own.requests == [chat("t", temperature=1.0)]
    assert frozen.requests == [chat("f", temperature=0.5), chat("n", temperature=0.5)] * 2


async def test_without_a_frozen_model_untrained_nodes_get_the_policy_and_their_own_sampling():
    app = CaptureApp(engine := EchoEngine(), ListRecorder(), trained_nodes=["planner"])
    app.open("r1", Sampling(temperature=1.0))
    await answered(app, asked_of("r1", chat("f", temperature=0.5), x_art_agent="team"))
    assert engine.requests == [chat("f", temperature=0.5)]


async def test_untrained_nodes_are_sampled_without_penalties_in_training_and_with_them_in_an_evaluation():
    app = CaptureApp(engine := EchoEngine(), ListRecorder(), trained_nodes=["planner"])
    app.open("training", Sampling.plain(1.0))
    app.open("evaluation", Sampling())
    own = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.4, "seed": 3}
    for rollout in ("training", "evaluation"):
        await answered(app, asked_of(rollout, chat("f", **own), x_art_agent="team"))
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert engine.requests == [chat("f", **own | neutral), chat("f", **own)]


class Shouting(Dialect):
    """Another API: says ``text`` in capitals, and errors in words."""

    media_type = "text/plain"

    def to_chat(self, body):
        return chat(body["text"], stream=body.get("stream", False), model=body.get("model"))

    def from_chat(self, body, completion):
        return {"asked": body["text"], "said": completion["choices"][0]["message"]["content"].upper()}

    async def stream_from_chat(self, body, chunks):
        async for chunk in chunks:
            yield body["text"] + ":" + chunk["choices"][0]["delta"].get("content", "").upper() + "\n"

    def error(self, message, status, code):
        return {"oops": message}


async def test_a_dialect_translates_requests_answers_and_streams():
    app = CaptureApp(engine := EchoEngine(), recorder := ListRecorder(), dialects={"/{model}:shout": Shouting()})
    app.open("r1", AS_ASKED)
    whole = await answered(app, asked_of("r1", {"text": "ab"}, "/v1beta/loud:shout"))
    assert whole.json == {"asked": "ab", "said": "AB"}
    assert engine.requests[0]["model"] == "loud"
    streamed = await answered(app, asked_of("r1", {"text": "ab", "stream": True}, "/loud:shout"))
    assert streamed.text == "ab:A\nab:B\nab:\n"
    assert streamed.told["content-type"] == "text/plain"
    assert len(recorder.calls) == 2


async def test_a_dialect_that_counts_tokens_samples_one_and_records_nothing():
    class Counting(Shouting):
        counts_tokens = True

    app = CaptureApp(engine := EchoEngine(), recorder := ListRecorder(), dialects={"/v1/count": Counting()})
    app.open("r1", AS_ASKED)
    counted = await answered(app, asked_of("r1", {"text": "a", "stream": True, "model": "m"}, "/v1/count"))
    assert (counted.status, counted.json["asked"]) == (200, "a")
    assert engine.requests == [chat("a", model="m", max_completion_tokens=1, n=1, stream=False)]
    assert recorder.calls == []


async def test_a_dialect_may_know_from_the_headers_who_is_calling():
    class Signed(Shouting):
        def agent(self, headers):
            return headers.get("x-signed")

    app = CaptureApp(EchoEngine(), recorder := ListRecorder(), dialects={"/v1/shout": Signed()})
    app.open("r1", AS_ASKED)
    await answered(app, asked_of("r1", {"text": "a"}, "/v1/shout", x_signed="writer"))
    await answered(app, asked_of("r1", {"text": "a"}, "/v1/shout", x_signed="writer", x_art_agent="team"))
    assert [call.agent for call in recorder.of("r1")] == ["writer", "team"]


async def test_a_request_is_given_no_model_that_neither_its_body_nor_its_path_names():
    app = CaptureApp(engine := EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED)
    body = {"messages": chat("hi")["messages"]}
    await answered(app, asked_of("r1", body))
    assert engine.requests == [body]


async def test_a_dialect_formats_the_servers_own_errors():
    app = CaptureApp(EchoEngine(), ListRecorder(), dialects={"/v1/shout": Shouting()})
    asked = await answered(app, asked_of("r1", {"text": "a"}, "/v1/shout"))
    assert asked.status == 404 and "'r1' is not open" in asked.json["oops"]


async def test_an_answer_that_a_dialect_cannot_translate_is_not_recorded_as_answered():
    class Silent(Shouting):
        def from_chat(self, body, completion):
            raise ValueError("no words")

    app = CaptureApp(EchoEngine(), recorder := ListRecorder(), dialects={"/v1/shout": Silent()})
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", {"text": "a"}, "/v1/shout"))
    assert (asked.status, asked.json) == (500, {"oops": "ValueError: no words"})
    assert recorder.calls == []


async def test_an_answer_without_a_choice_is_an_error():
    class Mute(EchoEngine):
        async def chat(self, request):
            return {**await super().chat(request), "choices": []}

    app = CaptureApp(Mute(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("hi")))
    assert (asked.status, asked.error["code"], recorder.calls) == (502, "no_token_ids", [])
    assert "it has no message" in asked.error["message"]


async def test_a_stream_whose_chunks_come_in_time_is_not_cut_off():
    app = CaptureApp(EchoEngine(delay=0.02), recorder := ListRecorder(), call_timeout=60.0)
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("abc", stream=True)))
    assert asked.events[-1] == "[DONE]"
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop"]


async def test_a_stream_without_a_chunk_is_an_error():
    class Mute(EchoEngine):
        async def stream(self, request):
            for chunk in ():
                yield chunk

    app = CaptureApp(Mute(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("hi", stream=True)))
    assert (asked.status, asked.error["code"], recorder.calls) == (502, "no_token_ids", [])
    assert "its stream was empty" in asked.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_stored_is_recorded_as_aborted_in_case_it_can_be_later(stream):
    app = CaptureApp(EchoEngine(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    recorder.full = True
    asked = await answered(app, asked_of("r1", chat("hi", stream=stream)))
    assert "disk full" in asked.text and "[DONE]" not in asked.text
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop", "aborted"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_client_leaves_before_it_is_stored_is_recorded_as_aborted(stream):
    app = CaptureApp(EchoEngine(), recorder := ListRecorder())
    app.open("r1", AS_ASKED)
    asked = asked_of("r1", chat("hi", stream=stream))

    def saved():
        asked.leave.set()
        return Future()  # the disk takes longer than the client waits

    recorder.saved = saved
    await answered(app, asked)
    assert [call.finish_reason for call in recorder.of("r1")] == ["stop", "aborted"]
    assert len({call.request_id for call in recorder.of("r1")}) == 1, "the second replaces the first"


async def test_events_that_arrive_together_are_sent_together():
    app = CaptureApp(EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("abc", stream=True), x_art_request_id="q"))
    assert [event["choices"][0]["delta"] for event in asked.events[:-1]] == [
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert {event["id"] for event in asked.events[:-1]} == {"chatcmpl-q"}
    assert (asked.events[-1], len(asked.sent)) == ("[DONE]", 3)


async def test_an_answered_call_is_replayed():
    first = CaptureApp(EchoEngine(), recorder := ListRecorder())
    first.open("r1", AS_ASKED)
    await answered(first, asked_of("r1", chat("hi")))
    app = CaptureApp(engine := EchoEngine(), ListRecorder())
    app.open("r1", AS_ASKED, replayed=recorder.of("r1"))
    assert [said(await answered(app, asked_of("r1", chat("hi")))) for _ in range(2)] == ["hi", "hi"]
    assert len(engine.requests) == 1


async def test_an_upstreams_refusal_is_passed_on():
    class Refusing(EchoEngine):
        async def chat(self, request):
            raise UpstreamError("later", status=429, code="busy", retry_after=2.0)

    app = CaptureApp(Refusing(), ListRecorder())
    app.open("r1", AS_ASKED)
    asked = await answered(app, asked_of("r1", chat("hi")))
    assert (asked.status, asked.error["code"], asked.told["retry-after"]) == (429, "busy", "2")
