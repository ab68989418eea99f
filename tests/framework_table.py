"""The table of frameworks in ``docs/frameworks.md``, and the agents' parts that every framework's tests share."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic

import art_core as art
from art_core.testing import AdapterReport, CountingLearner, FakeEngine, check_adapter
from art_core.testing.provider import scripted_reply
from art_core.types import Trajectory

Make = Callable[[str], Callable[[str], Any]]
"""Makes an agent that asks at a base URL."""

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
DISTRIBUTIONS = {
    "OpenAI client": "openai",
    "OpenAI client, Responses": "openai",
    "OpenAI Agents SDK, chat completions": "openai-agents",
    "OpenAI Agents SDK, Responses": "openai-agents",
    "LangChain, ChatOpenAI": "langchain-openai",
    "LangChain, ChatAnthropic": "langchain-anthropic",
    "LangGraph": "langgraph",
    "PydanticAI": "pydantic-ai-slim",
    "LiteLLM": "litellm",
    "Anthropic client": "anthropic",
    "google-genai": "google-genai",
    "google-genai, Vertex AI": "google-genai",
    "Ollama client": "ollama",
    "boto3, Bedrock Converse": "boto3",
    "CrewAI": "crewai",
    "ADK, Gemini": "google-adk",
    "ADK, LiteLLM": "google-adk",
    "LlamaIndex": "llama-index-core",
    "smolagents": "smolagents",
    "DSPy": "dspy",
    "Agno": "agno",
    "AutoGen": "autogen-agentchat",
    "Microsoft Agent Framework": "agent-framework-core",
    "Haystack": "haystack-ai",
    "Deep Agents": "deepagents",
    "Claude Agent SDK": "claude-agent-sdk",
    "Strands": "strands-agents",
    "Strands, Bedrock": "strands-agents",
}
"""Framework -> what is installed of it. Those that are missing here are called as their distribution is."""
WRITE = os.environ.get("WRITE_FRAMEWORKS") == "1"


class City(pydantic.BaseModel):
    """A city."""

    city: str


def rain(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation that begins with ``text``."""
    return [{"role": "user", "content": text}]


def threaded(blocking: Make) -> Make:
    """Return what makes agents that run two of ``blocking`` in threads."""

    def make(base_url):
        ask = blocking(base_url)

        def agent(text):
            with ThreadPoolExecutor(2) as pool:
                return list(pool.map(ask, [text, f"{text} Again."]))

        return agent

    return make


def nested(inner: Make, outer: Make) -> Make:
    """Return what makes agents that give the answer of one to the other."""

    def make(base_url):
        ask_inner, ask_outer = inner(base_url), outer(base_url)

        async def agent(text):
            return await ask_outer(await ask_inner(text))

        return agent

    return make


def failing(asynchronous: Make) -> Make:
    """Return what makes agents that fail with what they were answered."""

    def make(base_url):
        ask = asynchronous(base_url)

        async def agent(text):
            raise LookupError(await ask(text))

        return agent

    return make


def agents_of(asynchronous: Make, blocking: Make | None, streaming: Make) -> dict[str, Make]:
    """Return the kinds of agents that these make, alone and together."""
    made = {"async": asynchronous, "stream": streaming, "failing": failing(asynchronous)}
    made["nested agents"] = nested(asynchronous, asynchronous)
    return made | ({"sync": blocking, "threads": threaded(blocking)} if blocking else {})


async def check_programs(agents: dict[str, Make], **checked: Any) -> AdapterReport:
    """Do what ``check_adapter`` does, for agents that start a program for each rollout.

    Eight run at once where it matters most; of the other kinds four, because each program takes a second of CPU to start.
    """
    many = {kind: make for kind, make in agents.items() if kind in ("async", "stream", "tools")}
    few = {kind: make for kind, make in agents.items() if kind not in many}
    first = await check_adapter(many, **checked, runs=8)
    second = await check_adapter(few, **checked, runs=4)
    return replace(second, kinds={**second.kinds, **{kind: first.kinds[kind] for kind in many}})


async def collected(folder: Path, agent: object, reply: Any = scripted_reply, **options: Any) -> list[Trajectory]:
    """Return the rollouts of a task, two unless ``group_size`` says otherwise."""
    (folder / "config.json").write_text("{}")
    parts = {"engine": FakeEngine(reply), "learner": CountingLearner()}
    async with art.open_run(folder / "run", model=folder, **parts) as run:
        [group] = await run.collect(agent, ["Please do task-000."], **{"group_size": 2, **options})
    return group.trajectories


def assert_documented(report: AdapterReport, installed: str | None = None) -> None:
    """The report is a row of the documented table, so the table cannot say anything else than what was checked.

    ``installed`` is the version, if it isn't a distribution's. With ``WRITE_FRAMEWORKS=1`` the row is written there, in the place
    of the one before or as the first.
    """
    installed = installed or version(DISTRIBUTIONS.get(report.framework, report.framework))
    row = f"{report} {'yes' if report.checks['agent names'] == 'yes' else 'no'} | {installed} |"
    names, rule = AdapterReport.header().splitlines()
    page, header = PAGE.read_text(), f"{names} agent names | version |\n{rule} --- | --- |\n"
    if WRITE:
        before = next((line for line in page.splitlines() if line.startswith(f"| {report.framework} | ")), None)
        PAGE.write_text(page.replace(before, row) if before else page.replace(header, f"{header}{row}\n"))
    else:
        assert header in page
        assert f"\n{row}\n" in page, "WRITE_FRAMEWORKS=1 writes it into the table"
