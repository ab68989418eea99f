"""Judges behind LiteLLM, LangChain and functions: what they say is heard, what they refuse is named."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import ClassVar

import pytest
from http_server import serving
from judging import GROUP, RIGHT, grade, group_of, plain
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from art_core.errors import ConfigError
from art_ruler import Answer, Ruler


class Provider:
    """An OpenAI-compatible server with a judge; ``statuses`` are answered first, then ``text``, where it is set."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[dict] = []
        self.error: dict = {"message": "scripted"}
        self.text: str | None = None
        self.pause = 0.0
        self.arrived: Callable[[], None] = lambda: None
        self.drip: Callable[[], AsyncIterator[bytes]] | None = None

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body | {"key": request.headers["authorization"]})
        self.arrived()
        await asyncio.sleep(self.pause)
        if self.statuses:
            return JSONResponse({"error": self.error}, status_code=self.statuses.pop(0), headers={"retry-after": "0"})
        if self.drip is not None:
            return StreamingResponse(self.drip(), media_type="application/json")
        if self.text is not None:
            return PlainTextResponse(self.text)
        message = {"role": "assistant", "content": plain(grade(body["messages"]))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
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
    with serving(Route("/v1/chat/completions", provider.answer, methods=["POST"])) as url:
        provider.url = f"{url}/v1"
        yield provider


@pytest.fixture(params=["directly", "through LiteLLM's translation"])
def way(request, monkeypatch):
    """Both ways on which an OpenAI-compatible server is asked: the second is taken where somebody listens to LiteLLM."""
    if request.param != "directly":
        import litellm

        monkeypatch.setattr(litellm, "success_callback", [lambda *arguments: None])
    return request.param


@pytest.fixture
async def forward(monkeypatch):
    """``forward(seconds)`` puts this loop's clock forward, so that a timeout passes once a question has arrived, not before."""
    loop, ahead = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead[0])

    def forward(seconds: float) -> None:
        ahead[0] += seconds
        loop.call_soon_threadsafe(lambda: None)  # it looks at the clock when it wakes

    return forward


def ruler_of(provider: Provider, model: str = "openai/judge", **settings: object) -> Ruler:
    return Ruler(model, api_base=provider.url, api_key="secret", **settings)


async def test_any_openai_compatible_server_judges(provider, way):
    assert await ruler_of(provider, params={"temperature": 0.5}).score(GROUP) == RIGHT
    (request,) = provider.requests
    assert (request["model"], request["temperature"], request["key"]) == ("judge", 0.5, "Bearer secret")
    assert "response_format" not in request


async def test_a_parameter_that_litellm_knows_better_goes_through_its_translation(provider):
    assert await ruler_of(provider, params={"extra_body": {"top_k": 1}, "timeout": 9}).score(GROUP) == RIGHT
    assert provider.requests[0]["top_k"] == 1


async def test_a_judge_that_knows_json_schemas_gets_one(provider, way):
    assert await ruler_of(provider, "openai/gpt-4.1-mini").score(GROUP) == RIGHT
    assert provider.requests[0]["response_format"]["json_schema"]["strict"] is True


async def test_what_a_known_judge_costs_is_known(provider, way):
    ruler = ruler_of(provider, "openai/gpt-4.1-mini", budget=1.0)
    await ruler.score(GROUP)
    account = ruler.account()
    assert (account["judge/input_tokens"], account["judge/output_tokens"]) == (1000, 100)
    assert account["judge/cost"] == pytest.approx(1000 * 0.4e-6 + 100 * 1.6e-6)
    unknown = ruler_of(provider)
    await unknown.score(GROUP)
    assert unknown.account()["judge/unpriced"] == 1


async def test_what_litellm_knows_of_a_judge_decides_about_pictures_and_length(provider):
    for model, context, images in (("openai/gpt-4.1-mini", 1047576, True), ("openai/gpt-3.5-turbo", 16385, False)):
        ruler = ruler_of(provider, model)
        await ruler.score(GROUP)
        assert (ruler.judge.context, ruler.judge.images) == (context, images)


