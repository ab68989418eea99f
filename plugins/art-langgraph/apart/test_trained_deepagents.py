"""A deep agent that delegates to a researcher with a search tool is trained as it is."""

import itertools

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

from scripted_training import call_of, two_steps

PAGES = {"rain": "Rome has 79 rainy days in a year."}
ENDINGS = itertools.count()


def search(word: str) -> str:
    """Search the pages for a word."""
    return PAGES.get(word, "nothing found")


RESEARCHER = {
    "name": "researcher",
    "description": "Finds things out.",
    "system_prompt": "You are a researcher. Search, then answer in one sentence.",
    "tools": [search],
}


def reply(request):
    """The agent asks the researcher, who searches; answers differ, so that there is something to learn."""
    if request["messages"][-1]["role"] == "tool":
        return {"content": "79 days" + " or so" * next(ENDINGS)}
    if "You are a researcher." in str(request["messages"][0]):
        return call_of("search", word="rain")
    return call_of("task", description="How often does it rain in Rome?", subagent_type="researcher")


def test_two_steps_train_the_agent_and_its_researcher(tmp_path):
    model = ChatOpenAI(model="gpt-5.6-luna", api_key="unused", base_url="http://127.0.0.1:9")
    agent = create_deep_agent(model, system_prompt="Delegate research.", subagents=[RESEARCHER])
    task = "How often does it rain in Rome?"
    rollouts = two_steps(agent, task, reply, tmp_path, reward=lambda it: len(it.calls[-1].response["content"]))
    researcher = "tools/researcher/model"
    assert [[call.agent for call in it.calls] for it in rollouts] == [["model", researcher, researcher, "model"]] * 4
    assert all("79 rainy days" in str(it.calls[2].request["messages"]) for it in rollouts)
