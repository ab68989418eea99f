"""Judges behind other APIs than OpenAI's: LiteLLM translates, and what comes back is scores all the same."""

import json

import pytest
from http_server import serving
from judging import GROUP, RIGHT, grade, plain
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_ruler import Ruler
from art_ruler.judge import JudgeError


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
        ("anthropic/claude-haiku-5-5", 1000 * 0.1e-6 + 100 * 0.5e-6),
        ("ollama_chat/qwen3", 0.0),
    ],
)
async def test_a_judge_behind_another_api_scores_and_is_accounted_for(url, model, cost):
    ruler = Ruler(model, api_base=url, api_key="secret")
    assert await ruler.score(GROUP) == RIGHT
    account = ruler.account()
    assert (account["judge/input_tokens"], account["judge/output_tokens"]) == (1000, 100)
    assert account["judge/cost"] == pytest.approx(cost)


async def test_a_picture_that_is_an_address_is_asked_for_by_nobody_here_and_one_that_is_held_is_shown():
    fetched, asked = [], []

    async def picture(request: Request) -> JSONResponse:
        fetched.append(request.url.path)
        return JSONResponse({}, 404)

    async def judge(request: Request) -> JSONResponse:
        asked.append(await request.body())
        return JSONResponse({"error": {"message": "enough"}}, 400)

    routes = Route("/picture", picture), Route("/{path:path}", judge, methods=["POST"])
    with serving(*routes) as url:
        pictures = [f"{url}/picture", "data:image/png;base64,iVBORw0KGgo="]
        parts = [{"type": "image_url", "image_url": {"url": it}} for it in pictures]
        runs = [[{"role": "user", "content": parts}, {"role": "assistant", "content": said}] for said in "ab"]
        for model in ("anthropic/claude-sonnet-4-5", "gemini/gemini-2.5-flash", "ollama_chat/qwen3", "openai/judge"):
            base = f"{url}/v1" if model.startswith("openai") else url
            with pytest.raises(JudgeError):
                await Ruler(model, api_base=base, api_key="secret", images=True, retries=0).compare(runs)
    assert fetched == []
    *others, openai = asked
    assert len(others) == 3 and all(
        b"iVBORw0KGgo" in it and b"/picture" not in it and b"[image]" in it for it in others
    )
    assert b"iVBORw0KGgo" in openai and b"/picture" in openai, "OpenAI's API fetches it itself"