async def test_passing_failures_are_tried_again_and_lasting_ones_leave_the_group_unscored(provider, caplog, way):
    ruler = ruler_of(provider, retries=2)
    provider.statuses = [500, 429]
    assert await ruler.score(GROUP) == RIGHT
    provider.statuses = [500] * 3
    assert await ruler.score(GROUP) == [None] * 3
    assert len(provider.requests) == 6
    assert "gave no answer: InternalServerError" in caplog.text
    provider.statuses = [401]
    assert await ruler.score(GROUP) == [None] * 3
    assert len(provider.requests) == 7, "a refusal is not tried again"


async def test_a_judge_that_was_never_usable_is_an_error_of_the_set_up(provider, way):
    for status in (401, 403, 404):
        provider.statuses = [status]
        with pytest.raises(ConfigError, match="check its name, api_base and key"):
            await ruler_of(provider).score(GROUP)


async def test_a_question_that_is_refused_is_about_one_group_from_the_first_on(provider, way):
    provider.statuses = [400]
    group = group_of("worth 0.2", "worth 0.9")
    assert await ruler_of(provider).score(group) == [None, None]
    assert "BadRequestError" in group.trajectories[0].notes["unscored"]


async def test_a_key_that_is_missing_is_told_before_anything_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for ask in (lambda ruler: ruler.score(GROUP), lambda ruler: asyncio.to_thread(ruler.begin, tmp_path)):
        with pytest.raises(ConfigError, match="it needs OPENAI_API_KEY; set it, or pass api_key="):
            await ask(Ruler("openai/judge"))


def test_a_budget_without_a_price_is_refused_when_the_run_begins(tmp_path):
    with pytest.raises(ConfigError, match="the price of the judge 'openai/judge' is unknown"):
        Ruler("openai/judge", api_key="x", budget=1.0).begin(tmp_path)
    Ruler("openai/gpt-4.1-mini", api_key="x", budget=1.0).begin(tmp_path)


async def test_a_name_that_no_provider_has_is_refused():
    with pytest.raises(ConfigError, match="nosuchprovider"):
        await Ruler("nosuchprovider/model").score(GROUP)


async def test_a_question_that_the_server_finds_too_long_is_shortened(provider, way):
    provider.statuses = [400]
    provider.error = {
        "message": "This model's maximum context length is 8192 tokens.",
        "code": "context_length_exceeded",
    }
    long = group_of(*(f"worth 0.{n} {'and more words ' * 900}" for n in (2, 9)))
    assert await ruler_of(provider).score(long) == [0.2, 0.9]
    assert len(json.dumps(provider.requests[1])) < 0.6 * len(json.dumps(provider.requests[0]))


@pytest.mark.system
async def test_a_server_that_answers_in_time_or_not_at_all(provider, way, forward):
    provider.pause = 5
    provider.arrived = lambda: forward(60)
    group = group_of("worth 0.2", "worth 0.9")
    assert await ruler_of(provider, timeout=60).score(group) == [None, None]
    assert len(provider.requests) == 1, "it is billed, so it is not sent again"
    assert "gave no answer within 60 s" in group.trajectories[0].notes["unscored"]


@pytest.mark.system
@pytest.mark.parametrize(("price", "per_token"), [(None, 0.4e-6), ((2.0, 10.0), 2e-6)])
async def test_an_answer_that_is_too_late_is_charged_to_the_budget(provider, way, forward, tmp_path, price, per_token):
    provider.pause = 5
    provider.arrived = lambda: forward(60)
    ruler = ruler_of(provider, "openai/gpt-4.1-mini", budget=0.0001, price=price, timeout=60, votes=2)
    await asyncio.to_thread(ruler.begin, tmp_path)
    for number in range(3):
        assert await ruler.score(group_of("worth 0.2", f"worth 0.{number}")) == [None, None]
    assert len(provider.requests) == 1
    assert "budget of $0.0001 is spent" in ruler.exhausted()
    account = ruler.account()
    assert (account["judge/requests"], account["judge/failed"], account["judge/unpriced"]) == (1, 1, 0)
    assert account["judge/input_tokens"] > 500
    assert account["judge/cost"] == pytest.approx(account["judge/input_tokens"] * per_token)
    await asyncio.to_thread(ruler.begin, tmp_path)
    assert ruler.account() == account, "also after a restart"


