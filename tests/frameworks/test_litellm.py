"""LiteLLM's calls are recorded, whichever provider a model's prefix names; several clients in one agent make one trajectory."""

import gc
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before it is imported: it downloads nothing

import anthropic
import litellm
import openai
import pytest
from agents import Agent, RunConfig, Runner
from agents.extensions.models.litellm_model import LitellmModel
from google import genai

import art_audit
import art_core as art
import art_http
from art_core.testing import CountingLearner, FakeEngine, check_adapter
from art_core.testing.provider import PlainProvider
from art_gateway.dialects import Messages
from framework_table import City, agents_of, assert_documented, rain, user

KEYS = "OPENAI GROQ DEEPSEEK MISTRAL XAI OPENROUTER FIREWORKS_AI GEMINI ANTHROPIC TOGETHERAI CEREBRAS COHERE PERPLEXITYAI AZURE"
MODELS = [
    "openai/m", "azure/m", "groq/m", "deepseek/m", "mistral/m", "xai/m", "openrouter/a/m", "hosted_vllm/m", "ollama_chat/m",
    "fireworks_ai/a/m", "gemini/m", "anthropic/m", "together_ai/m", "cerebras/m", "perplexity/m",
]  # fmt: skip
BASES = {"hosted_vllm/m": "http://vllm.invalid/v1", "azure/m": "https://mine.openai.azure.com"}
TOOL = {
    "type": "function",
    "function": {"name": "rain", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:litellm"),
    pytest.mark.filterwarnings("ignore:coroutine 'Logging.async_success_handler'"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in KEYS.split():
        monkeypatch.setenv(f"{name}_API_KEY", f"sk-{name.lower()}")
    monkeypatch.setenv("AZURE_API_VERSION", "2025-01-01")
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    gc.freeze()  # so that only what the test has made is visited
    yield
    gc.collect()  # LiteLLM closes no clients, and other tests would be blamed
    gc.unfreeze()


def asked(base_url, **options):
    return {"model": "openai/m", "api_base": base_url, "api_key": "k", "max_retries": 0, **options}


def blocking(base_url):
    return lambda text: litellm.completion(**asked(base_url), messages=user(text)).choices[0].message.content


def asynchronous(base_url, **options):
    async def agent(text):
        answer = await litellm.acompletion(**asked(base_url, **options), messages=user(text))
        return answer.choices[0].message.content

    return agent


def streaming(base_url):
    async def agent(text):
        parts = await litellm.acompletion(**asked(base_url), messages=user(text), stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    return agent


def with_tools(base_url):
    async def agent(text):
        messages = user(text)
        while True:
            answer = await litellm.acompletion(**asked(base_url), messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": rain("x")} for call in message.tool_calls]

    return agent


@pytest.mark.usefixtures("trap_network")
async def test_functions_that_use_litellm_keep_every_rule():
    agents = agents_of(asynchronous, blocking, streaming)
    agents |= {"tools": with_tools, "structured output": lambda url: asynchronous(url, response_format=City)}
    refusals = {"BadRequestError": "BadRequestError"}
    checked = {"framework": "LiteLLM", "plugin": art_http, "packages": {"litellm"}, "refusals": refusals}
    assert_documented(await check_adapter(agents, **checked))


@pytest.mark.usefixtures("trap_network")
@pytest.mark.parametrize("model", MODELS)
async def test_a_model_of_any_provider_is_answered_by_the_policy(tmp_path, model):
    settings = {"model": model, "api_base": BASES.get(model)}

    async def agent(task):
        whole = await litellm.acompletion(**settings, messages=user(task))
        parts = await litellm.acompletion(**settings, messages=user(task), stream=True)
        streamed = "".join([part.choices[0].delta.content or "" async for part in parts])
        return [whole.choices[0].message.content, streamed]

    trajectory = await run_once(tmp_path, agent)
    assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, ["four"] * 2, 2)


@pytest.mark.usefixtures("trap_network")
@pytest.mark.parametrize("model", ["openai/m", "gemini/m", "anthropic/m"])
async def test_agents_of_the_openai_agents_sdk_that_use_litellm_are_answered_by_the_policy(tmp_path, model):
    agent = Agent("asked", model=LitellmModel(model))

    async def streamed(task):
        result = Runner.run_streamed(agent, task, run_config=RunConfig(tracing_disabled=True))
        async for _ in result.stream_events():
            pass
        return result.final_output

    for way in (agent, streamed):
        trajectory = await run_once(tmp_path / type(way).__name__, way)
        assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, "four", 1)


@pytest.mark.usefixtures("trap_network")
@pytest.mark.parametrize("model", ["openai/m", "openai/responses/m", "gemini/m", "anthropic/m"])
async def test_its_responses_are_answered_by_the_policy(tmp_path, model):
    async def agent(task):
        return (await litellm.aresponses(model=model, input=task)).output[-1].content[0].text

    trajectory = await run_once(tmp_path, agent)
    assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, "four", 1)


@pytest.mark.usefixtures("trap_network")
@pytest.mark.parametrize(
    ("model", "path"), [("cohere_chat/m", "api.cohere.com/v2/chat"), ("ollama/m", "/api/generate")]
)
async def test_an_api_that_no_dialect_answers_is_refused_by_name(tmp_path, model, path):
    async def agent(task):
        await litellm.acompletion(model=model, messages=user(task))

    trajectory = await run_once(tmp_path, agent)
    assert path in trajectory.error
    assert "refused before it left" in trajectory.error and "no installed dialect answers this API" in trajectory.error


@pytest.fixture
def cache(monkeypatch):
    kept = litellm.Cache(type="local")
    monkeypatch.setattr(litellm, "cache", kept)
    return kept.cache.cache_dict


async def ask_twice_in_each_way(task, **asked):
    answers = [litellm.completion(messages=user(task), **asked) for _ in range(2)]
    answers += [await litellm.acompletion(messages=user(task), **asked) for _ in range(2)]
    texts = [answer.choices[0].message.content for answer in answers]
    for _ in range(2):
        parts = await litellm.acompletion(messages=user(task), stream=True, **asked)
        texts.append("".join([part.choices[0].delta.content or "" async for part in parts]))
    return texts


@pytest.mark.usefixtures("trap_network")
@pytest.mark.parametrize("model", ["openai/m", "anthropic/m"])
async def test_its_cache_neither_answers_nor_keeps_a_call_of_a_rollout(tmp_path, cache, model):
    async def agent(task):
        return await ask_twice_in_each_way(task, model=model)

    trajectory = await run_once(tmp_path, agent)
    assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, ["four"] * 6, 6)
    assert not cache


async def test_its_cache_keeps_the_answers_of_a_model_that_passes_through(tmp_path, cache):
    provider = PlainProvider(FakeEngine("the provider's"), {})
    with provider.running():
        trajectory = await run_once(tmp_path, blocking(provider.base_url), passthrough=["m"])
    assert (trajectory.output, trajectory.calls, len(cache)) == ("the provider's", (), 1)


async def run_once(folder, agent, **settings):
    async with art.open_run(folder / "run", engine=FakeEngine("four"), learner=CountingLearner(), **settings) as run:
        [group] = await run.collect(agent, ["Say four."], group_size=1, allow_no_calls=True)
        return group.trajectories[0]


def ask_openai(text):
    with openai.OpenAI() as client:
        return client.chat.completions.create(model="gpt", messages=user(text)).choices[0].message.content


def ask_anthropic(text):
    with anthropic.Anthropic() as client:
        return client.messages.create(model="claude", max_tokens=8, messages=user(text)).content[0].text


def ask_gemini(text):
    with genai.Client() as client:
        return client.models.generate_content(model="gemini", contents=text, config={"max_output_tokens": 8}).text


def ask_litellm(text):
    return litellm.completion("groq/llama", user(text), max_tokens=8).choices[0].message.content


def four_clients(task):
    return [ask(task) for ask in (ask_openai, ask_anthropic, ask_gemini, ask_litellm)]


@pytest.mark.usefixtures("trap_network")
async def test_an_agent_with_four_clients_makes_one_trajectory_that_the_audit_confirms(tmp_path):
    async with art.open_run(tmp_path / "run", model="tiny", max_tokens=8) as run:
        groups = await run.collect(four_clients, ["Find the mail of Anna.", "Find the mail of Ben."], group_size=2)
    for trajectory in (each for group in groups for each in group.trajectories):
        assert [call.request["model"] for call in trajectory.calls] == ["gpt", "claude", "gemini", "llama"]
        assert all(call.prompt_ids and len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)
    report = art_audit.audit(tmp_path / "run", progress=False)
    assert (report.problems, report.calls) == ((), 16)


async def test_of_four_clients_the_one_that_passes_through_is_answered_by_its_provider(tmp_path, monkeypatch):
    provider = PlainProvider(FakeEngine("the provider's"), {"/v1/messages": Messages()})
    with provider.running():
        monkeypatch.setenv("ANTHROPIC_BASE_URL", provider.base_url.removesuffix("/v1"))
        trajectory = await run_once(tmp_path, four_clients, passthrough=["claude"])
    assert trajectory.output == ["four", "the provider's", "four", "four"]
    assert [call.request["model"] for call in trajectory.calls] == ["gpt", "gemini", "llama"]
    assert [asked.path for asked in provider.requests] == ["/v1/messages"]
