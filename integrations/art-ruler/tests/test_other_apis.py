"""Judges behind other APIs than OpenAI's: LiteLLM translates, and what comes back is scores all the same."""

import json

import pytest
from http_server import serving
from judging import GROUP, RIGHT, grade, plain
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_ruler import Ruler


def text_of(content: str | list) -> str:
    return content if isinstance(content, str) else content[0]["text"]


async def anthropic(request: Request) -> JSONResponse:
    body = await request.json()
    asked = [{"content": text_of(it)} for it in (body["system"], body["messages"][0]["content"])]
    block = {"type": "text", "text": plain(grade(asked))}
    if "tools" in body:  # an older model is held to the schema by a tool that it must call
        arguments = json.loads(block["text"])
        block = {"type": "tool_use", "id": "t", "name": body["tools"][0]["name"], "input": arguments}
    stop = "tool_use" if "tools" in body else "end_turn"
    usage = {"input_tokens": 1000, "output_tokens": 100}
    whole = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "content": [block]}
    return JSONResponse(whole | {"stop_reason": stop, "usage": usage})


async def ollama(request: Request) -> JSONResponse:
    body = await request.json()
    message = {"role": "assistant", "content": plain(grade(body["messages"]))}
    counts = {"prompt_eval_count": 1000, "eval_count": 100}
    whole = {"model": body["model"], "created_at": "2026-01-01T00:00:00Z", "message": message, "done": True}
    return JSONResponse(whole | {"done_reason": "stop"} | counts)


@pytest.fixture
def url():
    paths = {"/v1/messages": anthropic, "/api/chat": ollama}
    with serving(*(Route(path, answer, methods=["POST"]) for path, answer in paths.items())) as url:
        yield url


@pytest.mark.parametrize(
    ("model", "cost"),
    [
        ("anthropic/claude-sonnet-4-5", 1000 * 3e-6 + 100 * 15e-6),
        ("anthropic/claude-3-haiku-20240307", 1000 * 0.25e-6 + 100 * 1.25e-6),
        ("ollama_chat/qwen3", 0.0),
    ],
)
async def test_a_judge_behind_another_api_scores_and_is_accounted_for(url, model, cost):
    ruler = Ruler(model, api_base=url, api_key="secret")
    assert await ruler.score(GROUP) == RIGHT
    account = ruler.account()
    assert (account["judge/input_tokens"], account["judge/output_tokens"]) == (1000, 100)
    assert account["judge/cost"] == pytest.approx(cost)