@pytest.mark.system
async def test_a_judge_that_cannot_be_reached_is_tried_again_and_not_paid(way, tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):  # more than its queue takes, so that the system drops further connections
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        model, address = "openai/gpt-4.1-mini", f"http://127.0.0.1:{port}/v1"
        ruler = Ruler(model, api_base=address, api_key="k", budget=0.0001, timeout=2, retries=1)
        await asyncio.to_thread(ruler.begin, tmp_path)
        began = time.monotonic()
        group = group_of("worth 0.2", "worth 0.9")
        assert await ruler.score(group) == [None, None]
        assert time.monotonic() - began > 2, "two attempts of a second each"
    assert "Timeout" in group.trajectories[0].notes["unscored"]
    assert ruler.exhausted() is None and ruler.account()["judge/cost"] == 0


@pytest.mark.system
async def test_an_answer_that_comes_in_drops_has_no_more_time_than_any_other(provider, way, forward):
    async def drip():
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.05)
            forward(4)

    provider.drip = drip
    group = group_of("worth 0.2", "worth 0.9")
    assert await ruler_of(provider, timeout=60).score(group) == [None, None]
    assert len(provider.requests) == 1
    assert "gave no answer within 60 s" in group.trajectories[0].notes["unscored"]


def completion(message: object, **more: object) -> str:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "j", "choices": [choice], **more})


async def test_an_answer_that_is_no_chat_completion_leaves_the_group_unscored(provider, way):
    wrong = ["<html>502</html>", "{}", '{"choices": []}', "[1]", '{"choices": [{"message": null}]}']
    wrong += [completion({"role": "assistant", "content": content}) for content in (5, [{"type": "text", "text": "x"}])]
    wrong += [completion({"role": "assistant", "content": "x"}, usage=usage) for usage in ([1], "much")]
    for text in wrong:
        provider.text = text
        group = group_of("worth 0.2", "worth 0.9")
        assert await ruler_of(provider, retries=0).score(group) == [None, None]
        said = group.trajectories[0].notes["unscored"]
        assert "is not a chat completion" in said or "gave no answer" in said or "has no choices" in said


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}])
async def test_a_judge_whose_server_counts_no_tokens_is_paid_by_an_estimate(provider, way, usage):
    provider.text = completion({"role": "assistant", "content": "I would rather not say."}, **usage)
    ruler = ruler_of(provider, "openai/gpt-4.1-mini", budget=1.0)
    assert await ruler.score(GROUP) == [None] * 3
    account = ruler.account()
    assert account["judge/input_tokens"] > 500
    assert account["judge/cost"] == pytest.approx(
        account["judge/input_tokens"] * 0.4e-6 + account["judge/output_tokens"] * 1.6e-6
    )


async def test_another_server_in_the_environment_is_another_judge(provider, way, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for base in (provider.url, provider.url, f"{provider.url}/"):
        monkeypatch.setenv("OPENAI_BASE_URL", base)
        assert await Ruler("openai/judge", cache=tmp_path / "judge.sqlite").score(GROUP) == RIGHT
    assert len(provider.requests) == 2
    assert b"secret" not in b"".join(it.read_bytes() for it in tmp_path.iterdir())


async def test_how_long_an_answer_may_be_is_said_as_the_model_takes_it(provider):
    assert await ruler_of(provider, "openai/o3-mini", params={"max_tokens": 2000}).score(GROUP) == RIGHT
    assert provider.requests[0]["max_completion_tokens"] == 2000
    assert "max_tokens" not in provider.requests[0]


async def test_an_answer_that_was_cut_off_says_so(provider, way):
    choice = {"index": 0, "message": {"role": "assistant", "content": '{"scores": ['}, "finish_reason": "length"}
    provider.text = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "j", "choices": [choice]}
    )
    group = group_of("worth 0.2", "worth 0.9")
    await ruler_of(provider).score(group)
    assert "(the judge stopped because of: length)" in group.trajectories[0].notes["unscored"]


