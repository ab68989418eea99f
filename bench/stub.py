"""A model server that answers at once with the same tool call and its token ids, in vLLM's form, streamed or not.

    python -m bench.stub --port 9000

It is the upstream of the gateways that ``bench/capture.py`` compares, so it does as little as possible.
"""

from __future__ import annotations

import argparse
import asyncio

import orjson

SAMPLED = 48
PROMPT = 600
PER_CHUNK = 4
VARIANTS = 64
"""Answers whose prompts differ in their first token, so that no two consecutive calls share a prefix."""
ARGUMENTS = '{"query": "invoice of March", "sender": "billing@acme.example", "limit": 5}'


def logprobs(first: int, count: int) -> dict:
    """Return the logprobs of sampled tokens in OpenAI's form."""
    return {
        "content": [{"token": f"t{i}", "logprob": -i / 100, "top_logprobs": []} for i in range(first, first + count)]
    }


def call(arguments: str, **more: object) -> dict:
    """Return a tool call, or a part of one."""
    return {"function": {"arguments": arguments, **more}}


def head(kind: str) -> dict:
    """Return the common fields of completions and chunks."""
    return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": "stub"}


def completion(variant: int) -> bytes:
    """Return a whole answer over HTTP."""
    whole = {"id": "call_1", "type": "function", **call(ARGUMENTS, name="search")}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "tool_calls": [whole]},
        "finish_reason": "tool_calls",
        "token_ids": list(range(1000, 1000 + SAMPLED)),
        "logprobs": logprobs(0, SAMPLED),
    }
    body = head("chat.completion") | {
        "prompt_token_ids": [variant, *range(1, PROMPT)],
        "choices": [choice],
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": SAMPLED, "total_tokens": PROMPT + SAMPLED},
    }
    return plain(orjson.dumps(body))


def plain(content: bytes) -> bytes:
    """Return an HTTP response."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


def stream(variant: int) -> bytes:
    """Return a streamed answer over HTTP, every event a chunk of its own."""
    parts = []
    for first in range(0, SAMPLED, PER_CHUNK):
        share = len(ARGUMENTS) * PER_CHUNK // SAMPLED + 1
        at = first // PER_CHUNK * share
        piece = {"index": 0, **call(ARGUMENTS[at : at + share])}
        extra = {}
        if not first:
            piece |= {"id": "call_1", "type": "function"}
            piece["function"]["name"] = "search"
            extra = {"prompt_token_ids": [variant, *range(1, PROMPT)]}
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "tool_calls": [piece]},
            "finish_reason": None,
            "token_ids": list(range(1000 + first, 1000 + first + PER_CHUNK)),
            "logprobs": logprobs(first, PER_CHUNK),
        }
        parts.append(head("chat.completion.chunk") | {"choices": [choice]} | extra)
    parts.append(
        head("chat.completion.chunk") | {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    )
    events = [b"data: " + orjson.dumps(part) + b"\n\n" for part in parts] + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n\r\n"
    )


class Stub(asyncio.Protocol):
    """One connection."""

    completions = tuple(completion(variant) for variant in range(VARIANTS))
    streams = tuple(stream(variant) for variant in range(VARIANTS))
    hold = 0.0
    """Seconds between the first event of a stream and the rest."""
    models = plain(orjson.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}))
    answered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, _, length = head.partition(b"content-length:")
            whole = end + 4 + int(length.partition(b"\r\n")[0] or 0)
            if len(self._received) < whole:
                return
            body, self._received = self._received[end + 4 : whole], self._received[whole:]
            answer = self._answer(head, body)
            if self.hold and (first := answer.find(b"data: ")) >= 0:
                cut = answer.index(b"\n\n", first) + 4  # the event and its chunk's end
                self._transport.write(answer[:cut])
                asyncio.get_running_loop().call_later(self.hold, self._transport.write, answer[cut:])
            else:
                self._transport.write(answer)

    def _answer(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"get"):
            return self.models
        Stub.answered += 1
        answers = self.streams if b'"stream":true' in body.replace(b" ", b"") else self.completions
        return answers[Stub.answered % VARIANTS]


async def serve(port: int) -> None:
    """Answer until the process ends."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hold", type=float, default=0.0, help="seconds for which a stream stays open")
    options = parser.parse_args()
    Stub.hold = options.hold
    asyncio.run(serve(options.port))
