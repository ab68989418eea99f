"""Chat models of every provider are answered by the policy, and all else about them stays as it was."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest
from langchain.chat_models import init_chat_model
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

import art_langchain
import art_openai
from art_core.errors import CaptureError

art_openai.redirect_clients()
art_langchain.redirect_clients()

CLAUDE = ChatAnthropic(model="claude-sonnet-4-6", api_key="agent", base_url="http://127.0.0.1:9")


class City(pydantic.BaseModel):
    """A city."""

    city: str


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


class Plain(BaseChatModel):
    """A model of the agent's own that only answers whole."""

    tag: str = "own"

    @property
    def _llm_type(self) -> str:
        return "plain"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"my {self.tag} answer"))])

    def bind_tools(self, tools, *, tool_choice=None, **kwargs):
        return self.bind(tools=[convert_to_openai_tool(given) for given in tools], tool_choice=tool_choice, **kwargs)


class Streaming(Plain):
    """One that streams, in a thread where it is asked asynchronously."""

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        yield ChatGenerationChunk(message=AIMessageChunk("my own answer"))


def models() -> dict[str, BaseChatModel]:
    """Made inside a test: some of them keep a count of their own."""
    return {
        "ChatAnthropic": CLAUDE,
        "init_chat_model": init_chat_model("anthropic:claude-sonnet-4-6", api_key="agent"),
        "configurable": init_chat_model(api_key="agent").with_config(configurable={"model": "claude-sonnet-4-6"}),
        "FakeListChatModel": FakeListChatModel(responses=["my own answer"]),
        "streaming": Streaming(),
    }


@pytest.fixture(params=list(models()))
def model(request):
    return models()[request.param]


def test_every_sync_path_of_every_model_is_answered_by_the_policy(stub, model):
    with stub.rollout():
        assert model.invoke("hello").content == "answer of r"
        assert [answer.content for answer in model.batch(["a", "b"])] == ["answer of r"] * 2
        assert [chunk.content for chunk in model.stream("hello") if chunk.content] == ["answer", "of", "r"]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(model.invoke, "hello").result().content == "answer of r"
    assert [bool(asked.body.get("stream")) for asked in stub.of("r")] == [False, False, False, True, False]
    assert stub.of(None) == []


@pytest.mark.filterwarnings("ignore:astream_events version='v1'")
async def test_every_async_path_of_every_model_is_answered_by_the_policy(stub, model):
    with stub.rollout():
        assert (await model.ainvoke("hello")).content == "answer of r"
        assert [answer.content for answer in await model.abatch(["a", "b"])] == ["answer of r"] * 2
        assert [chunk.content async for chunk in model.astream("hello") if chunk.content] == ["answer", "of", "r"]
        for version in ("v1", "v2"):
            events = [event async for event in model.astream_events("hello", version=version)]
            chunks = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
            assert [chunk for chunk in chunks if chunk] == ["answer", "of", "r"]
    assert [bool(asked.body.get("stream")) for asked in stub.of("r")] == [False, False, False, True, True, True]
    assert stub.of(None) == []


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("name", ["ChatAnthropic", "FakeListChatModel", "streaming"])
async def test_protocol_events_stream_the_policys_answer(stub, name):
    model = models()[name]
    with stub.rollout():
        stream = model.stream_events("hello", version="v3")
        assert [delta for delta in stream.text if delta] == ["answer", "of", "r"]
        stream = await model.astream_events("hello", version="v3")
        assert [delta async for delta in stream.text if delta] == ["answer", "of", "r"]
    assert [asked.body["stream"] for asked in stub.of("r")] == [True, True]


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_a_class_that_makes_its_own_protocol_events_is_answered_by_the_policy(stub):
    class Native(Plain):
        def _stream_chat_model_events(self, messages, **kwargs):
            raise AssertionError("asked its provider")

        async def _astream_chat_model_events(self, messages, **kwargs):
            raise AssertionError("asked its provider")
            yield

    with stub.rollout():
        assert str(Native().stream_events("hello", version="v3").text) == "answerofr"
        stream = await Native().astream_events("hello", version="v3")
        assert await stream.text == "answerofr"


async def test_a_model_that_does_not_stream_still_answers_whole(stub):
    with stub.rollout():
        assert [chunk.content for chunk in Plain().stream("hello")] == ["answer of r"]
        assert [chunk.content async for chunk in Plain().astream("hello")] == ["answer of r"]
    assert [asked.body.get("stream") for asked in stub.of("r")] == [False, False]


async def test_outside_a_rollout_and_where_it_is_let_through_a_model_answers_for_itself(stub):
    model = Streaming()
    with stub.rollout():
        await model.ainvoke("hello")
    assert model.invoke("hello").content == (await model.ainvoke("hello")).content == "my own answer"
    with stub.rollout(passthrough=("Streaming",)):
        assert (await model.ainvoke("hello")).content == "my own answer"
        assert [chunk.content async for chunk in model.astream("hello") if chunk.content] == ["my own answer"]
        assert model.invoke("hello", model="another").content == "answer of r"
    with stub.rollout(passthrough=("claude-sonnet-4-6",)), pytest.raises(Exception, match="Connection"):
        CLAUDE.model_copy(update={"max_retries": 0}).invoke("hello")
    assert len(stub.of("r")) == 2