async def test_a_server_that_is_not_there_leaves_the_group_unscored():
    group = group_of("worth 0.2", "worth 0.9")
    ruler = Ruler("openai/judge", api_base="http://127.0.0.1:9/v1", api_key="x", retries=0)
    assert await ruler.score(group) == [None, None]
    said = group.trajectories[0].notes["unscored"]
    assert said.startswith("the judge 'openai/judge' gave no answer: APIConnectionError: Cannot connect to host")
    assert "object at" not in said and "litellm." not in said


class ChatModel(BaseChatModel):
    """A LangChain model that grades; ``blocks`` gives its answer as a list of content blocks."""

    blocks: bool = False
    failing: bool = False
    asked: ClassVar[list] = []

    @property
    def _llm_type(self) -> str:
        return "grading"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        if self.failing:
            raise RuntimeError("no quota")
        ChatModel.asked.append(messages)
        text = plain(grade([{"content": message.content} for message in messages]))
        usage = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
        answer = AIMessage(content=[{"type": "text", "text": text}] if self.blocks else text, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=answer)])


class WrittenModel(ChatModel):
    """One that LangChain can write down."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_langchain_chat_model_judges(blocks):
    ruler = Ruler(ChatModel(blocks=blocks))
    assert await ruler.score(GROUP) == RIGHT
    assert ruler.account()["judge/input_tokens"] == 7
    assert [message.type for message in ChatModel.asked[-1]] == ["system", "human"]
    assert ruler.name == "ruler langchain/ChatModel"


async def test_a_langchain_runnable_that_ends_in_a_text_judges():
    assert await Ruler(ChatModel() | StrOutputParser()).score(GROUP) == RIGHT


async def test_a_langchain_model_that_fails_leaves_the_group_unscored():
    group = group_of("worth 0.2", "worth 0.9")
    assert await Ruler(ChatModel(failing=True)).score(group) == [None, None]
    assert "RuntimeError: no quota" in group.trajectories[0].notes["unscored"]


async def test_a_langchain_model_whose_client_is_of_an_event_loop_that_has_ended_is_asked_again():
    model = ChatModel()
    found, model_type = [], type(model)

    class Stale(model_type):
        async def ainvoke(self, *arguments, **settings):
            found.append(1)
            if len(found) == 1:
                raise RuntimeError("Event loop is closed")
            return await super().ainvoke(*arguments, **settings)

    assert await Ruler(Stale()).score(GROUP) == RIGHT


async def test_what_a_langchain_model_judged_is_kept_as_long_as_it_is_the_same_model(tmp_path):
    asked = len(ChatModel.asked)
    for model in (WrittenModel(), WrittenModel(), WrittenModel(blocks=True)):
        assert await Ruler(model, cache=tmp_path / "judge.sqlite").score(GROUP) == RIGHT
    assert len(ChatModel.asked) - asked == 2
    for _ in range(2):
        assert await Ruler(ChatModel(), cache=tmp_path / "judge.sqlite").score(GROUP) == RIGHT
    assert len(ChatModel.asked) - asked == 4, "a model that cannot be written down is asked anew"


async def test_a_function_that_returns_no_text_or_takes_too_long_leaves_the_group_unscored():
    async def wrong(messages):
        return {"scores": []}

    async def slow(messages):
        await asyncio.sleep(5)

    async def empty(messages):
        return Answer(None)

    def plain_function(messages):
        raise RuntimeError("no quota")

    for judge, reason in (
        (wrong, "returned dict; return the answer's text"),
        (slow, "no answer within 0.05 s"),
        (empty, "returned NoneType; return the answer's text"),
        (plain_function, "RuntimeError: no quota"),
    ):
        group = group_of("worth 0.2", "worth 0.9")
        assert await Ruler(judge, timeout=0.05).score(group) == [None, None]
        assert reason in group.trajectories[0].notes["unscored"]


@pytest.mark.parametrize("thing", [3, Ruler, object()])
def test_what_cannot_judge_is_refused(thing):
    with pytest.raises(ConfigError, match="is not a judge: pass a LiteLLM model string"):
        Ruler(thing)
