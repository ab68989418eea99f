"""Judges behind LiteLLM, LangChain and functions: what they say is heard, what they refuse is named."""

import threading

import pytest
import uvicorn
from judging import GROUP, RIGHT, grade, plain
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_core.errors import ConfigError
from art_ruler import Ruler


class Provider:
    """An OpenAI-compatible server with a judge; ``statuses`` are answered first."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[dict] = []

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body | {"key": request.headers["authorization"]})
        if self.statuses:
            return JSONResponse({"error": {"message": "scripted"}}, status_code=self.statuses.pop(0))
        message = {"role": "assistant", "content": plain(grade(body["messages"]))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "j",
            "choices": [choice],
            "usage": usage,
        }
        return JSONResponse(whole)


@pytest.fixture
def provider():
    provider = Provider()
    app = Starlette(routes=[Route("/v1/chat/completions", provider.answer, methods=["POST"])])
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server, sock = uvicorn.Server(config), config.bind_socket()
    sock.listen()  # so that nothing is refused before the thread has begun
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    provider.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    yield provider
    server.should_exit = True
    thread.join(10)
    sock.close()


async def test_any_openai_compatible_server_judges_through_litellm(provider):
    ruler = Ruler("openai/judge", api_base=provider.url, api_key="secret", params={"temperature": 0.5})
    assert await ruler.score(GROUP) == RIGHT
    (request,) = provider.requests
    assert (request["model"], request["temperature"], request["key"]) == ("judge", 0.5, "Bearer secret")
    assert "response_format" not in request


async def test_a_judge_that_knows_json_schemas_gets_one(provider):
    assert await Ruler("openai/gpt-4.1-mini", api_base=provider.url, api_key="secret").score(GROUP) == RIGHT
    assert provider.requests[0]["response_format"]["json_schema"]["strict"] is True


async def test_passing_failures_are_tried_again_and_lasting_ones_leave_the_group_unscored(provider, caplog):
    ruler = Ruler("openai/judge", api_base=provider.url, api_key="secret", retries=2)
    provider.statuses = [500, 429]
    assert await ruler.score(GROUP) == RIGHT
    provider.statuses = [500] * 3
    assert await ruler.score(GROUP) == [None] * 3
    assert len(provider.requests) == 6
    assert "gave no answer: InternalServerError" in caplog.text
    provider.statuses = [401]
    assert await ruler.score(GROUP) == [None] * 3


async def test_a_judge_that_was_never_usable_is_an_error_of_the_set_up(provider):
    provider.statuses = [401]
    with pytest.raises(ConfigError, match="check its name, api_base and key"):
        await Ruler("openai/judge", api_base=provider.url, api_key="wrong").score(GROUP)
    with pytest.raises(ConfigError, match="nosuchprovider"):
        await Ruler("nosuchprovider/model").score(GROUP)