def test_a_model_around_another_is_answered_in_its_place_unless_it_is_let_through(stub):
    class Router(Plain):
        def _generate(self, messages, stop=None, run_manager=None, **kwargs):
            inner = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")
            answer = inner.invoke([SystemMessage("be brief"), *messages])
            return ChatResult(generations=[ChatGeneration(message=AIMessage(f"routed: {answer.text}"))])

    with stub.rollout():
        assert Router().invoke("hello").content == "answer of r"
    with stub.rollout(passthrough=("Router",)):
        assert Router().invoke("hello").content == "routed: answer of r"
    assert [len(asked.body["messages"]) for asked in stub.of("r")] == [1, 2]


def test_the_policy_is_asked_for_the_model_that_the_agent_names(stub, model):
    with stub.rollout():
        model.invoke("hello")
    assert stub.of("r")[0].body["model"] in ("claude-sonnet-4-6", "FakeListChatModel", "Streaming")


def test_settings_are_kept(stub):
    own = ChatAnthropic(model="claude-sonnet-4-6", api_key="agent", max_tokens=99, temperature=0.3, stop=["own"])
    with stub.rollout():
        own.invoke("hello")
        own.invoke("hello", stop=["END"], temperature=0.9, max_tokens=7, top_k=5)
        CLAUDE.invoke("hello")
        Plain().bind(stop=["x"], max_output_tokens=3, seed=1).invoke("hello")
    kept, given, default, bound = [asked.body for asked in stub.of("r")]
    assert (kept["max_completion_tokens"], kept["temperature"], kept["stop"]) == (99, 0.3, ["own"])
    assert (given["max_completion_tokens"], given["temperature"], given["stop"]) == (7, 0.9, ["END"])
    assert given["top_k"] == 5
    # Anthropic's API insists on a limit, so the class gives the model's greatest: no choice of the agent's.
    assert default.keys() == {"model", "messages", "stream"}
    assert (bound["stop"], bound["max_completion_tokens"], bound["seed"]) == (["x"], 3, 1)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", {"tool_choice": "required"}),
        ("auto", {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ("weather", {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
    ],
)
def test_anthropics_tools_and_tool_choice_become_openais(stub, choice, expected):
    with stub.rollout():
        answer = CLAUDE.bind_tools([weather], tool_choice=choice).invoke("hello")
    body = stub.of("r")[0].body
    assert {key: body[key] for key in expected} == expected
    assert body["tools"] == [convert_to_openai_tool(weather)]
    assert answer.tool_calls == [{"name": "weather", "args": {"city": "r"}, "id": "t1", "type": "tool_call"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"tool": {"name": "weather"}}, {"type": "function", "function": {"name": "weather"}}),
        ({"any": {}}, "required"),
        ({"type": "function", "function": {"name": "weather"}}, {"type": "function", "function": {"name": "weather"}}),
        (True, "required"),
    ],
)
def test_other_providers_tool_choice_becomes_openais(stub, choice, expected):
    bedrock = {"toolSpec": {"name": "weather", "description": "d", "inputSchema": {"json": {"type": "object"}}}}
    with stub.rollout():
        Plain().bind(tools=[bedrock], tool_choice=choice).invoke("hello")
    body = stub.of("r")[0].body
    assert body["tool_choice"] == expected
    assert body["tools"][0]["function"] == {"name": "weather", "description": "d", "parameters": {"type": "object"}}


async def test_tool_calls_are_streamed(stub):
    with stub.rollout():
        chunks = [chunk async for chunk in CLAUDE.bind_tools([weather]).astream("hello")]
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls == [{"name": "weather", "args": {"city": "r"}, "id": "t1", "type": "tool_call"}]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_structured_output_is_parsed_by_the_models_class(stub, method):
    with stub.rollout():
        assert CLAUDE.with_structured_output(City, method=method).invoke("hello") == City(city="r")
        assert await CLAUDE.with_structured_output(City, method=method).ainvoke("hello") == City(city="r")
        whole = CLAUDE.with_structured_output(City, method=method, include_raw=True).invoke("hello")
        as_dict = CLAUDE.with_structured_output(City.model_json_schema(), method=method).invoke("hello")
    assert (whole["parsed"], whole["parsing_error"], type(whole["raw"])) == (City(city="r"), None, AIMessage)
    assert as_dict == {"city": "r"}
    body = stub.of("r")[0].body
    if method == "json_schema":
        assert body["response_format"]["json_schema"]["schema"]["properties"].keys() == {"city"}
    else:
        assert body["tool_choice"] == {"type": "function", "function": {"name": "City"}}


