"""CrewAI's crews, agents and flows keep every rule of an adapter."""

import crewai
import pytest
from crewai.flow import start
from crewai.tools import tool

import art_crewai
from art_core.errors import AgentError
from art_core.testing import check_adapter
from framework_table import City, assert_documented, collected, rain


def agent_of(base_url, role="weather man", tools=(), **settings):
    llm = crewai.LLM(model="openai/m", base_url=base_url, api_key="k", **settings)
    return crewai.Agent(role=role, goal="tell", backstory="b", llm=llm, tools=list(tools))


def crew_of(agent, task=None, listed=True, **settings):
    tasks = [crewai.Task(description="{task}", expected_output="text", agent=agent, **task or {})]
    return crewai.Crew(agents=[agent] if listed else [], tasks=tasks, **settings)


def blocking(base_url):
    return lambda text: crew_of(agent_of(base_url)).kickoff({"task": text}).raw


def asynchronous(base_url):
    return crew_of(agent_of(base_url))


def streaming(base_url):
    return crew_of(agent_of(base_url, stream=True), stream=True)


def with_tools(base_url):
    return agent_of(base_url, tools=[tool(rain)])


def structured(base_url):
    return crew_of(agent_of(base_url), {"output_pydantic": City})


def in_threads(base_url):
    def agent(text):
        # Each task in a thread of its own.
        agents = [agent_of(base_url, role) for role in ("a", "b", "c")]
        tasks = [
            crewai.Task(description=text, expected_output="text", agent=agent, async_execution=agent is not agents[-1])
            for agent in agents
        ]
        return crewai.Crew(agents=agents, tasks=tasks).kickoff().raw

    return agent


def delegating(base_url):
    class Delegating(crewai.Flow):
        @start()
        async def begin(self):
            helper = agent_of(base_url, "helper")

            @tool
            def ask(city: str) -> str:
                """Ask the helper."""
                return helper.kickoff(f"{city}?").raw

            output = await crew_of(agent_of(base_url, "boss", [ask])).akickoff(self.state)
            return output.raw

    return lambda: Delegating()


def failing(base_url):
    async def agent(text):
        raise LookupError((await agent_of(base_url).akickoff(text)).raw)

    return agent


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": in_threads, "nested agents": delegating, "failing": failing}
    names = {"boss", "boss/helper"}
    checked = {"framework": "CrewAI", "plugin": art_crewai, "packages": {"crewai"}, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked))


def test_a_flow_that_rollouts_would_share_is_refused():
    with pytest.raises(AgentError, match=r"keeps its conversation.*def agent\(\): return Flow"):
        art_crewai.adapt_agent(crewai.Flow(), shared=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_crew_that_plans_is_run_as_it_is(tmp_path, stream):
    agent = agent_of("http://127.0.0.1:9/v1", "writer", stream=stream)
    crew = crew_of(agent, planning=True, planning_llm=agent.llm, stream=stream)
    trajectories = await collected(tmp_path, crew)
    assert [each.output for each in trajectories] == ["answer to task-000"] * 2
    names = ["Task Execution Planner", "writer"]
    assert [[call.agent for call in each.calls] for each in trajectories] == [names] * 2


async def test_a_crew_that_cannot_be_copied_says_how_to_pass_it(tmp_path):
    def make():
        return crew_of(agent_of("http://127.0.0.1:9/v1", "writer"), listed=False)

    with pytest.raises(AgentError, match=r"Crew can't be copied.*Agent is missing.*def agent\(\): return Crew"):
        await collected(tmp_path, make())
    trajectories = await collected(tmp_path, make)
    assert [each.output for each in trajectories] == ["answer to task-000"] * 2
