"""A server's answers, whole and streamed, in any packets -> recorded calls (``capture.upstream``, ``.record``, ``.server``)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

from art_core.capture import HttpUpstream
from art_core.store.digest import call_digest
from art_core.store.values import to_json
from art_core.types import Call
from art_gateway import dialects
from fuzz.choices import Choices, changed, spelled, written
from fuzz.serving import Reply, ask, check_error, run

URL = "http://127.0.0.1:1/v1"
HEAD = {"id": "c", "created": 1, "model": "m", "object": "chat.completion.chunk"}


def _tokens(*ids: int) -> dict[str, Any]:
    return {"token_ids": list(ids), "logprobs": {"content": [{"token": "a", "logprob": -0.5} for _ in ids]}}


def _part(delta: dict[str, Any], *ids: int, end: str | None = None, index: int = 0) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": index, "delta": delta, "finish_reason": end, **_tokens(*ids)}]}


def _call(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]}


PROMPT = {"prompt_token_ids": [1, 2]}
STREAMS: tuple[list[Any], ...] = (
    [
        PROMPT | _part({"role": "assistant", "content": ""}), _part({"reasoning": "hm"}, 3), _part({"content": "a"},
        4),
        _part({"content": "b"}, 5, 6), _part({}, end="stop"), {**HEAD, "choices": [], "usage": {"prompt_tokens": 2}},
    ],
    [PROMPT | _part(_call(0, name="f", arguments="")), _part(_call(0, arguments='{"a"'), 3), _part(_call(0,
    arguments=": 1}"), 4),
     _part(_call(1, name="g", arguments="{}"), 5, end="tool_calls")],
    [PROMPT | _part({"content": "a"}, 3, end="length"), PROMPT | _part({"content": "b"}, 4, end="stop", index=1)],
    [PROMPT | _part({"content": "a"}, 3), {"error": {"message": "engine died", "code": 500}}],
    [{**HEAD, "choices": [{"index": 0, "text": "a", "prompt_token_ids": [1], "token_ids": [3],
    "finish_reason": "stop",
                           "logprobs": {"token_logprobs": [-0.5], "tokens": ["a"]}}]}],
)  # fmt: skip
WHOLE: tuple[dict[str, Any], ...] = (
    {**HEAD, **PROMPT, "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"},
    "finish_reason": "stop",
                                    **_tokens(3, 4)}]},
    {**HEAD, **PROMPT, "choices": [{"index": 0, "message": {"role": "assistant", "content": None, **_call(0,
    name="f", arguments="{}")},
                                    "finish_reason": "tool_calls", **_tokens(3)}]},
    {"error": {"message": "no", "code": "c"}}, {"message": "no", "code": 400}, {"detail": [{"msg": "no"}]},
)  # fmt: skip
ENDS = ("\n\n", "\r\n\r\n", "\n", "\n: ping\n\n", "\nid: 1\nevent: x\n\n")
PIECES = (
    "data: ",
    "data:",
    "\n\n",
    "\r\n",
    "[DONE]",
    json.dumps(STREAMS[0][0]),
    json.dumps(STREAMS[0][-2]),
    "{}",
    "é",
    "event: x\n",
    ":",
)
CHAT = "/v1/chat/completions"
SAYING = {"messages": [{"role": "user", "content": "a"}]}
REQUESTS = (
    (CHAT, SAYING),
    (CHAT, {**SAYING, "n": 2}),
    (CHAT, {"prompt": [1, 2]}),
    (CHAT, {**SAYING, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}),
    ("/v1/messages", {**SAYING, "max_tokens": 9}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1}),
)
DIALECTS = dialects()
STATUS = (200, 200, 200, 400, 404, 429, 500, 503)
HEADERS: tuple[dict[str, str], ...] = (
    {}, {"retry-after": "3"}, {"retry-after": "nan"}, {"retry-after": "1e400"},
    {"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"},
    {"retry-after": "soon"}, {"retry-after": "Wed, 99 Oct 2099"},
)  # fmt: skip

SEEDS = [
    *(bytes([1, 0, kind, request, 0, 0]) for kind, request in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 2))),
    *(bytes([1, 1, kind, request, 0, 0, 0]) for kind, request in ((0, 4), (1, 4), (0, 5), (1, 5), (4, 6))),
    *(bytes([0, 1, kind, request, 0, 0, 0]) for kind, request in ((1, 4), (1, 5), (0, 6))),
    *(bytes([0, 0, kind, 0, 0, 0]) for kind in range(len(WHOLE))),
    bytes([2, 0, 0, 0, 3, 9, 5]) + bytes([128, 133, 130, 128, 134, 130, 128, 132, 130]),
    bytes([1, 4, 0, 0, 0, 3, 20, 40, 90]),
]


def one_input(data: bytes) -> None:
    choices = Choices(data)
    streamed = bool(mode := choices.byte() % 3)
    status, headers = (200, {}) if choices.byte() % 4 else (choices.pick(STATUS), choices.pick(HEADERS))
    if mode == 2:
        path, request = choices.pick(REQUESTS)
        cuts = [choices.byte() for _ in range(choices.byte() % 8)]
        content = spelled(choices.rest(), PIECES).encode(errors="surrogatepass")
    else:
        told = choices.pick(STREAMS) if streamed else choices.pick(WHOLE)
        (path, request), end = choices.pick(REQUESTS), choices.pick(ENDS)
        cuts = [choices.byte() * 5 for _ in range(choices.byte() % 8)]
        content = _framed(changed(told, choices), end) if streamed else written(changed(told, choices))
    body = json.dumps({**request, "stream": streamed}).encode()
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(content)}), len(content)]
    ways = [[content], [content[a:b] for a, b in pairwise(edges)]]
    if streamed and len(content) < 1500:
        ways.append([content[place : place + 1] for place in range(len(content))])
    first, *others = [run(ask(_Server(status, headers, pieces), path, body, dialects=DIALECTS)) for pieces in ways]
    for other in others:
        assert _plain(other) == _plain(first), "packets are nothing"
    for call in first.calls:
        _check_call(call)
    if path == CHAT:
        _check(first, streamed)
    else:
        assert not any(name.encode() in first.body for name in BUGS), first.body
        assert first.calls or first.status != 200 or first.stream


def _framed(chunks: Any, end: str) -> bytes:
    """Return server-sent events, the end mark after them."""
    events = [written(chunk) for chunk in chunks] if isinstance(chunks, list) else [written(chunks)]
    return b"".join(b"data: " + event + end.encode() for event in [*events, b"[DONE]"])


class _Server(HttpUpstream):
    """A server whose answer comes in these packets."""

    def __init__(self, status: int, headers: dict[str, str], pieces: Sequence[bytes]) -> None:
        super().__init__(URL)
        self.status, self.headers, self._pieces = status, headers, pieces
        self.content = self

    def _pool(self) -> Any:
        return self

    @asynccontextmanager
    async def request(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield self

    async def read(self) -> bytes:
        return b"".join(self._pieces)

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def _plain(reply: Reply) -> Any:
    calls = [repr({**vars(call), "request_id": ""}) for call in reply.calls]
    return reply.status, calls, OWN_IDS.sub(b"", reply.body)


def _check(reply: Reply, streamed: bool) -> None:
    if not reply.stream:
        told = json.loads(reply.body)
        if reply.status != 200:
            check_error(told)
            assert not told["error"]["message"].startswith(BUGS), told
            return
        shown = {choice.get("index", 0): choice["message"] for choice in told["choices"]}
        _check_calls(reply, shown)
        return
    events = reply.events()
    failed = bool(events) and "error" in events[-1]
    if failed:
        check_error(events[-1])
        assert not events[-1]["error"]["message"].startswith(BUGS), events[-1]
    assert failed or not streamed or reply.body.endswith(b"data: [DONE]\n\n")
    shown: dict[int, dict[Any, Any]] = {}
    for event in events[: len(events) - failed]:
        for choice in event["choices"]:
            if choice.get("delta"):
                _add(shown.setdefault(choice.get("index", 0), {}), choice["delta"])
    _check_calls(reply, shown, failed=failed)


OWN_IDS = re.compile(rb"[0-9a-f]{32}|\"created_at\":[0-9]+")
BUGS = ("TypeError:", "AttributeError:", "ValueError:", "KeyError:", "IndexError:", "RecursionError:",
"OverflowError:", "Unicode",
        "MemoryError", "AssertionError", "JSONDecodeError", "JSONEncodeError")  # fmt: skip
"""How the answer begins that a bug of ours is turned into."""


ARGUMENTS = object()
"""The key, which no JSON has, of the parts of arguments that deltas brought, by the index of their call."""


def _add(message: dict[Any, Any], delta: dict[str, Any]) -> None:
    """Put a delta's texts together as a client does."""
    for name in ("content", "reasoning_content"):
        if isinstance(delta.get(name), str):
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls") or ():
        message.setdefault(ARGUMENTS, {}).setdefault(call.get("index"), []).append(
            (call.get("function") or {}).get("arguments")
        )


