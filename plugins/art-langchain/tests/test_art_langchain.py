"""Runnables run as they are; ChatOpenAI is captured on every path, and nothing is answered unnoticed."""

import contextvars
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import AzureChatOpenAI, ChatOpenAI

import art_langchain
import art_openai
from art_core.errors import CaptureError

EARLY = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")
"""Made before anything is wrapped."""

art_openai.redirect_clients()
art_langchain.redirect_clients()


class City(pydantic.BaseModel):
    """A city."""

    city: str


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


async def test_any_runnable_is_an_agent(stub):
    chain = ChatPromptTemplate.from_template("Say {word}") | EARLY | StrOutputParser()
    run = art_langchain.adapt_agent(chain)
    with stub.rollout("one") as address:
        assert await run({"word": "yes"}, address) == "answer of one"
    assert stub.of("one")[0].body["messages"] == [{"content": "Say yes", "role": "user"}]


@pytest.mark.parametrize("other", [lambda task: task, "text", RunnableLambda], ids=["function", "text", "class"])
def test_what_is_not_a_runnable_is_left_to_others(other):
    assert art_langchain.adapt_agent(other) is None


def test_every_sync_path_is_captured(stub):
    with stub.rollout():
        assert EARLY.invoke("hello", stop=["x"]).content == "answer of r"
        assert "".join(chunk.content for chunk in EARLY.stream("hello")) == "answerofr"
        assert [answer.content for answer in EARLY.batch(["a", "b"])] == ["answer of r"] * 2
        assert EARLY.bind_tools([weather], tool_choice="any").invoke("hello").tool_calls[0]["args"] == {"city": "r"}
        assert EARLY.with_structured_output(City).invoke("hello") == City(city="r")
        assert EARLY.with_structured_output(City, method="function_calling").invoke("hello") == City(city="r")
    bodies = [asked.body for asked in stub.of("r")]
    assert len(bodies) == 7
    assert bodies[0]["stop"] == ["x"]
    assert bodies[1]["stream"] is True
    assert bodies[4]["tool_choice"] == "required"


async def test_every_async_path_is_captured(stub):
    with stub.rollout():
        assert (await EARLY.ainvoke("hello")).content == "answer of r"
        assert "".join([chunk.content async for chunk in EARLY.astream("hello")]) == "answerofr"
        assert len(await EARLY.abatch(["a", "b"])) == 2
        assert (await EARLY.bind_tools([weather]).ainvoke("hello")).tool_calls[0]["name"] == "weather"
        assert await EARLY.with_structured_output(City).ainvoke("hello") == City(city="r")
        assert "on_chat_model_stream" in {event["event"] async for event in EARLY.astream_events("hello", version="v2")}
    assert len(stub.of("r")) == 7
    assert stub.of(None) == []


async def test_azure_and_headers_are_captured(stub):
    azure = AzureChatOpenAI(azure_endpoint=stub.url, api_version="2025-01-01", api_key="agent", azure_deployment="d")
    with_headers = ChatOpenAI(
        model="m", api_key="agent", include_response_headers=True, base_url="http://127.0.0.1:9/v1"
    )
    with stub.rollout():
        assert (await azure.ainvoke("hello")).content == "answer of r"
        assert "headers" in with_headers.invoke("hello").response_metadata
    assert len(stub.of("r")) == 2


def test_the_responses_api_goes_to_the_rollout_too(stub):
    pytest.importorskip("art_gateway")
    model = ChatOpenAI(model="m", api_key="agent", use_responses_api=True, base_url="http://127.0.0.1:9/v1")
    with stub.rollout():
        assert model.invoke("hello").text == "answer of r"
    assert [asked.path for asked in stub.of("r")] == ["/rollouts/r/v1/responses"]


def test_a_model_with_the_rollouts_address_is_captured_on_a_thread_from_before_the_rollout(stub):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        ask = contextvars.Context().run
        with stub.rollout() as address:
            named = ChatOpenAI(model="m", api_key="k", base_url=address.base_url)
            unnamed = ChatOpenAI(model="m", api_key="k", base_url=f"{stub.url}/v1")
            assert ask(pool.submit, named.invoke, "hello").result().text == "answer of r"
            with pytest.raises(CaptureError, match=r"base_url=address\.base_url"):
                ask(pool.submit, unnamed.invoke, "hello").result()
    assert [asked.rollout_id for asked in stub.asked] == ["r"]


async def test_a_model_of_plain_text_is_refused_unless_it_is_let_through(stub):
    model = FakeListLLM(responses=["hi"])
    assert model.invoke("hello")
    with stub.rollout():
        for ask in (model.invoke, model.batch, lambda text: list(model.stream(text))):
            with pytest.raises(CaptureError, match=r"plain text.*passthrough=\['FakeListLLM'\]"):
                ask(["hello"])
        with pytest.raises(CaptureError):
            await model.ainvoke("hello")
        with pytest.raises(CaptureError):
            _ = [chunk async for chunk in model.astream("hello")]
    with stub.rollout(passthrough=("FakeListLLM",)):
        assert await model.ainvoke("hello")
    assert stub.asked == []


def test_an_answer_from_a_cache_is_not_taken_for_the_policys(stub):
    cached = ChatOpenAI(model="m", api_key="agent", cache=InMemoryCache(), base_url=stub.url)
    other = FakeListChatModel(responses=["hi"], cache=InMemoryCache())
    uncached = ChatOpenAI(model="m", api_key="agent", cache=False, base_url=stub.url)
    for model in (cached, other):
        with stub.rollout(), pytest.raises(CaptureError, match="cache"):
            model.invoke("hello")
    set_llm_cache(InMemoryCache())
    try:
        with stub.rollout(), pytest.raises(CaptureError, match="cache"):
            EARLY.invoke("hello")
        with stub.rollout():
            assert uncached.invoke("hello").content == "answer of r"
    finally:
        set_llm_cache(None)


@pytest.mark.system
def test_importing_the_plugin_does_not_import_langchain():
    code = "import art_langchain, sys; assert not {'langchain_core', 'langchain_openai', 'openai'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
