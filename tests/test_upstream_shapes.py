"""The requests that HttpUpstream sends, byte by byte, and how it reads each shape of answer."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from art_core.capture import HttpUpstream
from art_core.errors import ConfigError, UpstreamError

ASKING = {"messages": [{"role": "user", "content": "hi"}]}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", "token_ids": [7]}
LOGPROBS = {"content": [{"token": "x", "logprob": -0.5}]}


class Server:
    """Answers every request with ``status`` and ``body``, in ``pieces`` where there are some, and keeps what it was sent."""

    def __init__(self, body: object = None, status: str = "200 OK", pieces: list[bytes] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.pieces = pieces or [content]
        self.status = status
        self.requests: list[tuple[str, dict[str, str], object]] = []

    async def serve(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
        sent = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((line, headers, json.loads(sent) if sent else None))
        writer.write(f"HTTP/1.1 {self.status}\r\nconnection: close\r\n\r\n".encode())
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()


@asynccontextmanager
async def asking(server: Server, path: str = "/v1", user: str = "", **options):
    serving = set()

    async def serve(reader, writer):
        serving.add(asyncio.current_task())
        try:
            await server.serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        upstream = HttpUpstream(f"http://{user}127.0.0.1:{port}{path}", **options)
        try:
            yield upstream
        finally:
            await upstream.stop()
            await asyncio.gather(*serving)


async def refused(server: Server, **options) -> UpstreamError:
    async with asking(server, **options) as upstream:
        with pytest.raises(UpstreamError) as refusal:
            await upstream.chat(ASKING)
    return refusal.value


async def test_a_request_is_the_agents_plus_the_request_for_tokens():
    server = Server({"choices": []})
    async with asking(server, "/v1/") as upstream:
        assert upstream.policy_version == 0
        await upstream.chat(ASKING | {"model": "mine", "logprobs": False, "n": 2})
        await upstream.stop()
        await upstream.chat(ASKING)
    (line, headers, first), (_, _, second) = server.requests
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert (headers["content-type"], headers["accept-encoding"]) == ("application/json", "identity")
    assert "authorization" not in headers
    assert first == ASKING | {"model": "mine", "n": 2, "return_token_ids": True, "logprobs": True}
    assert second == ASKING | {"return_token_ids": True, "logprobs": True}


async def test_the_upstreams_model_replaces_the_agents():
    server = Server({"choices": []})
    async with asking(server, model="served") as upstream:
        await upstream.chat(ASKING | {"model": "mine"})
    assert server.requests[0][2]["model"] == "served"


@pytest.mark.parametrize(
    ("user", "key", "sent"),
    [
        ("", "a-long-secret", "Bearer a-long-secret"),
        ("ada:a-long-secret@", None, "Basic " + base64.b64encode(b"ada:a-long-secret").decode()),
        ("ada@", None, "Basic " + base64.b64encode(b"ada:").decode()),
    ],
)
async def test_a_key_or_a_user_is_sent_but_never_shown(user, key, sent):
    server = Server(b"no: a-long-secret is wrong", "401 X")
    async with asking(server, user=user, api_key=key) as upstream:
        with pytest.raises(UpstreamError) as refusal:
            await upstream.chat(ASKING)
        assert upstream.base_url.startswith("http://127.0.0.1:")
    assert server.requests[0][1]["authorization"] == sent
    assert ("a-long-secret" in str(refusal.value)) == (user == "ada@")


def test_a_user_together_with_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1/v1 has a user in its address"):
        HttpUpstream("http://ada:pass@127.0.0.1:1/v1", api_key="secret")


@pytest.mark.parametrize(
    ("asked", "sent"), [({}, 1), ({"logprobs": None}, 1), ({"logprobs": 0}, 1), ({"logprobs": 5}, 5)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_requests_at_least_one_logprob(asked, sent, stream):
    raw = {"index": 0, "text": None, "token_ids": [7], "prompt_token_ids": [1], "finish_reason": "stop"}
    answer = {"choices": [raw | {"logprobs": {"token_logprobs": [-0.5]}}]}
    server = Server(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n" if stream else answer)
    request = {"prompt": "x", "stream": stream, **asked}
    async with asking(server) as upstream:
        answers = [each async for each in upstream.stream(request)] if stream else [await upstream.chat(request)]
    line, _, body = server.requests[0]
    assert (line, body["logprobs"]) == ("POST /v1/completions HTTP/1.1", sent)
    [choice] = answers[0]["choices"]
    assert choice["delta" if stream else "message"] == {"role": "assistant", "content": ""}
    assert (answers[0]["prompt_token_ids"], choice["token_logprobs"]) == ([1], [-0.5])
    assert choice["logprobs"] == ({"token_logprobs": [-0.5]} if asked.get("logprobs") else None)


@pytest.mark.parametrize(("asked", "shown"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, LOGPROBS)])
async def test_logprobs_are_always_read_but_only_shown_if_requested(asked, shown):
    async with asking(Server({"choices": [CHOICE | {"logprobs": LOGPROBS}]})) as upstream:
        upstream.policy_version = 3
        answer = await upstream.chat(ASKING | asked)
    assert answer == {"policy_version": 3, "choices": [CHOICE | {"token_logprobs": [-0.5], "logprobs": shown}]}


async def test_an_answer_without_logprobs_has_none():
    async with asking(Server({"choices": [CHOICE, CHOICE | {"logprobs": {"content": None}}]})) as upstream:
        answer = await upstream.chat(ASKING)
    assert [choice["token_logprobs"] for choice in answer["choices"]] == [[], []]


@pytest.mark.parametrize(
    ("status", "body", "text", "code"),
    [
        (404, {"error": {"message": "no model", "code": "model_not_found"}}, "no model", "model_not_found"),
        (404, {"error": {"message": "no model", "code": 404}}, "no model", None),
        (404, {"message": "no model", "code": 404}, "no model", None),
        (404, {"error": {"code": "x"}}, "{'code': 'x'}", "x"),
        (404, {"error": "no model"}, "no model", None),
        (404, [1], "[1]", None),
        (503, b"<html>", "<html>", None),
        (503, b"x" * 2400, "x" * 2000, None),
        (503, b"\xff", "\ufffd", None),
        (503, b"", "the upstream answered with status 503 and no body", None),
        (400, b"the maximum context length is 4", "the maximum context length is 4", "context_length_exceeded"),
        (500, b"the maximum context length is 4", "the maximum context length is 4", None),
        (400, {"error": {"message": "bad", "code": "worse"}}, "bad", "worse"),
    ],
)
async def test_a_refusal_is_read_in_every_shape(status, body, text, code):
    refusal = await refused(Server(body, f"{status} X"))
    assert (str(refusal), refusal.status, refusal.code, refusal.retry_after) == (text, status, code, None)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"hello", r"is not JSON \(.*\): b'hello'"),
        ([1], r"is a list, not a JSON object: b'\[1\]'"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", r"is nested deeper than 254 levels: b'{\"a\":\[\["),
        ({"choices": [3]}, "isn't a completion"),
        ({"choices": [{"logprobs": {"content": [{}]}}]}, r"isn't a completion \('logprob'\)"),
    ],
)
async def test_an_answer_that_is_not_a_completion_is_a_bad_gateway(body, why):
    refusal = await refused(Server(body))
    assert refusal.status == 502
    with pytest.raises(UpstreamError, match=why):
        raise refusal


async def test_redirects_are_not_followed():
    server = Server(b"", "302 Found\r\nlocation: /elsewhere")
    assert (await refused(server)).status == 502
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("hours", "expected"), [(1, pytest.approx(3600, abs=60)), (-1, 0.0), (None, None)], ids=["later", "past", "no zone"]
)
async def test_retry_after_may_be_a_date(hours, expected):
    when = datetime.now(UTC) + timedelta(hours=hours or 1)
    said = format_datetime(when if hours else when.replace(tzinfo=None))
    assert (await refused(Server(b"", f"429 X\r\nretry-after: {said}"))).retry_after == expected


async def test_other_requests_are_posted_or_got():
    server = Server({"data": []})
    async with asking(server, api_key="secret") as upstream:
        assert await upstream.models() == {"data": []}
        assert json.loads(await upstream.ask(f"{upstream.base_url}/score", {"a": 1})) == {"data": []}
        server.status = "418 X"
        with pytest.raises(UpstreamError) as refusal:
            await upstream.models()
    assert refusal.value.status == 418
    assert [(line, body) for line, _, body in server.requests[:2]] == [
        ("GET /v1/models HTTP/1.1", None),
        ("POST /v1/score HTTP/1.1", {"a": 1}),
    ]
    assert all(headers["authorization"] == "Bearer secret" for _, headers, _ in server.requests)


def event(index: int | None = 0, reason: str | None = None, line: bytes = b"\n\n") -> bytes:
    choice = {"index": index, "delta": {"content": "x"}, "finish_reason": reason}
    if index is None:
        del choice["index"]
    return b"data: " + json.dumps({"choices": [choice]}).encode() + line


@pytest.mark.parametrize(
    ("pieces", "chunks"),
    [
        ([b": hello\n\n", event(), event(reason="stop"), b"data: [DONE]\n\n", event()], 2),
        ([event()[:9], event()[9:] + event()[:-2], b"\n\n" + event(reason="stop")], 3),
        ([event(), event(reason="stop", line=b"")], 2),
        ([event(), b"data:" + event(reason="stop", line=b"")[6:]], 2),
        ([event(line=b"\r\n\r\n") + b"event: x\ndata:" + event(reason="stop")[6:]], 2),
        ([event(None), event(0), event(None, "stop")], 3),
    ],
    ids=["comments and an end", "cut anywhere", "no last line", "no blank", "other line ends", "no index"],
)
async def test_events_are_read_whatever_the_packets(pieces, chunks):
    async with asking(Server(pieces=pieces)) as upstream:
        answer = [chunk async for chunk in upstream.stream(ASKING)]
    assert [chunk["choices"][0]["delta"] for chunk in answer] == [{"content": "x"}] * chunks


@pytest.mark.parametrize(
    ("server", "status", "code", "why"),
    [
        (Server(b"full", "429 X\r\nretry-after: 3"), 429, None, "^full$"),
        (Server(b"bad", "400 X"), 400, None, "^bad$"),
        (Server(b'data: {"error": {"message": "died", "code": "oom"}}\n\n'), 502, "oom", "^died$"),
        (Server(event()), 502, "upstream_unreachable", "ended its stream in the middle"),
        (Server(event(reason="stop") + event(1)), 502, "upstream_unreachable", "ended its stream in the middle"),
        (Server(b""), 502, "upstream_unreachable", "ended its stream in the middle"),
        (Server(b"data: hello\n\n"), 502, None, "is not JSON"),
    ],
    ids=["refused", "bad", "died", "half", "half of the second choice", "empty", "no json"],
)
async def test_a_failing_stream_says_how(server, status, code, why):
    async with asking(server) as upstream:
        with pytest.raises(UpstreamError, match=why) as refusal:
            async for _ in upstream.stream(ASKING):
                pass
    assert (refusal.value.status, refusal.value.code) == (status, code)
    assert refusal.value.retry_after == (3.0 if status == 429 else None)


async def test_reasoning_is_renamed_if_there_is_any():
    said = CHOICE["message"]
    choices = [CHOICE | {"message": said | {"reasoning": "hm"}}, CHOICE | {"message": said | {"reasoning": None}}]
    async with asking(Server({"choices": choices})) as upstream:
        answer = await upstream.chat(ASKING)
    assert [choice["message"] for choice in answer["choices"]] == [said | {"reasoning_content": "hm"}, said]


async def test_reasoning_in_a_stream_is_renamed_too():
    choice = {"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": "stop"}
    async with asking(Server(b"data: " + json.dumps({"choices": [choice]}).encode())) as upstream:
        answers = [answer async for answer in upstream.stream(ASKING)]
    assert [answer["choices"][0]["delta"] for answer in answers] == [{"reasoning_content": "hm"}]


@pytest.mark.parametrize("ask", ["chat", "stream", "models"])
async def test_a_silent_server_times_out(ask):
    class Silent(Server):
        async def serve(self, reader, writer):
            await reader.read()
            writer.close()

    async with asking(Silent(), timeout=0.3) as upstream:
        with pytest.raises(UpstreamError, match="did not answer in time") as refusal:
            if ask == "stream":
                await anext(upstream.stream(ASKING))
            else:
                await (upstream.chat(ASKING) if ask == "chat" else upstream.models())
    assert (refusal.value.status, refusal.value.code) == (504, "upstream_timeout")


async def test_more_than_a_hundred_calls_run_at_once():
    class Together(Server):
        met = asyncio.Barrier(101)

        async def serve(self, reader, writer):
            await self.met.wait()
            await super().serve(reader, writer)

    async with asking(Together({"choices": []}), timeout=60.0) as upstream:
        await asyncio.gather(*(upstream.chat(ASKING) for _ in range(101)))
