"""ADK's agents keep every rule of an adapter, with LiteLLM's models and with Google's."""

import pytest
from google.adk import Workflow
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models import Gemini
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools import AgentTool
from google.adk.workflow import START
from google.genai import types

import art_google_adk
from art_core.testing import check_adapter
from framework_table import City, assert_documented, failing, rain, threaded


def gemini(base_url):
    return Gemini(model="m", base_url=base_url)


def lite_llm(base_url):
    return LiteLlm(model="openai/m", api_base=base_url, api_key="k")


def agents_of(model):
    def agent_of(base_url, name="weather_man", **settings):
        return LlmAgent(name=name, model=model(base_url), instruction="Be brief.", **settings)

    def blocking(base_url):
        def agent(text):
            runner = InMemoryRunner(agent_of(base_url))
            runner.auto_create_session = True
            return text_of(runner.run(user_id="u", session_id="s", new_message=content(text)))

        return agent

    def asking(base_url, mode=StreamingMode.NONE):
        async def agent(text):
            runner = InMemoryRunner(agent_of(base_url))
            runner.auto_create_session = True
            settings = {"session_id": "s", "run_config": RunConfig(streaming_mode=mode)}
            return text_of(
                [event async for event in runner.run_async(user_id="u", new_message=content(text), **settings)]
            )

        return agent

    def delegating(base_url):
        helper = AgentTool(agent_of(base_url, "helper", description="Helps."))
        boss = agent_of(base_url, "boss", tools=[helper])
        return SequentialAgent(name="team", sub_agents=[boss, agent_of(base_url, "critic")])

    def shouting(base_url):
        return App(name="shouting", root_agent=Workflow(name="team", edges=[(START, agent_of(base_url), shout)]))

    return {
        "sync": blocking,
        "async": shouting,
        "stream": lambda base_url: asking(base_url, StreamingMode.SSE),
        "tools": lambda base_url: agent_of(base_url, tools=[rain]),
        "structured output": lambda base_url: agent_of(base_url, output_schema=City),
        "threads": threaded(blocking),
        "nested agents": delegating,
        "failing": failing(asking),
    }


def shout(node_input: str) -> str:
    return node_input.upper()


def content(text):
    return types.Content(role="user", parts=[types.Part(text=text)])


def text_of(events):
    *_, last = (event for event in events if event.is_final_response())
    return last.content.parts[0].text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("framework, model", [("ADK, Gemini", gemini), ("ADK, LiteLLM", lite_llm)])
async def test_agents_keep_every_rule_of_an_adapter(framework, model, monkeypatch):
    monkeypatch.setenv("GOOGLE_API_KEY", "unused")
    names = {"team/boss", "team/boss/helper", "team/critic"}
    checked = {"framework": framework, "plugin": art_google_adk, "packages": {"google.adk"}, "agent_names": names}
    assert_documented(await check_adapter(agents_of(model), **checked))