def _check_calls(reply: Reply, shown: dict[int, dict[Any, Any]], *, failed: bool = False) -> None:
    assert failed or reply.calls, "what is answered is recorded"
    assert len({call.choice for call in reply.calls}) == len(reply.calls)
    for call in reply.calls:
        assert not failed or call.finish_reason == "aborted", "what the client did not get is not trained"
        said = shown.get(call.choice, {})
        for name in ("content", "reasoning_content"):
            if isinstance(said.get(name), str) and not failed:
                assert (call.response.get(name) or "") == said[name], "recorded is what was shown"
        told = said.get(ARGUMENTS, {})  # where a call has no index, who reads has to guess
        for index, parts in told.items() if not failed and None not in told else ():
            if all(isinstance(part, str | None) for part in parts):
                assert call.response["tool_calls"][index]["function"]["arguments"] == "".join(
                    part or "" for part in parts
                )


def _check_call(call: Call) -> None:
    """Hold a call to what the store and the learner need of it."""
    assert len(call.sampled_ids) == len(call.logprobs) and call.prompt_ids
    assert all(type(it) is int for it in (*call.prompt_ids, *call.sampled_ids)) and all(
        map(math.isfinite, call.logprobs)
    )
    assert all(0 <= place < len(call.sampled_ids) for place in call.forced)
    assert call_digest(call) and to_json(call.response)
