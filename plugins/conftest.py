"""A stand-in for capture and for a provider: answers chat completions and remembers what it was asked.

Requests below ``/rollouts/{rollout_id}/v1`` are a rollout's; all others went to the agent's own provider.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from art_core.attribution import running
from art_core.types import RolloutAddress


@dataclass
class Asked:
    """One request as it arrived."""

    rollout_id: str | None
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Stub:
    """The server's address and memory."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    failures: int = 0
    """How many of the next requests are answered with 500."""

    def address(self, rollout_id: str, *, passthrough: tuple[str, ...] = ()) -> RolloutAddress:
        base_url = f"{self.url}/rollouts/{rollout_id}/v1"
        return RolloutAddress(rollout_id, base_url, f"key-{rollout_id}", "policy", frozenset(passthrough))

    @contextlib.contextmanager
    def rollout(self, rollout_id: str = "r", *, passthrough: tuple[str, ...] = ()) -> Iterator[RolloutAddress]:
        address = self.address(rollout_id, passthrough=passthrough)
        with running(address):
            yield address

    def of(self, rollout_id: str | None) -> list[Asked]:
        """Return the requests of a rollout; None: those that were the agent's own affair."""
        return [asked for asked in self.asked if asked.rollout_id == rollout_id]

    async def answer(self, request: Request) -> Response:
        rollout_id, path = request.path_params.get("rollout_id"), request.url.path
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.asked.append(Asked(rollout_id, path, dict(request.headers), body))
        if self.failures > 0:
            self.failures -= 1
            return JSONResponse({"error": {"message": "try again"}}, status_code=500, headers={"retry-after-ms": "1"})
        if not path.endswith("/chat/completions"):
            return JSONResponse(
                {"object": "list", "data": [], "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
            )
        completion = _completion(body, rollout_id or "outside")
        if not body.get("stream"):
            return JSONResponse(completion)
        return StreamingResponse(_chunks(completion), media_type="text/event-stream")


def _completion(body: dict[str, Any], who: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": f"answer of {who}"}
    reason = "stop"
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        function = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps({"city": who})}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        }
        reason = "tool_calls"
    elif body.get("response_format", {}).get("type") == "json_schema":
        message["content"] = json.dumps({"city": who})
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }


async def _chunks(completion: dict[str, Any]) -> Any:
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = completion["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{"content": word} for word in (message["content"] or "").split(" ") if word]
    deltas += [{"tool_calls": [{"index": 0, **call}]} for call in message.get("tool_calls", ())]
    for delta in deltas:
        yield f"data: {json.dumps(head | {'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n"
        await asyncio.sleep(0)
    last = {"index": 0, "delta": {}, "finish_reason": completion["choices"][0]["finish_reason"]}
    yield f"data: {json.dumps(head | {'choices': [last]})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture(scope="session")
def _server() -> Iterator[Stub]:
    stub = Stub()
    methods = ["GET", "POST"]
    routes = [
        Route("/rollouts/{rollout_id}/v1/{rest:path}", stub.answer, methods=methods),
        Route("/{rest:path}", stub.answer, methods=methods),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    sock.listen()  # so that nothing is refused before the thread has begun
    stub.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield stub
    server.should_exit = True
    thread.join(10)
    sock.close()


@pytest.fixture
def stub(_server: Stub) -> Stub:
    """A fresh memory for every test."""
    _server.asked.clear()
    _server.failures = 0
    return _server
