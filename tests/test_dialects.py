"""Made-up dialects beside chat completions: their answers, errors and raw prompts."""

import time

import httpx
import pytest
from capture_fakes import EchoEngine, ListRecorder, chat

from art_core.capture import Dialect, Paths
from art_core.serving import ServingProxy


class ShoutDialect(Dialect):
    """A made-up API: ``{"say": text}`` -> ``{"loud": TEXT}``."""

    def to_chat(self, body):
        return chat(body["say"], stream=body.get("stream", False))

    def from_chat(self, body, completion):
        return {"loud": completion["choices"][0]["message"]["content"].upper()}

    async def stream_from_chat(self, body, chunks):
        async for chunk in chunks:
            yield f"event: loud\ndata: {(chunk['choices'][0]['delta'].get('content') or '').upper()}\n\n"


async def test_a_dialect_is_answered_beside_chat_completions_and_recorded_like_it():
    recorder = ListRecorder()
    dialects = {"/v1/shout": ShoutDialect()}
    async with await ServingProxy.start(EchoEngine, lambda: recorder, process=False, dialects=dialects) as serving:
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.post(f"{url}/shout", json={"say": "hi"})).json() == {"loud": "HI"}
            streamed = (await client.post(f"{url}/shout", json={"say": "yo", "stream": True})).text
            assert "/v1/shout" in (await client.post(f"{url}/nothing")).text
    assert streamed.startswith("event: loud\ndata: Y\n\nevent: loud\ndata: O\n\n")
    assert [bytes(call.sampled_ids) for call in recorder.of("r1")] == [b"hi", b"yo"]


class OopsDialect(ShoutDialect):
    """Has errors of its own."""

    def error(self, message, status, code):
        return {"oops": f"{status} {code}: {message}"}

    def error_event(self, message, status, code):
        return f"event: oops\ndata: {message}\n\n"


async def test_a_dialect_formats_errors():
    dialects = {"/v1/shout": OopsDialect()}
    async with await ServingProxy.start(
        lambda: EchoEngine(0.01), ListRecorder, process=False, dialects=dialects
    ) as serving:
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            refused = await client.post(f"{url}/shout", json={"say": "refuse 400 too_long"})
            assert (refused.status_code, refused.json()) == (400, {"oops": "400 too_long: refused with 400"})
            broken = await client.post(f"{url}/shout", json={"say": "ab!cd", "stream": True})
            await serving.close("r1")
            closed = await client.post(f"{url}/shout", json={"say": "hi"})
    assert broken.text.endswith("event: oops\ndata: broke while sampling\n\n")
    assert closed.status_code == 404
    assert "rollout_not_open" in closed.json()["oops"]


@pytest.mark.parametrize("prompt", ["", [], [1, "2"], [[1], [2]], 7, None, [True]])
async def test_a_raw_prompt_is_a_text_or_token_ids(prompt):
    class Raw(ShoutDialect):
        def to_chat(self, body):
            return body

    async with await ServingProxy.start(
        EchoEngine, ListRecorder, process=False, dialects={"/v1/raw": Raw()}
    ) as serving:
        url = await serving.open("r1")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            refused = await client.post(f"{url}/raw", json={"prompt": prompt})
    assert refused.status_code == 400
    assert "'prompt' must be a string or a list of token ids" in refused.json()["error"]["message"]


class Unspeakable(Dialect):
    """A dialect that cannot tell the client what was answered."""

    def to_chat(self, body):
        return body

    def from_chat(self, body, completion):
        raise ValueError("no words")


async def test_an_answer_that_a_dialect_cannot_translate_is_not_recorded():
    recorder = ListRecorder()
    dialects = {"/v1/unspeakable": Unspeakable()}
    async with (
        await ServingProxy.start(EchoEngine, lambda: recorder, process=False, dialects=dialects) as serving,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        url = await serving.open("r1")
        response = await client.post(f"{url}/unspeakable", json={"messages": [{"role": "user", "content": "hello"}]})
    assert (response.status_code, recorder.calls) == (500, [])


@pytest.mark.parametrize("part", ["/v1", "/models/", "/models/x", "/a"])
def test_a_path_of_many_parts_is_matched_at_once(part):
    paths = Paths(["/{any}/models/{model}:ask"])
    began = time.process_time()
    assert paths.split("/rollouts/r" + part * 15_000) is None
    assert time.process_time() - began < 2


def test_a_models_name_may_have_slashes_and_other_parts_may_not():
    paths = Paths(["/in/{place}/models/{model}:ask", "/models/{model}:ask"])
    assert paths.split("/rollouts/a/b/v1/v1beta1/in/x/models/y/z:ask") == (
        "a/b",
        "/in/{place}/models/{model}:ask",
        "y/z",
    )
    assert paths.split("/rollouts/a/v1/in/x/y/models/z:ask") == ("a/v1/in/x/y", "/models/{model}:ask", "z")
