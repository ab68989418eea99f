"""Every way to ask the OpenAI client for a chat completion lands at the rollout's address; nothing else is touched."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar

import openai
import pydantic
import pytest

import art_openai
from art_core.attribution import exempt, name_agents
from art_core.errors import CaptureError

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
EARLY = openai.OpenAI(api_key="agent", base_url="http://127.0.0.1:9/v1")
EARLY_RAW = EARLY.chat.completions.with_raw_response
"""Bound before anything is wrapped: such objects keep the methods that they were made with."""

art_openai.redirect_clients()


class City(pydantic.BaseModel):
    city: str


@pytest.fixture
def client(stub):
    with openai.OpenAI(api_key="agent", base_url=f"{stub.url}/own/v1", default_headers={"x-own": "secret"}) as client:
        yield client


@pytest.fixture
async def async_client(stub):
    async with openai.AsyncOpenAI(api_key="agent", base_url=f"{stub.url}/own/v1") as client:
        yield client


def test_a_call_outside_a_rollout_is_untouched(stub, client):
    assert client.chat.completions.create(model="m", messages=HELLO).choices[0].message.content == "answer of outside"
    (asked,) = stub.asked
    assert asked.path == "/own/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer agent"
    assert not [header for header in asked.headers if header.startswith("x-art")]


def test_a_call_inside_a_rollout_goes_to_its_address(stub, client):
    with stub.rollout("one"):
        answer = client.chat.completions.create(
            model="m", messages=HELLO, temperature=0, extra_headers={"x-mine": "1"}, extra_body={"seed": 3}
        )
    assert answer.choices[0].message.content == "answer of one"
    (asked,) = stub.of("one")
    assert asked.body == {"model": "m", "messages": HELLO, "temperature": 0, "seed": 3}
    assert asked.headers["authorization"] == "Bearer key-one"
    assert asked.headers["x-mine"] == "1"
    assert "x-own" not in asked.headers
    assert stub.of(None) == []


def test_clients_and_methods_made_before_the_wrap_are_covered(stub):
    with stub.rollout():
        assert EARLY.chat.completions.create(model="m", messages=HELLO).choices
        assert EARLY_RAW.create(model="m", messages=HELLO).parse().choices
    assert len(stub.of("r")) == 2


def test_every_sync_way_of_asking_is_covered(stub, client):
    chat = client.chat.completions
    with stub.rollout():
        words = [chunk.choices[0].delta.content for chunk in chat.create(model="m", messages=HELLO, stream=True)]
        assert "".join(filter(None, words)) == "answerofr"
        with chat.stream(model="m", messages=HELLO) as stream:
            assert stream.get_final_completion().choices[0].message.content == "answerofr"
        assert chat.parse(model="m", messages=HELLO, response_format=City).choices[0].message.parsed == City(city="r")
        assert client.beta.chat.completions.parse(model="m", messages=HELLO, response_format=City).choices
        assert chat.with_raw_response.create(model="m", messages=HELLO).parse().choices
        with chat.with_streaming_response.create(model="m", messages=HELLO, stream=True) as response:
            assert "[DONE]" in list(response.iter_lines())[-2]
        assert client.with_options(timeout=60).chat.completions.create(model="m", messages=HELLO, tools=[TOOL]).choices
        assert client.post("/chat/completions", cast_to=object, body={"model": "m", "messages": HELLO})
    assert len(stub.of("r")) == 8
    assert stub.of(None) == []


async def test_every_async_way_of_asking_is_covered(stub, async_client):
    chat = async_client.chat.completions
    with stub.rollout():
        assert (await chat.create(model="m", messages=HELLO)).choices
        stream = await chat.create(model="m", messages=HELLO, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
        async with chat.stream(model="m", messages=HELLO) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "answerofr"
        parsed = await chat.parse(model="m", messages=HELLO, response_format=City)
        assert parsed.choices[0].message.parsed == City(city="r")
        assert (await chat.with_raw_response.create(model="m", messages=HELLO)).parse().choices
        async with chat.with_streaming_response.create(model="m", messages=HELLO) as response:
            assert (await response.parse()).choices
    assert len(stub.of("r")) == 6
    assert stub.of(None) == []


async def test_whatever_the_agents_client_carries_stays_with_its_own_provider(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "mine")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-gateway-key: secret\nAuthorization: Bearer secret")
    art_openai.client._client.cache_clear()

    def no_request(request) -> None:
        raise AssertionError(f"the agent's own connections were used for {request.url}")

    hooks = {"event_hooks": {"request": [no_request]}}
    settings = {"api_key": "agent", "base_url": stub.url, "default_query": {"own": "1"}, "organization": "mine"}
    with stub.rollout(), openai.OpenAI(**settings, http_client=openai.DefaultHttpxClient(**hooks)) as client:
        assert client.chat.completions.create(model="m", messages=HELLO, extra_query={"mine": "1"}).choices
        other = client.with_options(api_key="other", base_url="http://127.0.0.1:9", default_headers={"x-own": "2"})
        assert other.chat.completions.create(model="m", messages=HELLO).choices
        assert client.copy().chat.completions.create(model="m", messages=HELLO).choices
    async with openai.AsyncOpenAI(**settings, http_client=openai.DefaultAsyncHttpxClient()) as client:
        with stub.rollout():
            assert (await client.chat.completions.create(model="m", messages=HELLO)).choices
    assert len(stub.of("r")) == 4
    assert {asked.headers["authorization"] for asked in stub.asked} == {"Bearer key-r"}
    kept = {"x-own", "x-gateway-key", "openai-organization", "openai-project"}
    assert not kept & {name for asked in stub.asked for name in asked.headers}


def test_the_librarys_own_functions_are_a_client_too(stub, monkeypatch):
    for name, value in (("api_key", "agent"), ("base_url", f"{stub.url}/own/v1/"), ("_client", None)):
        monkeypatch.setattr(openai, name, value, raising=False)
    with stub.rollout():
        assert openai.chat.completions.create(model="m", messages=HELLO).choices
    openai.chat.completions.create(model="m", messages=HELLO)
    openai._client.close()
    assert [asked.path for asked in stub.asked] == ["/rollouts/r/v1/chat/completions", "/own/v1/chat/completions"]


async def test_azure_clients_need_no_token_and_no_deployment_inside_a_rollout(stub):
    def no_token() -> str:
        raise AssertionError("the agent's token was asked for")

    settings = {"azure_endpoint": stub.url, "api_version": "2025-01-01", "azure_ad_token_provider": no_token}
    with stub.rollout(), openai.AzureOpenAI(**settings) as client:
        assert client.chat.completions.create(model="deployed", messages=HELLO).choices
    async with openai.AsyncAzureOpenAI(**settings, azure_deployment="deployed") as client:
        with stub.rollout():
            assert (await client.chat.completions.create(model="deployed", messages=HELLO)).choices
    assert [asked.path for asked in stub.asked] == ["/rollouts/r/v1/chat/completions"] * 2


async def test_the_tokens_of_a_prompt_are_counted_by_the_policy(stub):
    with stub.rollout(), openai.OpenAI(api_key="agent") as client:
        client.responses.input_tokens.count(model="m", input="secret")
    async with openai.AsyncOpenAI(api_key="agent") as client:
        with stub.rollout():
            await client.responses.input_tokens.count(model="m", input="secret")
    assert [asked.path for asked in stub.asked] == ["/rollouts/r/v1/responses/input_tokens"] * 2


def test_named_models_embeddings_and_exempt_calls_go_where_the_agent_sends_them(stub, client):
    with stub.rollout(passthrough=("judge",)):
        client.chat.completions.create(model="judge", messages=HELLO)
        client.embeddings.create(model="m", input="x", encoding_format="float")
        client.models.list()
        with exempt():
            client.chat.completions.create(model="m", messages=HELLO)
    assert stub.of("r") == []
    assert len(stub.of(None)) == 4


def test_a_model_that_is_named_with_its_provider_passes_through(stub, client):
    with stub.rollout(passthrough=("openai/judge",)):
        client.chat.completions.create(model="judge", messages=HELLO)
    assert len(stub.of(None)) == 1


def test_what_cannot_be_recorded_is_an_error_that_says_what_to_do(stub, client, monkeypatch):
    monkeypatch.setattr("art_openai.client._gateway", lambda: False)
    with stub.rollout(passthrough=("free",)):
        with pytest.raises(CaptureError, match=r"/responses inside a rollout.*pip install -e integrations/art-gateway"):
            client.responses.create(model="m", input="hello")
        with pytest.raises(CaptureError, match=r"/completions inside.*integrations/art-gateway.*passthrough=\['m'\]"):
            client.completions.create(model="m", prompt="hello")
        with pytest.raises(CaptureError, match=r"/threads/runs inside a rollout.*chat\.completions"):
            client.post("/threads/runs", cast_to=object, body={"model": "m"})
        with pytest.raises(CaptureError, match="WebSocket"):
            client.responses.connect()
        client.completions.create(model="free", prompt="hello")
    assert [asked.path for asked in stub.asked] == ["/own/v1/completions"]


def test_a_retry_is_the_same_request_and_a_new_call_is_another(stub, client):
    with stub.rollout():
        stub.failures = 1
        client.chat.completions.create(model="m", messages=HELLO)
        client.chat.completions.create(model="m", messages=HELLO)
    first, again, other = (asked.headers["x-art-request-id"] for asked in stub.of("r"))
    assert first == again != other


def test_the_agents_own_limit_on_retries_counts(stub, client):
    stub.failures = 2
    with stub.rollout(), pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=0).chat.completions.create(model="m", messages=HELLO)
    assert len(stub.of("r")) == 1


def test_the_caller_is_named_where_the_framework_knows(stub, client):
    caller = ContextVar("caller", default=None)
    name_agents(caller.get)
    with stub.rollout():
        for name in ("planner", "Prüfer", None):
            token = caller.set(name)
            client.chat.completions.create(model="m", messages=HELLO)
            caller.reset(token)
    assert [asked.headers.get("x-art-agent") for asked in stub.of("r")] == ["planner", "Pr%C3%BCfer", None]


async def test_concurrent_runs_in_tasks_and_threads_stay_apart(stub, client, async_client):
    async def run(rollout_id: str) -> list[str]:
        with stub.rollout(rollout_id):
            first = await async_client.chat.completions.create(model="m", messages=HELLO)
            second = await asyncio.to_thread(client.chat.completions.create, model="m", messages=HELLO)
        return [answer.choices[0].message.content for answer in (first, second)]

    answers = await asyncio.gather(*(run(f"r{i}") for i in range(32)))
    assert answers == [[f"answer of r{i}"] * 2 for i in range(32)]


@pytest.mark.parametrize("made", ["before", "inside"])
async def test_pools_and_threads_made_before_or_inside_a_rollout_ask_for_it(stub, client, made):
    def ask() -> str:
        return client.chat.completions.create(model="m", messages=HELLO).choices[0].message.content

    def on_a_thread() -> list[str]:
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start()
        thread.join()
        return answers

    with ExitStack() as stack:
        early = stack.enter_context(ThreadPoolExecutor(2)) if made == "before" else None
        if early:
            assert early.submit(ask).result() == "answer of outside"
        with stub.rollout("one"):
            pool = early or stack.enter_context(ThreadPoolExecutor(2))
            answers = [pool.submit(ask).result(), *pool.map(lambda _: ask(), range(2)), *on_a_thread()]
            answers.append(await asyncio.get_running_loop().run_in_executor(pool, ask))
            answers.append(await asyncio.to_thread(ask))
        assert answers == ["answer of one"] * 6
        assert pool.submit(ask).result() == "answer of outside"


def test_a_client_with_a_rollouts_own_address_is_recorded_on_any_thread(stub):
    go, done, answers = threading.Event(), threading.Event(), []

    def worker() -> None:
        while go.wait() and len(answers) < 2:
            go.clear()
            base_url = stub.address("one").base_url if answers else "http://127.0.0.1:9"
            with openai.OpenAI(api_key="agent", base_url=base_url) as client:
                try:
                    answer = client.chat.completions.create(model="m", messages=HELLO)
                    answers.append(answer.choices[0].message.content)
                except CaptureError as error:
                    answers.append(str(error))
            done.set()

    thread = threading.Thread(target=worker)
    thread.start()
    with stub.rollout("one"), stub.rollout("two"):
        for _ in range(2):
            go.set()
            done.wait()
            done.clear()
    go.set()
    thread.join()
    assert "base_url=address.base_url" in answers[0]
    assert answers[1] == "answer of one"


def test_a_passed_through_model_is_not_answered_by_the_policy_because_its_client_has_no_other_address(stub):
    with (
        stub.rollout(passthrough=("judge",)) as address,
        openai.OpenAI(api_key="k", base_url=address.base_url) as client,
        pytest.raises(CaptureError, match="base_url of its own provider"),
    ):
        client.chat.completions.create(model="judge", messages=HELLO)
    assert stub.asked == []


def test_every_event_loop_has_its_own_connections(stub):
    async def ask(rollout_id: str) -> str:
        async with openai.AsyncOpenAI(api_key="agent", base_url=stub.url) as client:
            with stub.rollout(rollout_id):
                answer = await client.chat.completions.create(model="m", messages=HELLO)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: asyncio.run(ask(f"r{i}")), range(8)))
    assert answers == [f"answer of r{i}" for i in range(8)]


def test_wrapping_twice_wraps_once():
    request, async_request = openai.OpenAI.request, openai.AsyncOpenAI.request
    art_openai.redirect_clients()
    assert (openai.OpenAI.request, openai.AsyncOpenAI.request) == (request, async_request)


@pytest.mark.system
def test_importing_the_plugin_does_not_import_openai():
    code = "import art_openai, sys; assert 'openai' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