def test_an_answer_that_does_not_fit_fails_as_the_models_class_has_it(stub):
    class Country(pydantic.BaseModel):
        capital: int

    structured = CLAUDE.with_structured_output(Country, method="json_schema")
    with stub.rollout(), pytest.raises(OutputParserException):
        structured.invoke("hello")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"format": "json"}, {"type": "json_object"}),
        ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        ({"response_mime_type": "application/json"}, {"type": "json_object"}),
        (
            {"format": {"title": "City", "type": "object"}},
            {"type": "json_schema", "json_schema": {"name": "City", "schema": {"title": "City", "type": "object"}}},
        ),
    ],
)
def test_other_providers_answer_formats_become_openais(stub, given, expected):
    with stub.rollout():
        Plain().bind(**given).invoke("hello")
    assert stub.of("r")[0].body["response_format"] == expected


class Notes(BaseCallbackHandler):
    """Keeps what callbacks are told, without what differs from run to run."""

    def __init__(self) -> None:
        self.notes: list[tuple] = []

    def on_chat_model_start(self, serialized, messages, *, tags, metadata, name=None, **kwargs):
        self.notes.append(("start", serialized and serialized["id"], name, tags, metadata, kwargs["invocation_params"]))

    def on_llm_new_token(self, token, **kwargs):
        self.notes.append(("token", token))

    def on_llm_end(self, response, **kwargs):
        self.notes.append(("end", response.generations[0][0].text))


@pytest.mark.parametrize("own", [FakeListChatModel(responses=["answer of r"]), Streaming(tag="b", tags=["a"])])
async def test_callbacks_tags_metadata_and_names_are_the_models_own(stub, own):
    async def notes() -> list[tuple]:
        seen = Notes()
        config = {"callbacks": [seen], "tags": ["t"], "metadata": {"m": 1}, "run_name": "asking"}
        own.invoke("hello", config)
        await own.ainvoke("hello", config)
        return seen.notes

    outside = await notes()
    with stub.rollout():
        inside = await notes()
    assert [note for note in inside if note[0] == "start"] == [note for note in outside if note[0] == "start"]
    assert [note for note in inside if note[0] == "end"] == [("end", "answer of r")] * 2


async def test_events_carry_the_names_that_they_carry_outside(stub):
    async def names() -> list[tuple]:
        events = [event async for event in FakeListChatModel(responses=["x"]).astream_events("hi", version="v2")]
        return [(event["event"], event["name"], event["tags"]) for event in (events[0], events[-1])]

    outside = await names()
    with stub.rollout():
        assert await names() == outside == [(f"on_chat_model_{at}", "FakeListChatModel", []) for at in ("start", "end")]


def test_the_rate_limiter_of_the_model_is_asked(stub):
    class Counting(InMemoryRateLimiter):
        asked = 0

        def acquire(self, *, blocking=True):
            self.asked += 1
            return True

    limiter = Counting()
    with stub.rollout():
        Plain(rate_limiter=limiter).invoke("hello")
    assert limiter.asked == 1


def test_what_no_chat_completion_can_say_is_refused_by_name(stub):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    document = HumanMessage([{"type": "document", "source": {"type": "text", "data": "x"}}])
    with stub.rollout():
        with pytest.raises(CaptureError, match="web_search_20250305"):
            CLAUDE.bind_tools([search]).invoke("hello")
        with pytest.raises(CaptureError, match=r"human message.*document"):
            CLAUDE.invoke([document])
        with pytest.raises(CaptureError, match="tool_choice"):
            Plain().bind(tools=[weather], tool_choice={"mode": "odd"}).invoke("hello")
    assert stub.asked == []


def test_an_argument_that_cannot_be_passed_on_is_said_once(stub, caplog):
    with stub.rollout(), caplog.at_level(logging.WARNING, "art"):
        for _ in range(3):
            Plain().bind(moon_phase="full", thinking={"type": "enabled"}).invoke("hello")
    assert [record.getMessage() for record in caplog.records] == [
        "moon_phase=, passed to Plain, is not passed to the policy: chat completions don't support it"
    ]
    assert len(stub.of("r")) == 3


async def test_64_concurrent_runs_of_a_model_stay_apart(stub):
    async def once(rollout_id: str) -> str:
        with stub.rollout(rollout_id):
            sync = await asyncio.to_thread(CLAUDE.invoke, "hello")
            return f"{sync.content}, {(await CLAUDE.ainvoke('hello')).content}"

    names = [f"r{i}" for i in range(64)]
    assert await asyncio.gather(*map(once, names)) == [f"answer of {name}, answer of {name}" for name in names]
    assert [len(stub.of(name)) for name in names] == [2] * 64


def test_the_answer_equals_the_one_of_chatopenai_at_a_plain_server(stub):
    direct = ChatOpenAI(model="m", api_key="agent", base_url=f"{stub.url}/v1")
    for ask in (lambda model: model.invoke("hello"), lambda model: model.bind_tools([weather]).invoke("hello")):
        expected = ask(direct)
        with stub.rollout("outside"):  # what the stub says at a plain address
            answer = ask(CLAUDE)
        for field in ("content", "tool_calls", "usage_metadata", "response_metadata"):
            assert getattr(answer, field) == getattr(expected, field)
