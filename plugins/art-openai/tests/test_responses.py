"""Responses and completions land at the rollout's address where art-gateway is installed, asked for in whatever way."""

import openai
import pydantic
import pytest

import art_openai
from art_openai import client as redirected

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}

art_openai.redirect_clients()


class City(pydantic.BaseModel):
    city: str


@pytest.fixture(autouse=True)
def gateway(tmp_path, monkeypatch):
    """Something of that name can be imported; what it does is the stub's part here."""
    (tmp_path / "art_gateway.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    redirected._gateway.cache_clear()
    yield
    redirected._gateway.cache_clear()


@pytest.fixture
def client(stub):
    with openai.OpenAI(api_key="agent", base_url=f"{stub.url}/own/v1") as client:
        yield client


@pytest.fixture
async def async_client(stub):
    async with openai.AsyncOpenAI(api_key="agent", base_url=f"{stub.url}/own/v1") as client:
        yield client


def test_every_sync_way_of_asking_for_a_response_is_covered(stub, client):
    responses = client.responses
    with stub.rollout():
        assert responses.create(model="m", input="hello").output_text == "answer of r"
        assert responses.create(model="m", input="hello", tools=[TOOL]).output[0].name == "weather"
        events = list(responses.create(model="m", input="hello", stream=True))
        assert events[-1].response.output_text == "answer of r"
        with responses.stream(model="m", input="hello") as stream:
            assert stream.get_final_response().output_text == "answer of r"
        assert responses.parse(model="m", input="hello", text_format=City).output_parsed == City(city="r")
        assert responses.with_raw_response.create(model="m", input="hello").parse().output_text == "answer of r"
        with responses.with_streaming_response.create(model="m", input="hello", stream=True) as response:
            assert any("response.completed" in line for line in response.iter_lines())
    assert {asked.path for asked in stub.of("r")} == {"/rollouts/r/v1/responses"}
    assert len(stub.of("r")) == 7
    assert stub.of(None) == []


async def test_every_async_way_of_asking_for_a_response_is_covered(stub, async_client):
    responses = async_client.responses
    with stub.rollout():
        assert (await responses.create(model="m", input="hello")).output_text == "answer of r"
        stream = await responses.create(model="m", input="hello", stream=True)
        assert [event async for event in stream][-1].type == "response.completed"
        async with responses.stream(model="m", input="hello") as stream:
            assert (await stream.get_final_response()).output_text == "answer of r"
        parsed = await responses.parse(model="m", input="hello", text_format=City)
        assert parsed.output_parsed == City(city="r")
        raw = await responses.with_raw_response.create(model="m", input="hello")
        assert raw.parse().output_text == "answer of r"
    assert len(stub.of("r")) == 5
    assert stub.of(None) == []


async def test_completions_are_covered(stub, client, async_client):
    with stub.rollout():
        assert client.completions.create(model="m", prompt="hello").choices[0].text == "answer of r"
        words = [chunk.choices[0].text for chunk in client.completions.create(model="m", prompt="hello", stream=True)]
        assert words == ["answer", "of", "r"]
        assert (await async_client.completions.create(model="m", prompt="hello")).choices[0].text == "answer of r"
    assert {asked.path for asked in stub.of("r")} == {"/rollouts/r/v1/completions"}
    assert stub.of(None) == []


def test_what_is_named_in_passthrough_and_what_is_asked_for_outside_go_where_the_agent_sends_them(stub, client):
    with stub.rollout(passthrough=("judge",)):
        client.responses.create(model="judge", input="hello")
    client.responses.create(model="m", input="hello")
    assert [asked.path for asked in stub.asked] == ["/own/v1/responses"] * 2
    assert stub.of("r") == []
