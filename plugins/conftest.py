"""A stub for the capture server and for a provider: answers chat completions, completions and Responses, and records requests.

Requests below ``/rollouts/{rollout_id}/v1`` belong to a rollout; all others went to the agent's own provider.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from http_server import serving
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from art_core.plugin_api import inside_rollout
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
    """The server's address and the requests that it received."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    failures: int = 0
    """Number of next requests to answer with status 500."""

    def address(self, rollout_id: str, *, passthrough: tuple[str, ...] = ()) -> RolloutAddress:
        base_url = f"{self.url}/rollouts/{rollout_id}/v1"
        return RolloutAddress(rollout_id, base_url, f"key-{rollout_id}", "policy", frozenset(passthrough))

    @contextlib.contextmanager
    def rollout(self, rollout_id: str = "r", *, passthrough: tuple[str, ...] = ()) -> Iterator[RolloutAddress]:
        address = self.address(rollout_id, passthrough=passthrough)
        with inside_rollout(address):
            yield address

    def of(self, rollout_id: str | None) -> list[Asked]:
        """Return the requests of a rollout; None: those to the agent's own provider."""
        return [asked for asked in self.asked if asked.rollout_id == rollout_id]

    async def answer(self, request: Request) -> Response:
        rollout_id, path = request.path_params.get("rollout_id"), request.url.path
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.asked.append(Asked(rollout_id, path, dict(request.headers), body))
        if self.failures > 0:
            self.failures -= 1
            return JSONResponse({"error": {"message": "try again"}}, status_code=500, headers={"retry-after-ms": "1"})
        for ending, whole, pieces in (
            ("/chat/completions", _completion, _chunks),
            ("/completions", _text_completion, _text_chunks),
            ("/responses", _response, _response_events),
        ):
            if path.endswith(ending):
                answer = whole(body, rollout_id or "outside")
                if not body.get("stream"):
                    return JSONResponse(answer)
                return StreamingResponse(pieces(answer), media_type="text/event-stream")
        return JSONResponse(
            {"object": "list", "data": [], "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        )


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


def _text_completion(body: dict[str, Any], who: str) -> dict[str, Any]:
    choice = {"index": 0, "text": f"answer of {who}", "finish_reason": "stop", "logprobs": None}
    return {"id": "t", "object": "text_completion", "created": 1, "model": "policy", "choices": [choice]}


async def _text_chunks(completion: dict[str, Any]) -> Any:
    choice = completion["choices"][0]
    for word in choice["text"].split(" "):
        yield f"data: {json.dumps(completion | {'choices': [choice | {'text': word}]})}\n\n"
    yield "data: [DONE]\n\n"


def _response(body: dict[str, Any], who: str) -> dict[str, Any]:
    asked = body["input"]
    from_user = isinstance(asked, str) or asked[-1].get("role") == "user"
    if body.get("tools") and from_user:
        item = {
            "type": "function_call",
            "id": "f1",
            "call_id": "t1",
            "name": body["tools"][0]["name"],
            "arguments": json.dumps({"city": who}),
            "status": "completed",
        }
    else:
        structured = body.get("text", {}).get("format", {}).get("type") == "json_schema"
        text = json.dumps({"city": who}) if structured else f"answer of {who}"
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [part]}
    usage = {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2,
    }
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "policy", "status": "completed"}
    settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return head | settings | {"output": [item], "usage": usage}


async def _response_events(response: dict[str, Any]) -> Any:
    (item,) = response["output"]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response | {"status": "in_progress", "output": [], "usage": None}}
    ]
    place = {"output_index": 0, "item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        inside = place | {"content_index": 0}
        events += [
            {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
            {"type": "response.content_part.added", **inside, "part": part | {"text": ""}},
            {"type": "response.output_text.delta", **inside, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **inside, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **inside, "part": part},
        ]
    else:
        events += [
            {"type": "response.output_item.added", "output_index": 0, "item": item | {"arguments": ""}},
            {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
            {
                "type": "response.function_call_arguments.done",
                **place,
                "arguments": item["arguments"],
                "name": item["name"],
            },
        ]
    events += [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]
    for number, event in enumerate(events):
        yield f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': number})}\n\n"


@pytest.fixture(scope="session")
def _server() -> Iterator[Stub]:
    stub = Stub()
    methods = ["GET", "POST"]
    routes = [
        Route("/rollouts/{rollout_id}/v1/{rest:path}", stub.answer, methods=methods),
        Route("/{rest:path}", stub.answer, methods=methods),
    ]
    with serving(*routes) as url:
        stub.url = url
        yield stub


@pytest.fixture
def stub(_server: Stub) -> Stub:
    """A new stub for every test, on one server."""
    _server.asked.clear()
    _server.failures = 0
    return _server
